"""A plain PyTorch training step with the optimizer of a jaxtrain config."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ours
import results
import side_by_side
import torch

from jaxtrain import config

Loss = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


class Training:
    """AdamW with clipping, bfloat16 by autocast on a GPU; no schedule.

    Args:
        module: its parameters are trained in place.
        loss: mean loss of a batch; it calls ``module``.
        settings: of the optimizer; ``peak_lr`` is used throughout.
        autocast: compute in bfloat16.
    """

    def __init__(
        self, module: torch.nn.Module, loss: Loss, settings: config.Optim, *, autocast: bool
    ) -> None:
        self._params = [param for param in module.parameters() if param.requires_grad]
        groups = [
            {
                "params": [p for p in self._params if p.ndim >= 2],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in self._params if p.ndim < 2], "weight_decay": 0.0},
        ]
        device = self._params[0].device.type
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=settings.peak_lr,
            betas=(settings.b1, settings.b2),
            eps=settings.eps,
            fused=device == "cuda",
        )
        self._clip = settings.max_grad_norm
        self._loss = loss
        self._autocast = torch.autocast(device, torch.bfloat16, enabled=autocast)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One update; returns the loss before it, still on the device."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast:
            loss = self._loss(batch)
        loss.backward()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self._clip)
        self._optimizer.step()
        return loss.detach()


class Theirs(Protocol):
    """A PyTorch program at the same work."""

    def step(self, batch: Any) -> Any:
        """One update with what :meth:`place` gave."""

    def place(self, batch: Mapping[str, Any]) -> Any:
        """A host batch as it takes one."""


def compare(
    flags: argparse.Namespace,
    what: str,
    left: ours.Training,
    right: Theirs,
    batch: Mapping[str, Any],
    *,
    device: str,
    examples: int,
    unit: str,
    same_work: str,
) -> None:
    """Times both steps in turn and records them (:func:`results.record_comparison`)."""
    placed, same = left.place(batch), right.place(batch)
    on_gpu = device == "cuda"
    compared = side_by_side.alternate(
        side_by_side.Side(lambda: left.step(placed), left.finish),
        side_by_side.Side(lambda: right.step(same), lambda: synchronize(device)),
        rounds=flags.rounds,
        steps=10 if on_gpu else 1,
        warm_up=5 if on_gpu else 3,
    )
    results.record_comparison(
        flags, what, compared, examples=examples, unit=unit, same_work=same_work
    )


def to_torch(batch: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Host arrays -> tensors on the device."""
    return {name: torch.from_numpy(array.copy()).to(device) for name, array in batch.items()}


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
