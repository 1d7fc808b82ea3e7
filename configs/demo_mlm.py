"""Masked language model, small, on two CPU cores: about two minutes, no data needed.

Trains on the documentation of Python's standard library; set `--data.path` to use your own text.

Guide: docs/tutorials/first-run.md, then docs/guides/masked-lm.md. A specialist would use more text,
a larger model, and dropout for text that is seen more than once.

    jaxtrain train demo_mlm
"""

from jaxtrain import config

run = config.named("mlm_h200_8").override(
    {
        "precision": "float32",  # CPUs compute bfloat16 slowly
        "model.vocab_size": 4096,
        "model.sequence_length": 64,
        "model.hidden": 128,
        "model.layers": 4,
        "model.heads": 4,
        "model.dropout": 0.0,
        "data.demo": True,
        "data.batch_size": 32,
        "data.max_examples": None,
        "optim.peak_lr": 1e-3,
        "mesh.fsdp": 1,
        "loop.epochs": None,
        "loop.steps": 400,
        "loop.log_every": 20,
        "loop.eval_every": 200,
        "loop.eval_examples": 256,
        "loop.hang_timeout_s": 600.0,
        "checkpoint.every": 200,
        "checkpoint.keep": 2,
    }
)
