"""Masked language model, 8 layers of width 256, sequences of 256, on one node of 8 H200.

Five epochs of ten million documents. The learning rate is that of ELECTRA-small, which has this
width (https://arxiv.org/abs/2003.10555). The guide that this follows has 3e-5, a rate for
fine-tuning.

Guide: docs/guides/masked-lm.md. A specialist would start from these values.

    jaxtrain train mlm_h200_8 --data.path TEXT
"""

from jaxtrain import config
from jaxtrain.data import text
from jaxtrain.models import mlm

run = config.Run(
    precision="bfloat16",
    model=mlm.Config(
        vocab_size=25_000,
        sequence_length=256,
        hidden=256,
        layers=8,
        heads=8,
        dropout=0.1,
        mask_fraction=0.15,
    ),
    data=text.Masked(
        batch_size=768,  # 96 sequences x 8 GPUs
        max_examples=10_000_000,
    ),
    optim=config.Optim(
        peak_lr=5e-4,
        schedule="linear",
        warmup_fraction=0.1,
        b1=0.9,
        b2=0.999,
        eps=1e-8,
        weight_decay=1e-2,
        max_grad_norm=1.0,
    ),
    mesh=config.Mesh(data=1, fsdp=8, shard="optimizer"),
    loop=config.Loop(
        epochs=5, log_every=50, eval_every=2000, eval_examples=7680, hang_timeout_s=3600.0
    ),
    checkpoint=config.Checkpoint(every=2000, keep=5, best_metric="val/loss"),
)
