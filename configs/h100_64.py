"""Video autoencoder, 13x480x720, on eight nodes of 8 H100 (80 GB).

Parameters are sharded within a node and replicated across nodes. Differs from `h100_48` in the
mesh, a larger batch with a higher learning rate, and how often it logs and saves. The rate grows
with the root of the batch, as is usual for Adam; that of the guide, 2e-4, grows with the batch.

Guide: docs/guides/video-autoencoder.md. A specialist would add what `h100_8` names.

    jaxtrain train h100_64 --data.path CLIPS
"""

from jaxtrain import config

run = config.named("h100_48").override(
    {
        "data.batch_size": 256,  # 4 x 64 GPUs
        "data.prefetch": 4,
        "optim.warmup_steps": 1000,
        "mesh.data": 8,
        "loop.log_every": 10,
        "loop.hang_timeout_s": 14400.0,
        "checkpoint.every": 500,
    }
)
