"""Wan 2.2's video autoencoder, distilled at 12x480x720 on one H100 (80 GB).

Differs from `taew2_2_h100_8` in 16 microbatches that make up for seven fewer GPUs.

Guide: docs/guides/video-autoencoder.md, "Teacher". A specialist would change what `taew2_2_h100_8`
names.

    python -m jaxtrain.main --config taew2_2_h100_1 --data.path CLIPS --model.teacher.weights VAE
"""

from jaxtrain import config

run = config.named("taew2_2_h100_8").override(
    {
        "optim.accumulate": 16,  # microbatches of 8 clips x 16 = 128
        "mesh.fsdp": 1,
        "loop.log_every": 50,
        "loop.eval_examples": 10,
        "loop.hang_timeout_s": 1800.0,
    }
)
