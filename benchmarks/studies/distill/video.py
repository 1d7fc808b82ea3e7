"""A student of a narrow Wan 2.2, whose network runs in the step: TAEHV's, of 64 channels at most.

The teacher is the folder of `--model.teacher.weights`.
"""

from jaxtrain import config
from jaxtrain.models import video_ae

run = config.named("demo").override(
    {
        "model.patch_size": 2,
        "model.latent_channels": 48,
        "model.init": "random",  # the teacher's latents are not thumbnails
        "model.teacher": video_ae.Teacher(network="wan2.2", encoder_weight=1.0, decode=True),
        "data.demo": False,
        "loop.steps": 400,
        "loop.log_every": 40,
        "loop.eval_every": 200,
        "loop.eval_examples": 32,
        "checkpoint.every": 200,
        "checkpoint.keep": 1,
    }
)
