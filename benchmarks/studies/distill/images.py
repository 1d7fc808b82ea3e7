"""A student of FLUX.2's tiny autoencoder (TAEF2): `demo`'s network, frame by frame, 32 channels.

Its decoder learns the latents of 900 fixed windows of 14 videos, and its encoder to make them.
"""

from jaxtrain import config
from jaxtrain.models import video_ae

run = config.named("demo").override(
    {
        "model.latent_channels": 32,
        "model.time_downscale": (False, False, False),
        "model.init": "random",  # the teacher's latents are not thumbnails
        "model.teacher": video_ae.Teacher(encoder_weight=1.0, decode=True),
        "data.demo": False,
        "data.windows": "fixed",
        "loop.steps": 400,
        "loop.log_every": 40,
        "loop.eval_every": 200,
        "loop.eval_examples": 32,
        "checkpoint.every": 200,
        "checkpoint.keep": 1,
    }
)
