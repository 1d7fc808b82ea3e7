"""Video autoencoder, 12x480x720, on six nodes of 8 H100 (80 GB).

Parameters are sharded within a node and replicated across nodes. Differs from `h100_16` in the
mesh, a larger batch with a higher learning rate, and how often it logs and saves.

    python -m jaxtrain.main --config h100_48 --data.path CLIPS
"""

import dataclasses

from jaxtrain import config

base = config.named("h100_16")
run = dataclasses.replace(
    base,
    data=dataclasses.replace(base.data, batch_size=240, workers=11),  # 5 clips x 48 GPUs
    optim=dataclasses.replace(base.optim, peak_lr=1.8e-4, warmup_steps=1200),
    mesh=dataclasses.replace(base.mesh, data=6, fsdp=8),
    loop=dataclasses.replace(base.loop, log_every=15, hang_timeout_s=10800.0),
    checkpoint=dataclasses.replace(base.checkpoint, every=750),
)
