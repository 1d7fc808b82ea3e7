"""Masked language model, 6 layers of width 16, sequences of 128, on one node of 8 H200.

A smaller variant of `mlm_h200_8`; with so few parameters, sharding saves no memory.

Guide: docs/guides/masked-lm.md. A specialist would change the learning rate, as for `mlm_h200_8`,
and the width: heads of 2 channels are too narrow for fused attention, and one GPU is enough:
`--model.hidden 128 --mesh.fsdp 1`.

    jaxtrain train mlm_h200_8_small --data.path TEXT
"""

from jaxtrain import config

run = config.named("mlm_h200_8").override(
    {
        "model.vocab_size": 10_000,
        "model.sequence_length": 128,
        "model.hidden": 16,
        "model.layers": 6,
        "data.batch_size": 256,
        "data.max_examples": 1_000_000,
        "mesh.shard": "none",
    }
)
