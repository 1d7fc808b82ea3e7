"""Video autoencoder, 12x480x720, on six nodes of 8 H100 (80 GB).

Parameters are sharded within a node and replicated across nodes. Differs from `h100_16` in the
mesh, a larger batch with a higher learning rate, and how often it logs and saves.

Guide: docs/guides/video-autoencoder.md. A specialist would change what `h100_8` names, and compare
the learning rate, which grows with the batch, with one that grows with its square root (1.4e-4).

    jaxtrain train h100_48 --data.path CLIPS
"""

from jaxtrain import config

run = config.named("h100_16").override(
    {
        "data.batch_size": 240,  # 5 clips x 48 GPUs
        "optim.peak_lr": 1.8e-4,
        "optim.warmup_steps": 1200,
        "mesh.data": 6,
        "mesh.fsdp": 8,
        "loop.log_every": 15,
        "loop.hang_timeout_s": 10800.0,
        "checkpoint.every": 750,
    }
)
