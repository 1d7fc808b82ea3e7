"""A trained small video autoencoder, fine-tuned on a few clips, for studies on two CPU cores."""

from jaxtrain import config

run = config.named("demo").override(
    {
        "data.demo": False,
        "data.batch_size": 1,
        "optim.muon": config.Muon(peak_lr=0.0005),
        "optim.peak_lr": 1e-4,
        "loop.steps": 240,
        "loop.log_every": 40,
        "loop.eval_every": 120,
        "checkpoint.every": 120,
        "checkpoint.keep": 1,
    }
)
