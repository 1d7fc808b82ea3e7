"""Llama-style model, 58.5M parameters, sequences of 2048, on one A6000 (48 GB).

26 billion tokens, 450 per parameter, need no dropout, and so small a model learns fast. The guide
that this follows has the rate 3e-4, dropout 0.1, and decay 0.01.

Guide: docs/guides/gpt.md. A specialist would start from these values.

jaxtrain train a6000_medium --data.path TEXT
"""

from jaxtrain import config
from jaxtrain.data import text
from jaxtrain.models import llama

run = config.Run(
    precision="bfloat16",
    model=llama.Config(
        vocab_size=20_000,
        sequence_length=2048,
        hidden=512,
        layers=16,
        heads=16,
        kv_heads=4,
        ff=1536,
        dropout=0.0,
    ),
    data=text.Causal(batch_size=128, prefetch=4),  # 262,144 tokens
    optim=config.Optim(
        peak_lr=1e-3,
        schedule="cosine",
        warmup_steps=4000,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        accumulate=4,  # microbatches of 32 sequences x 4
        max_grad_norm=1.0,
    ),
    mesh=config.Mesh(data=1, fsdp=1, shard="optimizer"),
    loop=config.Loop(steps=100_000, log_every=50, eval_every=2000, eval_examples=256),
    checkpoint=config.Checkpoint(every=5000, keep=3, best_metric="val/bits_per_byte"),
)
