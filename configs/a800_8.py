"""Video autoencoder, 12x480x720, a short run on one node of 8 A800.

Differs from `h100_8` in smaller microbatches, half the weight of the reconstruction loss, and 2000
steps. As the only loss, its weight changes only gradient clipping.

Guide: docs/guides/video-autoencoder.md. A specialist would change what `h100_8` names, and train
for longer: `--loop.steps 100000`.

    jaxtrain train a800_8 --data.path CLIPS
"""

from jaxtrain import config

run = config.named("h100_8").override(
    {
        "model.reconstruction_weight": 10.0,
        "optim.accumulate": 8,
        "optim.warmup_steps": 200,  # 2 clips x 8 x 8 = 128
        "loop.steps": 2000,
        "checkpoint.every": 1000,
        "checkpoint.keep": 5,
    }
)
