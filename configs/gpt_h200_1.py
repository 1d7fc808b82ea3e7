"""GPT of depth 12, 186M parameters, sequences of 2048, on one H200.

Batches of 524,288 tokens, for which the learning rates were tuned; otherwise the same as
`gpt_32gb_conservative`.

Guide: docs/guides/gpt.md, and docs/tutorials/gpt-to-a-target.md, which trains it to a target.
Rates, batch, and schedule are nanochat's (https://github.com/karpathy/nanochat); a specialist would
start from them as they are.

    jaxtrain train gpt_h200_1 --data.path TEXT
"""

from jaxtrain import config

run = config.named("gpt_32gb_conservative").override(
    {
        "model.sequence_length": 2048,
        "data.batch_size": 256,
        "optim.muon": config.Muon(),  # for 524,288 tokens
        "optim.accumulate": 4,  # microbatches of 64 sequences x 4
        "loop.eval_examples": 5120,  # 10.5 million tokens
    }
)
