"""GPT of 2026, depth 12, 286M parameters, sequences of 2048, on one H100 (80 GB).

Trains on 12 tokens for each of the 110M parameters in matrices, with Muon and AdamW.

Guide: docs/guides/gpt.md. Model, rates, and schedule are nanochat's of July 2026
(https://github.com/karpathy/nanochat); length, batch, rates, and weight decay follow from the depth
by its rules. A specialist would start from them as they are.

    jaxtrain train gpt_2026_h100_1 --data.path TEXT
"""

from jaxtrain import config
from jaxtrain.data import text
from jaxtrain.models import gpt

model = gpt.Config.of_2026(vocab_size=32_768, sequence_length=2048, depth=12)
scaling = model.scaling(tokens_per_parameter=12)

run = config.Run(
    precision="bfloat16",
    model=model,
    data=text.Causal(batch_size=scaling.batch_tokens // model.sequence_length, fit_documents=True),
    optim=config.Optim(
        peak_lr=6e-4,  # of no parameter
        schedule="trapezoid",
        warmup_steps=40,
        warmdown_fraction=0.65,
        warmdown_to=0.05,
        b1=0.8,
        b2=0.95,
        eps=1e-10,
        weight_decay=0.28 * scaling.decay_scale,
        accumulate=4,  # microbatches of 64 sequences
        max_grad_norm=None,
        muon=config.Muon(
            peak_lr=0.02 * scaling.rate_scale,
            embedding_lr=0.3 * scaling.rate_scale,
            unembedding_lr=0.008 * scaling.rate_scale,
            scalar_lr=0.5 * scaling.rate_scale,
            momentum=0.97,
            momentum_steps=400,
            last_momentum=0.9,
            equilibrate=True,
            polar_express=True,
            variance_b2=0.9,
            cautious_decay=True,
        ),
    ),
    mesh=config.Mesh(data=1, fsdp=1, shard="optimizer"),
    loop=config.Loop(
        steps=scaling.steps,
        log_every=10,
        eval_every=250,
        eval_examples=2048,  # 4.2 million tokens
    ),
    checkpoint=config.Checkpoint(every=1000, keep=3, best_metric="val/bits_per_byte"),
)
