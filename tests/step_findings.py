"""Invented findings of the compiler about a step (jaxtrain.planning.compilation)."""

from typing import Any


def findings(temporaries: float, *, estimate: bool = False) -> dict[str, Any]:
    """Returns the findings of a step whose memory is mostly temporaries.

    Args:
        temporaries: bytes.
        estimate: whether it was compiled for CPUs.
    """
    return dict.fromkeys(("parameters", "optimizer", "batch", "gradients", "outputs"), 1) | {
        "temporaries": temporaries,
        "program": 0,
        "replayed": False,
        "model_flops": 1e15,
        "flops": 1e15,
        "convolutions": False,
        "moved_bytes": 1e12,
        "attention": {"forward": 0, "backward": 0},
        "kernels": {"convolutions": 279, "other_convolutions": 0},
        "formula_bytes": 1,
        "traffic": [],
        "largest": [],
        "elements": 1,
        "checkpoint": 12,
        "samples": {"image": 0, "clip": 0},
        "unsharded": {},
        "batch_of": "",
        "total": 9,
        "compile_s": 1,
        "versions": {"jax": "0"},
        "estimate": estimate,
    }
