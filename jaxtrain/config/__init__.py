"""The config of a run: its sections, named configs, overrides, and the length of a run.

A ``--config`` file imports from here; :mod:`jaxtrain.config.run` documents each class.
"""

from jaxtrain.config.checks import (
    best_mode,
    check_patience,
    check_warmup,
    most_patience,
    problems,
    validate,
)
from jaxtrain.config.loading import equivalent_arguments, load, named, unchecked
from jaxtrain.config.param_groups import Group, Role
from jaxtrain.config.record import differences, flat, to_dict
from jaxtrain.config.run import (
    Average,
    BadUpdates,
    Checkpoint,
    Loop,
    Mesh,
    Muon,
    Optim,
    Precision,
    Run,
    Schedule,
    Shard,
)

__all__ = [
    "Average",
    "BadUpdates",
    "Checkpoint",
    "Group",
    "Loop",
    "Mesh",
    "Muon",
    "Optim",
    "Precision",
    "Role",
    "Run",
    "Schedule",
    "Shard",
    "best_mode",
    "check_patience",
    "check_warmup",
    "differences",
    "equivalent_arguments",
    "flat",
    "load",
    "most_patience",
    "named",
    "problems",
    "to_dict",
    "unchecked",
    "validate",
]
