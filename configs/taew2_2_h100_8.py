"""Wan 2.2's video autoencoder, distilled on 128x128 crops on one node of 8 H100 (80 GB).

Differs from `taew2_2_h100_1` in batches four times as large.

Guide: docs/guides/video-autoencoder.md, "Teacher". A specialist would change what `taew2_2_h100_1`
names.

    jaxtrain train taew2_2_h100_8 --data.path CLIPS --model.teacher.weights VAE
"""

from jaxtrain import config

run = config.named("taew2_2_h100_1").override(
    {
        "data.batch_size": 64,  # 8 crops x 8 GPUs
        "mesh.fsdp": 8,
        "loop.steps": 100_000,
        "loop.log_every": 50,
    }
)
