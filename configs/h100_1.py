"""Video autoencoder, 19x480x720, on one H100 (80 GB).

Differs from `h100_8` in longer clips, and in 16 microbatches that make up for seven fewer GPUs.

    python -m jaxtrain.main --config h100_1 --data.path CLIPS
"""

import dataclasses

from jaxtrain import config

base = config.named("h100_8")
run = dataclasses.replace(
    base,
    model=dataclasses.replace(base.model, frames=19),
    data=dataclasses.replace(base.data, workers=4),  # one GPU needs fewer clips per second
    optim=dataclasses.replace(base.optim, accumulate=16),  # microbatches of 8 clips x 16 = 128
    mesh=dataclasses.replace(base.mesh, fsdp=1),
    loop=dataclasses.replace(base.loop, log_every=50, eval_examples=10, hang_timeout_s=1800.0),
)
