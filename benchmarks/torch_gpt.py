"""Implements nanochat's network in plain PyTorch, with nanochat's names, for the comparison.

Uses causal SDPA, parameter-free norms, and capped float32 logits of the complete batch.

Shapes: B sequences, S tokens, D width, N query heads, H key and value heads, K head width.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from jaxtrain.models import gpt

CAP = 15.0
ROTARY_BASE = 10_000.0


class Attention(nn.Module):
    """Causal attention with rotary embeddings, followed by normalization of queries and keys."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        shared = width // heads * kv_heads
        self.c_q = nn.Linear(width, width, bias=False)
        self.c_k = nn.Linear(width, shared, bias=False)
        self.c_v = nn.Linear(width, shared, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> the same shape."""
        q = self.c_q(x).unflatten(-1, (self.heads, -1))
        k, v = (part(x).unflatten(-1, (self.kv_heads, -1)) for part in (self.c_k, self.c_v))
        q, k = (_norm(_turn(one, cos, sin)) for one in (q, k))
        seen = functional.scaled_dot_product_attention(
            *(one.transpose(1, 2) for one in (q, k, v)),
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.c_proj(seen.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """An MLP of four times the width with squared ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> the same shape."""
        return self.c_proj(functional.relu(self.c_fc(x)).square())


class Block(nn.Module):
    """Attention and feed-forward, each with a residual connection."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attn = Attention(width, heads, kv_heads)
        self.mlp = FeedForward(width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> the same shape."""
        x = x + self.attn(_norm(x), cos, sin)
        return x + self.mlp(_norm(x))


class GPT(nn.Module):
    """The network; a call returns the mean loss of the targets, in nats."""

    def __init__(
        self, vocab_size: int, length: int, depth: int, width: int, heads: int, kv_heads: int
    ) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(depth))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(vocab_size, width), "h": blocks})
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        half = torch.arange(0, width // heads, 2) / (width // heads)
        angles = torch.outer(torch.arange(length), ROTARY_BASE**-half)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Tokens and targets, int64 [B, S] -> mean loss, float32 []."""
        x = _norm(self.transformer["wte"](tokens))
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.transformer["h"]:
            x = block(x, cos, sin)
        logits = CAP * torch.tanh(self.lm_head(_norm(x)).float() / CAP)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def load(self, params: Mapping[str, np.ndarray]) -> None:
        """Copies jaxtrain's parameters.

        Raises:
            RuntimeError: names or shapes differ.
        """
        state = gpt.NANOCHAT.outward(params)
        self.load_state_dict({name: torch.from_numpy(one.copy()) for name, one in state.items()})


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],))


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates [B, S, N, K]; the halves of K are the coordinates."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos + right * sin, right * cos - left * sin], -1)
