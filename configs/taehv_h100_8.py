"""Video autoencoder (TAEHV) from scratch on 64x64 crops, on one node of 8 H100 (80 GB).

Differs from `taehv_h100_1` in batches four times as large. A run on one GPU with more steps may be
as good: on a small scale, small batches trained better (docs/results.md).

Guide: docs/guides/video-autoencoder.md, "Crops". A specialist would change what `taehv_h100_1`
names.

    jaxtrain train taehv_h100_8 --data.path CLIPS
"""

from jaxtrain import config

run = config.named("taehv_h100_1").override(
    {
        "data.batch_size": 64,  # 8 crops x 8 GPUs
        "mesh.fsdp": 8,
        "loop.steps": 100_000,
        "loop.log_every": 50,
    }
)
