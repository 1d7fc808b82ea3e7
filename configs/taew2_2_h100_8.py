"""Wan 2.2's video autoencoder, distilled at 12x480x720 on one node of 8 H100 (80 GB).

The teacher runs inside the step, on the same random clips: the encoder learns its latents, and the
decoder learns to decode them. The weights have the shapes of TAEHV's `taew2_2`. Differs from
`h100_8` in the model, and in keeping 10 checkpoints, which do not contain the teacher.

Guide: docs/guides/video-autoencoder.md, "Teacher". A specialist would prepare the latents once
(`prepare latents`): the teacher does 88% of the step's work, and no run has shown that random clips
are better than prepared ones.

    python -m jaxtrain.main --config taew2_2_h100_8 --data.path CLIPS --model.teacher.weights VAE
"""

from jaxtrain import config
from jaxtrain.models import video_ae

run = config.named("h100_8").override(
    {
        "model.patch_size": 2,
        "model.latent_channels": 48,
        "model.teacher": video_ae.Teacher(network="wan2.2", encoder_weight=1.0, decode=True),
        "checkpoint.keep": 10,
    }
)
