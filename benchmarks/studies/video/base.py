"""The video autoencoder of `demo` on real clips, for studies on two CPU cores."""

from jaxtrain import config

run = config.named("demo").override(
    {
        "data.demo": False,
        "loop.steps": 240,
        "loop.log_every": 40,
        "loop.eval_every": 120,
        "loop.eval_examples": 32,
        "checkpoint.every": 120,
        "checkpoint.keep": 1,
    }
)
