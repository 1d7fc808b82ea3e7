"""BERT base, 110M parameters, sequences of 512, on one node of 8 H200.

The values of https://arxiv.org/abs/1810.04805: a million steps of 256 sequences.
tests/config/test_sources.py holds all of them; `--model.attention_dropout 0.1`, which is slower, is
one that differs. Nine tenths of the paper's steps have sequences of 128, so this costs four times
as much.

Guide: docs/guides/masked-lm.md. A specialist would take this to repeat BERT, and otherwise start
from `ettin_150m_h100_8`.

    jaxtrain train bert_base_h200_8 --data.path TEXT
"""

from jaxtrain import config

run = config.named("mlm_h200_8").override(
    {
        "model.vocab_size": 30_522,
        "model.sequence_length": 512,
        "model.hidden": 768,
        "model.layers": 12,
        "model.heads": 12,
        "data.batch_size": 256,
        "data.max_examples": None,
        "optim.peak_lr": 1e-4,
        "optim.warmup_fraction": None,
        "optim.warmup_steps": 10_000,
        "optim.eps": 1e-6,
        "loop.epochs": None,
        "loop.steps": 1_000_000,
    }
)
