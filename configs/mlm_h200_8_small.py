"""Masked language model, 6 layers of width 16, sequences of 128, on one node of 8 H200.

A smaller variant of `mlm_h200_8`; with so few parameters, sharding saves no memory.

    python -m jaxtrain.main --config mlm_h200_8_small --data.path TEXT
"""

import dataclasses

from jaxtrain import config

base = config.named("mlm_h200_8")
run = dataclasses.replace(
    base,
    model=dataclasses.replace(
        base.model, vocab_size=10_000, sequence_length=128, hidden=16, layers=6
    ),
    data=dataclasses.replace(base.data, batch_size=256, workers=4, max_examples=1_000_000),
    mesh=dataclasses.replace(base.mesh, shard="none"),
)
