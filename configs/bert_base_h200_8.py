"""BERT base, 110M parameters, sequences of 512, on one node of 8 H200.

Sizes, learning rate and length of https://arxiv.org/abs/1810.04805: a million steps of 256
sequences.

    python -m jaxtrain.main --config bert_base_h200_8 --data.path TEXT
"""

import dataclasses

from jaxtrain import config

base = config.named("mlm_h200_8")
run = dataclasses.replace(
    base,
    model=dataclasses.replace(
        base.model, vocab_size=30_522, sequence_length=512, hidden=768, layers=12, heads=12
    ),
    data=dataclasses.replace(base.data, batch_size=256, max_examples=None),
    optim=dataclasses.replace(
        base.optim, peak_lr=1e-4, warmup_fraction=None, warmup_steps=10_000, eps=1e-6
    ),
    loop=dataclasses.replace(base.loop, epochs=None, steps=1_000_000),
)
