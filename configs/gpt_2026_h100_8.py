"""GPT of 2026, depth 24, 1.38B parameters, sequences of 2048, on one node of 8 H100 (80 GB).

Trains on 8 tokens for each of the 730M parameters in matrices; otherwise the same as
`gpt_2026_h100_1`.

Guide: docs/guides/gpt.md. Model, rates, and schedule are nanochat's of July 2026
(https://github.com/karpathy/nanochat), whose run of this size took 1.65 hours, with fp8; length,
batch, rates, and weight decay follow from the depth by its rules. A specialist would start from
them as they are.

    jaxtrain train gpt_2026_h100_8 --data.path TEXT
"""

import dataclasses

from jaxtrain import config

_base = config.named("gpt_2026_h100_1")
_model = dataclasses.replace(_base.model, depth=24)
_scaling = _model.scaling(tokens_per_parameter=8)
_rates = {
    f"optim.muon.{name}": getattr(_base.optim.muon, name) * _scaling.rate_scale
    for name in ("peak_lr", "embedding_lr", "unembedding_lr", "scalar_lr")
}

run = _base.override(
    {
        "model": _model,
        "data.batch_size": _scaling.batch_tokens // _model.sequence_length,
        "optim.weight_decay": _base.optim.weight_decay * _scaling.decay_scale,
        "optim.accumulate": 4,  # 16 sequences x 8 GPUs x 4
        **_rates,
        # ZeRO-3 would send twice the bytes, and need more memory with these microbatches.
        "mesh": config.Mesh(data=1, fsdp=8, shard="optimizer"),
        "loop.steps": _scaling.steps,
        "loop.hang_timeout_s": 3600.0,
    }
)
