"""The GPT of 2026 at 0.7M parameters, for studies on two CPU cores."""

from jaxtrain import config
from jaxtrain.models import gpt

run = config.named("gpt_2026_h100_1").override(
    {
        "precision": "float32",
        "model": gpt.Config.of_2026(
            vocab_size=2048, sequence_length=256, depth=4, width=64, heads=1
        ),
        "data.batch_size": 8,
        "data.fit_documents": False,  # both sides are validated on the same windows
        "optim.accumulate": 1,
        "optim.warmup_steps": None,
        "optim.warmup_fraction": 0.05,
        "optim.muon.momentum_steps": 100,
        "loop.steps": 800,
        "loop.log_every": 100,
        "loop.eval_every": 400,
        "loop.eval_examples": 256,
        "loop.hang_timeout_s": 600.0,
        "checkpoint.every": 400,
        "checkpoint.keep": 1,
    }
)
