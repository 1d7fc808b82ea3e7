"""Video autoencoder, 12x480x720, on two nodes of 8 H100 (80 GB).

Differs from `h100_8` in also sharding the parameters (ZeRO-3), and needs no gradient accumulation.

    python -m jaxtrain.main --config h100_16 --data.path CLIPS
"""

import dataclasses

from jaxtrain import config

base = config.named("h100_8")
run = dataclasses.replace(
    base,
    data=dataclasses.replace(base.data, workers=12, prefetch=3),
    optim=dataclasses.replace(base.optim, accumulate=1, warmup_steps=1500),  # 8 clips x 16 = 128
    mesh=dataclasses.replace(base.mesh, fsdp=16, shard="params"),
    loop=dataclasses.replace(
        base.loop, log_every=20, eval_every=500, eval_examples=24, hang_timeout_s=7200.0
    ),
    checkpoint=dataclasses.replace(base.checkpoint, every=1000),
)
