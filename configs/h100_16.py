"""Video autoencoder, 13x480x720, on two nodes of 8 H100 (80 GB).

Differs from `h100_8` in also sharding the parameters (ZeRO-3), and needs no gradient accumulation.

Guide: docs/guides/video-autoencoder.md. A specialist would add what `h100_8` names.

    jaxtrain train h100_16 --data.path CLIPS
"""

from jaxtrain import config

run = config.named("h100_8").override(
    {
        "data.prefetch": 3,
        "optim.accumulate": 1,
        "optim.warmup_steps": 1500,  # 8 clips x 16 = 128
        "mesh.fsdp": 16,
        "mesh.shard": "params",
        "loop.log_every": 20,
        "loop.eval_every": 500,
        "loop.hang_timeout_s": 7200.0,
        "checkpoint.every": 1000,
    }
)
