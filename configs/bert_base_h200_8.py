"""BERT base, 110M parameters, sequences of 512, on one node of 8 H200.

Sizes, learning rate and length of https://arxiv.org/abs/1810.04805: a million steps of 256
sequences.

Guide: docs/guides/masked-lm.md. A specialist would use larger batches and rates, as RoBERTa
(https://arxiv.org/abs/1907.11692: 8,192 sequences, 6e-4), for fewer steps.
`--model.attention_dropout 0.1` is BERT's, and slower.

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
