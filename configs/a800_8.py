"""Video autoencoder, 13x480x720, on one node of 8 A800.

Differs from `h100_8` in smaller microbatches. The guide that this follows makes a short test, with
half the weight of the only loss, which changes nothing but gradient clipping:
`--loop.steps 2000 --optim.warmup_steps 200 --model.reconstruction_weight 10`.

Guide: docs/guides/video-autoencoder.md. A specialist would add what `h100_8` names.

    jaxtrain train a800_8 --data.path CLIPS
"""

from jaxtrain import config

run = config.named("h100_8").override(
    {
        "optim.accumulate": 8,  # 2 clips x 8 x 8 = 128
        "checkpoint.every": 1000,
        "checkpoint.keep": 5,
    }
)
