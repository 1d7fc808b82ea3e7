"""A small video autoencoder on real clips, trained by the recipe, for studies on two CPU cores."""

from jaxtrain import config

run = config.named("demo").override(
    {
        "data.demo": False,
        "data.batch_size": 1,
        "optim.muon": config.Muon(peak_lr=0.005),
        "loop.steps": 960,
        "loop.log_every": 40,
        "loop.eval_every": 480,
        "loop.eval_examples": 32,
        "checkpoint.every": 480,
        "checkpoint.keep": 1,
    }
)
