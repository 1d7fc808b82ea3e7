"""The GPT of 2026 at 1.8M parameters, for studies on two CPU cores."""

from jaxtrain import config
from jaxtrain.models import gpt

run = config.named("gpt_2026_h100_1").override(
    {
        "precision": "float32",
        "model": gpt.Config.of_2026(
            vocab_size=2048, sequence_length=256, depth=4, width=128, heads=2
        ),
        "data.batch_size": 16,
        "data.fit_documents": False,  # both sides are validated on the same windows
        "optim.accumulate": 1,
        "optim.warmup_steps": None,
        "optim.warmup_fraction": 0.05,
        "optim.muon.momentum_steps": 100,
        "loop.steps": 400,
        "loop.log_every": 50,
        "loop.eval_every": 200,
        "loop.eval_examples": 512,
        "loop.hang_timeout_s": 600.0,
        "checkpoint.every": 200,
        "checkpoint.keep": 1,
    }
)
