"""GPT of depth 12, 186M parameters, sequences of 1536, on one GPU of 32 GB.

Trains on 20 tokens per parameter, with Muon and AdamW.

Model and schedule are nanochat's of October 2025 (https://github.com/karpathy/nanochat). Its rates
(0.02, 0.2, 0.004) are for 524,288 tokens per step; for 24,576, they are multiplied by the root of
the ratio, as nanochat does since 2026.

Guide: docs/guides/gpt.md. A specialist would start from these values.

    jaxtrain train gpt_32gb_conservative --data.path TEXT
"""

from jaxtrain import config
from jaxtrain.data import text
from jaxtrain.models import gpt

_scale = (16 * 1536 / 2**19) ** 0.5

run = config.Run(
    precision="bfloat16",
    model=gpt.Config(vocab_size=65_536, sequence_length=1536, depth=12),
    data=text.Causal(batch_size=16),
    optim=config.Optim(
        peak_lr=6e-4,  # AdamW, except embedding and output layer
        schedule="trapezoid",
        warmup_fraction=0.0,
        warmdown_fraction=0.2,
        b1=0.8,
        b2=0.95,
        eps=1e-10,
        weight_decay=0.0,
        accumulate=2,  # microbatches of 8 sequences x 2
        max_grad_norm=1.0,
        muon=config.Muon(
            peak_lr=0.02 * _scale, embedding_lr=0.2 * _scale, unembedding_lr=0.004 * _scale
        ),
    ),
    mesh=config.Mesh(data=1, fsdp=1, shard="optimizer"),
    loop=config.Loop(tokens_per_param=20, log_every=10, eval_every=250, eval_examples=1024),
    checkpoint=config.Checkpoint(every=1000, keep=3, best_metric="val/bits_per_byte"),
)
