"""GPT, small, on two CPU cores: one to two minutes, no data needed.

Trains on the documentation of Python's standard library; set `--data.path` to use your own text.

    python -m jaxtrain.main --config demo_gpt
"""

import dataclasses

from jaxtrain import config

base = config.named("gpt_32gb_conservative")
run = dataclasses.replace(
    base,
    precision="float32",  # CPUs compute bfloat16 slowly
    model=dataclasses.replace(
        base.model, vocab_size=2048, sequence_length=128, depth=4, width=128, heads=4
    ),
    data=dataclasses.replace(base.data, demo=True, batch_size=16, workers=2),
    optim=dataclasses.replace(base.optim, accumulate=1, muon=config.Muon(momentum_steps=100)),
    loop=dataclasses.replace(
        base.loop,
        tokens_per_param=None,
        steps=200,
        log_every=20,
        eval_every=100,
        eval_examples=64,
        hang_timeout_s=600.0,
    ),
    checkpoint=dataclasses.replace(base.checkpoint, every=100, keep=2),
)
