"""A narrow Wan 2.2 as the student of a wider one, whose network runs in the step.

The teacher is the folder of `--model.teacher.weights`. With the same folder as `--model.init_from`,
the student starts from a slice of it.
"""

from jaxtrain import config
from jaxtrain.models import video_ae, wan_vae

run = config.named("demo").override(
    {
        "model": wan_vae.Config(
            frames=5,
            height=64,
            width=64,
            encoder_width=12,
            decoder_width=12,
            freeze=(),
            teacher=video_ae.Teacher(network="wan2.2", encoder_weight=1.0, decode=True),
        ),
        "data.demo": False,
        "loop.steps": 300,
        "loop.log_every": 50,
        "loop.eval_every": 150,
        "loop.eval_examples": 32,
        "checkpoint.every": 150,
        "checkpoint.keep": 1,
    }
)
