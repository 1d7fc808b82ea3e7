"""Wan 2.2's decoder, fine-tuned on your clips at 17x480x768 on one H100 (80 GB).

Differs from `wan2_2_decoder_h100_8` in 32 microbatches of one clip, which need less
memory by the plan than 16 of two, and take as long.

Guide: docs/guides/video-autoencoder.md, "Fine-tune the big autoencoder". A specialist would add
what `wan2_2_decoder_h100_8` names.

    jaxtrain train wan2_2_decoder_h100_1 --data.path CLIPS --model.init_from VAE
"""

from jaxtrain import config

run = config.named("wan2_2_decoder_h100_8").override(
    {
        "optim.accumulate": 32,
        "mesh.fsdp": 1,
    }
)
