"""Video autoencoder, 17x480x720, on one H100 (80 GB).

Differs from `h100_8` in longer clips, and in 16 microbatches that make up for seven fewer GPUs. The
guide that this follows has clips of 19 frames, of which the loss compares 17, as of 17.

Guide: docs/guides/video-autoencoder.md. A specialist would add what `h100_8` names.

    jaxtrain train h100_1 --data.path CLIPS
"""

from jaxtrain import config

run = config.named("h100_8").override(
    {
        "model.frames": 17,
        "optim.accumulate": 16,  # microbatches of 8 clips x 16 = 128
        "mesh.fsdp": 1,
        "loop.log_every": 50,
        "loop.hang_timeout_s": 1800.0,
    }
)
