"""Video autoencoder, 13x480x720, on six nodes of 8 H100 (80 GB).

Parameters are sharded within a node and replicated across nodes. Differs from `h100_16` in the
mesh, a larger batch with a higher learning rate, and how often it logs and saves. The rate grows
with the root of the batch, as is usual for Adam; that of the guide, 1.8e-4, grows with the batch.

Guide: docs/guides/video-autoencoder.md. A specialist would add what `h100_8` names.

    jaxtrain train h100_48 --data.path CLIPS
"""

from jaxtrain import config

run = config.named("h100_16").override(
    {
        "data.batch_size": 240,  # 5 clips x 48 GPUs
        "optim.peak_lr": 1.4e-4,
        "optim.warmup_steps": 1200,
        "mesh.data": 6,
        "mesh.fsdp": 8,
        "loop.log_every": 15,
        "loop.hang_timeout_s": 10800.0,
        "checkpoint.every": 750,
    }
)
