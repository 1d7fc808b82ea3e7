"""GPT of depth 20, 561M parameters, sequences of 2048, on one node of 8 H100 (80 GB).

Batches of 524,288 tokens, for which the learning rates were tuned; otherwise the same as
`gpt_32gb_conservative`.

Guide: docs/guides/gpt.md. Rates, batch, and schedule are nanochat's
(https://github.com/karpathy/nanochat); a specialist would start from them as they are.

    jaxtrain train gpt_h100_8 --data.path TEXT
"""

from jaxtrain import config

run = config.named("gpt_32gb_conservative").override(
    {
        "model.depth": 20,
        "model.sequence_length": 2048,
        "data.batch_size": 256,
        "optim.muon": config.Muon(),  # for 524,288 tokens
        "optim.accumulate": 2,  # 16 sequences x 8 GPUs x 2
        "mesh": config.Mesh(data=1, fsdp=8, shard="params"),
        "loop.eval_examples": 5120,  # 10.5 million tokens
        "loop.hang_timeout_s": 3600.0,
    }
)
