"""A new encoder for a trained decoder: the distance to the latents of the encoder that it had."""

from jaxtrain import config
from jaxtrain.models import video_ae

run = config.named("demo").override(
    {
        "model.freeze": ("decoder",),
        "model.teacher": video_ae.Teacher(encoder_weight=1.0),
        "model.reconstruction_weight": 1e-9,
        "data.demo": False,
        "data.batch_size": 1,
        "data.windows": "fixed",
        "optim.muon": config.Muon(peak_lr=0.005),
        "loop.steps": 960,
        "loop.log_every": 40,
        "loop.eval_every": 480,
        "loop.eval_examples": 32,
        "checkpoint.every": 480,
        "checkpoint.keep": 1,
    }
)
