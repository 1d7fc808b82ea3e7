"""Video autoencoder, 12x480x720, on eight nodes of 8 H100 (80 GB).

Parameters are sharded within a node and replicated across nodes. Differs from `h100_48` in the
mesh, a larger batch with a higher learning rate, and how often it logs and saves.

    python -m jaxtrain.main --config h100_64 --data.path CLIPS
"""

import dataclasses

from jaxtrain import config

base = config.named("h100_48")
run = dataclasses.replace(
    base,
    data=dataclasses.replace(base.data, batch_size=256, workers=12, prefetch=4),  # 4 x 64 GPUs
    optim=dataclasses.replace(base.optim, peak_lr=2e-4, warmup_steps=1000),
    mesh=dataclasses.replace(base.mesh, data=8),
    loop=dataclasses.replace(base.loop, log_every=10, hang_timeout_s=14400.0),
    checkpoint=dataclasses.replace(base.checkpoint, every=500),
)
