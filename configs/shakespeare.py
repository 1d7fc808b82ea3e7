"""GPT of 2026 at the size of nanoGPT's Shakespeare on a CPU: 2,000 steps of 12 x 64 characters.

Predicts characters: the vocabulary has the 256 bytes, the special tokens, and nothing else. The
first 90% of the text train, the last 10% validate:

    curl -O https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    mkdir shakespeare
    head -c 1003854 input.txt > shakespeare/train.txt
    tail -c 111540 input.txt > shakespeare/valid.txt

Guide: docs/guides/gpt.md. Size, length, and batch are those of nanoGPT's README
(https://github.com/karpathy/nanoGPT), whose model reaches 1.88 nats per character; model, rates,
and schedule are those of `demo_gpt`. A specialist would use its setting for GPUs, with 82 million
characters and dropout.

    jaxtrain train shakespeare --data.path shakespeare
"""

from jaxtrain import config

run = config.named("demo_gpt").override(
    {
        "model.vocab_size": 265,
        "model.sequence_length": 64,
        "data.demo": False,
        "data.batch_size": 12,
        "loop.steps": 2000,
        "loop.log_every": 100,
        "loop.eval_every": 500,
        "loop.eval_examples": 2000,  # all 1,743 windows
        "checkpoint.every": 500,
    }
)
