"""Wan 2.2's decoder, fine-tuned on your clips at 17x480x768 on one H100 (80 GB).

Differs from `wan2_2_decoder_h100_8` in 16 microbatches that make up for seven fewer GPUs.

Guide: docs/guides/video-autoencoder.md, "Fine-tune the big autoencoder". A specialist would change
what `wan2_2_decoder_h100_8` names.

    python -m jaxtrain.main --config wan2_2_decoder_h100_1 --data.path CLIPS --model.init_from VAE
"""

from jaxtrain import config

run = config.named("wan2_2_decoder_h100_8").override(
    {
        "optim.accumulate": 16,  # microbatches of 2 clips x 16 = 32
        "mesh.fsdp": 1,
    }
)
