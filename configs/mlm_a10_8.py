"""Masked language model, 8 layers of width 256, sequences of 256, on one node of 8 A10 (24 GB).

The same as `mlm_h200_8`, which also fits these smaller GPUs.

Guide: docs/guides/masked-lm.md. A specialist would start from these values.

    jaxtrain train mlm_a10_8 --data.path TEXT
"""

from jaxtrain import config

run = config.named("mlm_h200_8")
