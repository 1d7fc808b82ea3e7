"""``demo``'s recipe on real clips: 6,000 clips, validated by video on collections held out."""

from jaxtrain import config

run = config.named("demo").override(
    {
        "data.demo": False,
        "loop.steps": 3000,
        "loop.log_every": 100,
        "loop.eval_every": 1500,
        "loop.eval_examples": 64,
        "checkpoint.every": 1500,
        "checkpoint.keep": 1,
    }
)
