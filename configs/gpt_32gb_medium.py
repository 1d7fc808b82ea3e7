"""GPT of depth 16, 335M parameters, sequences of 2048, on one GPU of 32 GB.

Otherwise the same as `gpt_32gb_conservative`, with rates for 49,152 tokens per step.

Guide: docs/guides/gpt.md. A specialist would start from these values.

    jaxtrain train gpt_32gb_medium --data.path TEXT
"""

from jaxtrain import config

_base = config.named("gpt_32gb_conservative")
_scale = (24 * 2048 / (16 * 1536)) ** 0.5

run = _base.override(
    {
        "model.depth": 16,
        "model.sequence_length": 2048,
        "data.batch_size": 24,  # 12 sequences x 2
        **{
            f"optim.muon.{rate}": getattr(_base.optim.muon, rate) * _scale
            for rate in ("peak_lr", "embedding_lr", "unembedding_lr")
        },
    }
)
