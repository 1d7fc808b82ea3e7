"""Ettin encoder, 150M parameters, sequences of 1024 tokens, on one node of 8 H100.

ModernBERT (https://arxiv.org/abs/2412.13663) of the base size, as Ettin trains it
(https://arxiv.org/abs/2507.11412): StableAdamW, decay that does not depend on the rate, and 1.7
trillion tokens. tests/config/test_sources.py holds every value against Ettin's file. It differs in
a constant batch, where Ettin's grows to 4,608 sequences in the first 50 billion tokens; in
sequences of several documents, which do not see each other; and in the decay over the last 5%,
which Ettin has in two later runs.

Guide: docs/guides/masked-lm.md, also for those runs, with longer sequences. A specialist would
start from these values as they are.

    jaxtrain train ettin_150m_h100_8 --data.path TEXT
"""

from jaxtrain import config
from jaxtrain.data import text
from jaxtrain.models import modern_bert

run = config.Run(
    precision="bfloat16",
    model=modern_bert.Config(
        vocab_size=50_368,
        sequence_length=1024,
        hidden=768,
        layers=22,
        heads=12,
        ff=1152,
        global_base=10_000.0,  # 160,000 belongs to sequences of 8192
        attention_out_dropout=0.1,
        mask_fraction=0.3,
    ),
    data=text.Masked(
        batch_size=4608,  # 64 sequences x 8 GPUs x 9
        tokenizer_kind="bpe",
    ),
    optim=config.Optim(
        peak_lr=8e-4,
        schedule="trapezoid",
        warmup_steps=636,  # 3 billion tokens
        warmdown_fraction=0.05,
        warmdown_shape="sqrt",
        b1=0.9,
        b2=0.98,
        eps=1e-6,
        clip_updates=True,
        weight_decay=1e-5,
        decouple_lr=True,
        max_grad_norm=None,  # StableAdamW replaces it
        accumulate=9,
    ),
    mesh=config.Mesh(data=1, fsdp=8, shard="optimizer"),
    loop=config.Loop(
        steps=360_000, log_every=50, eval_every=2000, eval_examples=9216, hang_timeout_s=3600.0
    ),
    checkpoint=config.Checkpoint(every=2000, keep=5, best_metric="val/loss"),
)
