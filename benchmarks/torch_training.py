"""Provides a plain PyTorch training step with the optimizer of a jaxtrain config."""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import ours
import results
import side_by_side
import torch

from jaxtrain import config

Loss = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


class Training:
    """AdamW with gradient clipping and a constant learning rate; bfloat16 by autocast.

    Args:
        module: its parameters are trained in place.
        loss: computes the mean loss of a batch with ``module``.
        settings: of the optimizer; the learning rate is ``peak_lr``.
        autocast: whether to compute in bfloat16.
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
        """Runs one step; returns the loss before it, still on the device."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast:
            loss = self._loss(batch)
        loss.backward()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self._clip)
        self._optimizer.step()
        return loss.detach()


class Theirs(Protocol):
    """A PyTorch program that does the same work."""

    def load(self, params: Mapping[str, np.ndarray]) -> None:
        """Copies jaxtrain's parameters."""

    def step(self, batch: Any) -> Any:
        """Runs one step on the result of :meth:`place`."""

    def place(self, batch: Mapping[str, Any]) -> Any:
        """Converts a batch to the program's format, on the device."""


Build = Callable[[config.Run, str], Theirs]
"""Builds a program from a config and a device; picklable, because another process calls it."""


def compare(
    flags: argparse.Namespace,
    what: str,
    run: config.Run,
    theirs: Build,
    batch: Mapping[str, Any],
    *,
    curve_run: config.Run,
    curve: Sequence[Mapping[str, Any]],
    device: str,
    examples: int,
    unit: str,
) -> None:
    """Compares the losses of both sides, times their steps alternately, and records the result.

    On a CPU, each side is timed in a separate process: after PyTorch's steps, the state of the heap
    makes ours 10% slower (benchmarks/LOG.md). Both sides use the same allocator, first the
    system's, then one that keeps freed memory. Both ratios are recorded, because both sides gain
    from the second allocator, but not equally. This process, which has compared the losses, keeps
    its memory meanwhile.

    Args:
        flags: from the command line.
        what: describes the comparison, for the table.
        run: the config whose steps are timed.
        theirs: builds the other side.
        batch: the batch of every timed step.
        curve_run: the config that both sides train on ``curve``, from the same parameters.
        curve: one batch per step.
        device: "cpu" or "cuda".
        examples: number of examples in a batch.
        unit: of the rate, such as clips/s.
    """
    left, right = ours.Training(curve_run), theirs(curve_run, device)
    right.load(left.params())
    losses = left.losses(curve)
    other = [float(right.step(right.place(one))) for one in curve]
    if device == "cpu":
        del left, right
        compared = {}
        for label, keep_freed in (("system's allocator", False), ("freed memory kept", True)):
            apart = functools.partial(side_by_side.Apart, keep_freed=keep_freed)
            with (
                apart(our_side, run, batch) as one,
                apart(their_side, theirs, run, device, batch) as two,
            ):
                compared[label] = side_by_side.alternate(
                    one, two, rounds=flags.rounds, steps=2, warm_up=3
                )
    else:
        if curve_run is not run:
            left, right = ours.Training(run), theirs(run, device)
        one, two = _side_of_ours(left, batch), _side_of_theirs(right, device, batch)
        compared = {"": side_by_side.alternate(one, two, rounds=flags.rounds, steps=10, warm_up=5)}
    results.record_comparison(
        flags,
        what,
        compared,
        examples=examples,
        unit=unit,
        same_work=results.of_losses(losses, other),
    )


def our_side(run: config.Run, batch: Mapping[str, Any]) -> side_by_side.Side:
    """Builds jaxtrain's side in the process where it is timed."""
    return _side_of_ours(ours.Training(run), batch)


def their_side(
    theirs: Build, run: config.Run, device: str, batch: Mapping[str, Any]
) -> side_by_side.Side:
    """Builds the other side in the process where it is timed."""
    return _side_of_theirs(theirs(run, device), device, batch)


def _side_of_ours(training: ours.Training, batch: Mapping[str, Any]) -> side_by_side.Side:
    placed = training.place(batch)
    return side_by_side.Side(lambda: training.step(placed), training.finish)


def _side_of_theirs(program: Theirs, device: str, batch: Mapping[str, Any]) -> side_by_side.Side:
    placed = program.place(batch)
    return side_by_side.Side(lambda: program.step(placed), lambda: synchronize(device))


def to_torch(batch: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Copies host arrays to tensors on the device."""
    return {name: torch.from_numpy(array.copy()).to(device) for name, array in batch.items()}


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
