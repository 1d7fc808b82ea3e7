"""GPT, small, on two CPU cores: one to two minutes, no data needed.

Trains on the documentation of Python's standard library; set `--data.path` to use your own text.

Guide: docs/tutorials/first-run.md, then docs/guides/gpt.md. A specialist would use more text, and a
larger `model.depth` and `model.width`.

    jaxtrain train demo_gpt
"""

from jaxtrain import config
from jaxtrain.models import gpt

run = config.named("gpt_2026_h100_1").override(
    {
        "precision": "float32",  # CPUs compute bfloat16 slowly
        "model": gpt.Config.of_2026(
            vocab_size=2048, sequence_length=128, depth=4, width=128, heads=4
        ),
        "data.demo": True,
        "data.batch_size": 16,
        "data.fit_documents": False,  # documents are longer than sequences
        "optim.warmup_steps": None,
        "optim.warmup_fraction": 0.05,
        "optim.accumulate": 1,
        "optim.muon.momentum_steps": 100,
        "loop.steps": 200,
        "loop.log_every": 20,
        "loop.eval_every": 100,
        "loop.eval_examples": 64,
        "loop.hang_timeout_s": 600.0,
        "checkpoint.every": 100,
        "checkpoint.keep": 2,
    }
)
