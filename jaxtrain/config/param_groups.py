"""Parameter groups: how a model's ``optimizer_groups()`` requests a special optimizer."""

import dataclasses
from collections.abc import Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with their own AdamW and gradient clipping, such as a discriminator's.

    Attributes:
        prefix: prefix of their dotted names.
        peak_lr: learning rate, constant.
        b1, b2, weight_decay: as in :class:`jaxtrain.config.Optim`.
        max_grad_norm: gradient clipping by the norm of this group; None turns it off.
    """

    prefix: str
    peak_lr: float
    b1: float
    b2: float
    weight_decay: float
    max_grad_norm: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """Parameters with one role for ``optim.muon``; gradients are clipped with the model's.

    Attributes:
        prefix: prefix of their dotted names.
        role: matrix uses Muon; embedding and unembedding use AdamW with their own learning rates.
        scale: factor on the learning rate.
    """

    prefix: str
    role: Literal["matrix", "embedding", "unembedding"]
    scale: float = 1.0


Groups = Mapping[str, Group | Role]


def apart(groups: Groups) -> dict[str, Group]:
    """Returns the groups with their own optimizer."""
    return {name: one for name, one in groups.items() if isinstance(one, Group)}


def roles(groups: Groups) -> dict[str, Role]:
    """Returns the groups with a role for ``optim.muon``."""
    return {name: one for name, one in groups.items() if isinstance(one, Role)}
