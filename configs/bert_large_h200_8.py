"""BERT large, 335M parameters, sequences of 512, on one node of 8 H200.

Otherwise the same as `bert_base_h200_8`.

Guide: docs/guides/masked-lm.md. A specialist would take this to repeat BERT.

    jaxtrain train bert_large_h200_8 --data.path TEXT
"""

from jaxtrain import config

run = config.named("bert_base_h200_8").override(
    {
        "model.hidden": 1024,
        "model.layers": 24,
        "model.heads": 16,
    }
)
