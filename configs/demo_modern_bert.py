"""ModernBERT, small, on two CPU cores: its export opens in transformers.

Trains on the documentation of Python's standard library; set `--data.path` to use your own text.

Guide: docs/guides/masked-lm.md. A specialist would continue from published weights
(`--model.init_from`), or train `ettin_150m_h100_8`.

    jaxtrain train demo_modern_bert
"""

from jaxtrain import config

run = config.named("ettin_150m_h100_8").override(
    {
        "precision": "float32",  # CPUs compute bfloat16 slowly
        "model.vocab_size": 2048,
        "model.sequence_length": 128,
        "model.hidden": 128,
        "model.layers": 4,
        "model.heads": 4,
        "model.ff": 192,
        "data.demo": True,
        "data.batch_size": 16,
        "optim.peak_lr": 1e-3,
        "optim.warmup_steps": None,
        "optim.warmup_fraction": 0.05,
        "optim.warmdown_fraction": 0.2,
        "optim.accumulate": 1,
        "mesh.fsdp": 1,
        "loop.steps": 200,
        "loop.log_every": 20,
        "loop.eval_every": 100,
        "loop.eval_examples": 64,
        "loop.hang_timeout_s": 600.0,
        "checkpoint.every": 100,
        "checkpoint.keep": 2,
    }
)
