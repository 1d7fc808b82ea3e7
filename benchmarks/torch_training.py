"""A plain PyTorch training step with the optimizer of a jaxtrain config."""

from collections.abc import Callable, Mapping
from typing import Any

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


def to_torch(batch: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Host arrays -> tensors on the device."""
    return {name: torch.from_numpy(array.copy()).to(device) for name, array in batch.items()}


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
