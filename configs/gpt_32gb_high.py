"""GPT of depth 20, 561M parameters, sequences of 3072, on one GPU of 32 GB.

Otherwise the same as `gpt_32gb_conservative`, with rates for 86,016 tokens per step.

Guide: docs/guides/gpt.md. A specialist would start from these values.

    jaxtrain train gpt_32gb_high --data.path TEXT
"""

from jaxtrain import config

_base = config.named("gpt_32gb_conservative")
_scale = (28 * 3072 / (16 * 1536)) ** 0.5

run = _base.override(
    {
        "model.depth": 20,
        "model.sequence_length": 3072,
        "data.batch_size": 28,  # 7 sequences x 4
        **{
            f"optim.muon.{rate}": getattr(_base.optim.muon, rate) * _scale
            for rate in ("peak_lr", "embedding_lr", "unembedding_lr")
        },
        # Ranked by `plan --fit`: 14 x 2 fits only with every layer rematerialized (20% more work).
        "optim.accumulate": 4,
    }
)
