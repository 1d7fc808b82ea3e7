"""Parameter groups: how a model's ``optimizer_groups()`` requests a special optimizer.

:func:`frozen` resolves ``model.freeze``, the parameters that have none.
"""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Literal

from jaxtrain.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with their own AdamW, whose gradients are not clipped, such as a discriminator's.

    Attributes:
        prefix: prefix of their dotted names.
        peak_lr: learning rate, constant.
        b1, b2, weight_decay: as in :class:`jaxtrain.config.Optim`.
        start_step: steps before the first with this rate, at which the parameters stay as they are.
    """

    prefix: str
    peak_lr: float
    b1: float
    b2: float
    weight_decay: float
    start_step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """Parameters with one role; gradients are clipped with the model's.

    Attributes:
        prefix: prefix of their dotted names.
        role: only matrices have ``optim.weight_decay``. With ``optim.muon``, matrix uses Muon, and
            the others use AdamW with their own learning rates.
        scale: factor on the learning rate.
        b1, b2: with ``optim.muon``, instead of those of ``optim``; None uses those.
        weight_decay: with ``optim.muon``, of what does not use Muon.
    """

    prefix: str
    role: Literal["matrix", "embedding", "unembedding", "scalar"]
    scale: float = 1.0
    b1: float | None = None
    b2: float | None = None
    weight_decay: float = 0.0


Groups = Mapping[str, Group | Role]


def separate_groups(groups: Groups) -> dict[str, Group]:
    """Returns the groups with their own optimizer."""
    return {name: group for name, group in groups.items() if isinstance(group, Group)}


def roles(groups: Groups) -> dict[str, Role]:
    """Returns the groups with a role."""
    return {name: role for name, role in groups.items() if isinstance(role, Role)}


def check_trained(freeze: Collection[str], trained: Collection[str], groups: Groups) -> None:
    """Checks that ``model.freeze`` leaves more than parameters with an optimizer of their own.

    Args:
        freeze: the paths.
        trained: dotted names of the parameters that are left.
        groups: the model's groups, such as that of a discriminator.

    Raises:
        InputError: only such groups are left; a discriminator alone is of no use.
    """
    separate = separate_groups(groups)
    prefixes = tuple(group.prefix for group in separate.values())
    if freeze and separate and all(name.startswith(prefixes) for name in trained):
        raise InputError(
            f"model.freeze={' '.join(freeze)} leaves only {' and '.join(separate)} to train: "
            "drop one of the paths",
            about="model.freeze",
        )


def frozen(freeze: Collection[str], names: Collection[str]) -> frozenset[str]:
    """Returns the parameters that ``model.freeze`` excludes from training.

    Args:
        freeze: parts of the model, such as ``encoder``, or longer dotted paths.
        names: dotted names of all parameters.

    Raises:
        InputError: a path has no parameters, or none is left to train.
    """
    frozen_names: set[str] = set()
    for path in freeze:
        below = {name for name in names if name == path or name.startswith(f"{path}.")}
        if not below:
            paths = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count("."))}
            top_level = {name.split(".")[0] for name in names}
            nearest = difflib.get_close_matches(path, sorted(paths | top_level), n=1, cutoff=0)
            raise InputError(
                f"model.freeze={path}: the model has no parameters below this path; the nearest "
                f"is {nearest[0]}, and its parts are {', '.join(sorted(top_level))}",
                about="model.freeze",
            )
        frozen_names |= below
    if frozen_names and len(frozen_names) == len(names):
        raise InputError(
            f"model.freeze={' '.join(freeze)} leaves no parameter to train: drop one of the paths",
            about="model.freeze",
        )
    return frozenset(frozen_names)
