"""Video autoencoder, small, on two CPU cores: about two minutes, no data needed.

Trains on moving scenes, rendered and encoded once; set `--data.path` to use your own videos.

    python -m jaxtrain.main --config demo
"""

import dataclasses

from jaxtrain import config

base = config.named("h100_8")
run = dataclasses.replace(
    base,
    precision="float32",  # CPUs compute bfloat16 slowly
    model=dataclasses.replace(
        base.model,
        frames=8,
        height=64,
        width=64,
        encoder_width=16,
        decoder_widths=(64, 32, 16, 16),
        remat="none",
    ),
    data=dataclasses.replace(base.data, demo=True, batch_size=4, workers=2, train_split=0.8),
    optim=dataclasses.replace(
        base.optim, peak_lr=3e-3, warmup_steps=None, warmup_fraction=1 / 16, accumulate=1
    ),
    mesh=dataclasses.replace(base.mesh, fsdp=1),
    loop=dataclasses.replace(
        base.loop,
        steps=160,
        log_every=10,
        eval_every=80,
        eval_examples=16,
        hang_timeout_s=600.0,
        early_stop_patience=None,
    ),
    checkpoint=dataclasses.replace(base.checkpoint, every=80, keep=2),
)
