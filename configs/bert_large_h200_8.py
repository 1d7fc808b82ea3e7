"""BERT large, 335M parameters, sequences of 512, on one node of 8 H200.

Otherwise the same as `bert_base_h200_8`.

    python -m jaxtrain.main --config bert_large_h200_8 --data.path TEXT
"""

import dataclasses

from jaxtrain import config

base = config.named("bert_base_h200_8")
run = dataclasses.replace(
    base, model=dataclasses.replace(base.model, hidden=1024, layers=24, heads=16)
)
