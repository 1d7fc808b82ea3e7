"""Which parameters a model wants optimized in which way; what its ``optimizer_groups()`` gives."""

import dataclasses
from collections.abc import Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters apart: with an AdamW, a clip and a norm of their own, as a discriminator has.

    Attributes:
        prefix: of their dotted names.
        peak_lr: learning rate, throughout.
        b1, b2, weight_decay: as in :class:`jaxtrain.config.Optim`.
        max_grad_norm: of this group alone; None is off.
    """

    prefix: str
    peak_lr: float
    b1: float
    b2: float
    weight_decay: float
    max_grad_norm: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """Parameters that ``optim.muon`` treats alike; clip and norm are those of the whole model.

    Attributes:
        prefix: of their dotted names.
        role: matrix takes Muon; embedding and unembedding take AdamW with rates of their own.
        scale: of the rate.
    """

    prefix: str
    role: Literal["matrix", "embedding", "unembedding"]
    scale: float = 1.0


Groups = Mapping[str, Group | Role]


def apart(groups: Groups) -> dict[str, Group]:
    """Those with a clip of their own."""
    return {name: one for name, one in groups.items() if isinstance(one, Group)}


def roles(groups: Groups) -> dict[str, Role]:
    """Those that ``optim.muon`` asks for."""
    return {name: one for name, one in groups.items() if isinstance(one, Role)}
