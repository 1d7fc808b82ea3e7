"""Masked language model, small, on two CPU cores: about two minutes, no data needed.

Trains on the documentation of Python's standard library; set `--data.path` to use your own text.

    python -m jaxtrain.main --config demo_mlm
"""

import dataclasses

from jaxtrain import config

base = config.named("mlm_h200_8")
run = dataclasses.replace(
    base,
    precision="float32",  # CPUs compute bfloat16 slowly
    model=dataclasses.replace(
        base.model,
        vocab_size=4096,
        sequence_length=64,
        hidden=128,
        layers=4,
        heads=4,
        dropout=0.0,
    ),
    data=dataclasses.replace(base.data, demo=True, batch_size=32, workers=2, max_examples=None),
    optim=dataclasses.replace(base.optim, peak_lr=1e-3),
    mesh=dataclasses.replace(base.mesh, fsdp=1),
    loop=dataclasses.replace(
        base.loop,
        epochs=None,
        steps=400,
        log_every=20,
        eval_every=200,
        eval_examples=256,
        hang_timeout_s=600.0,
    ),
    checkpoint=dataclasses.replace(base.checkpoint, every=200, keep=2),
)
