"""Ettin encoder, 150M parameters, documents packed into sequences of 1024, on one node of 8 H100.

ModernBERT (https://arxiv.org/abs/2412.13663) of the base size, as Ettin trains it
(https://arxiv.org/abs/2507.11412): StableAdamW, 1.7 trillion tokens, with the final decay.

Guide: docs/guides/masked-lm.md. A specialist would increase the batch from 768 to 4,608 sequences
during the first steps, which the paper does and a run cannot, and continue with sequences of 8192.

    jaxtrain train ettin_150m_h100_8 --data.path TEXT
"""

from jaxtrain import config
from jaxtrain.data import text
from jaxtrain.models import modern_bert

run = config.Run(
    seed=42,
    precision="bfloat16",
    model=modern_bert.Config(
        vocab_size=50_368,
        sequence_length=1024,
        hidden=768,
        layers=22,
        heads=12,
        ff=1152,
        mask_fraction=0.3,
    ),
    data=text.Masked(
        batch_size=4608,  # 64 sequences x 8 GPUs x 9
        prefetch=2,
        tokenizer_kind="bpe",
    ),
    optim=config.Optim(
        peak_lr=8e-4,
        schedule="trapezoid",
        warmup_steps=640,  # 3 billion tokens
        warmdown_fraction=0.05,
        warmdown_shape="sqrt",
        b1=0.9,
        b2=0.98,
        eps=1e-6,
        clip_updates=True,
        weight_decay=1e-5,
        max_grad_norm=1.0,
        accumulate=9,
    ),
    mesh=config.Mesh(data=1, fsdp=8, shard="optimizer"),
    loop=config.Loop(
        steps=360_000, log_every=50, eval_every=2000, eval_examples=9216, hang_timeout_s=3600.0
    ),
    checkpoint=config.Checkpoint(every=2000, keep=5, best_metric="val/loss"),
)
