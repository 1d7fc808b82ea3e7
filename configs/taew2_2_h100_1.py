"""Wan 2.2's video autoencoder, distilled on 128x128 crops on one H100 (80 GB).

The teacher runs inside the step, on the same random crops: the encoder learns its latents, and the
decoder learns to decode them. Weights with the shapes of TAEHV's `taew2_2`. Differs from
`taehv_h100_1`, the published recipe with Muon, in the model, in its random initial parameters, and
in the crops: of 64x64, the teacher makes only 4x4 latents. The encoder gains from a second run, in
which the decoder is frozen (docs/results.md). No run has been made yet.

Guide: docs/guides/distill.md. A specialist would prepare the latents once
(`prepare latents`): the teacher does most of the step's work. On 8 GPUs:
`--mesh.fsdp 8 --data.batch_size 64 --loop.steps 100000`.

    jaxtrain train taew2_2_h100_1 --data.path CLIPS --model.teacher.weights VAE
"""

from jaxtrain import config
from jaxtrain.models import video_ae

run = config.named("taehv_h100_1").override(
    {
        "model.patch_size": 2,
        "model.latent_channels": 48,
        "model.init": "random",  # the teacher's latents are not thumbnails
        "model.adversary.replay": 1024,  # 16 for each of the 4 windows of 16 clips
        "model.teacher": video_ae.Teacher(network="wan2.2", encoder_weight=1.0, decode=True),
        "data.crop": (128, 128),
        "data.max_crop_scale": 3.75,  # 480 pixels of a clip's 480 x 720
    }
)
