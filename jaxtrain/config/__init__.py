"""The config of a run: its sections, named configs, overrides, and the length of a run.

A ``--config`` file imports from here; :mod:`jaxtrain.config.run` documents each class.
"""

from jaxtrain.config.param_groups import Group, Role
from jaxtrain.config.run import (
    OLDER_CLASSES,
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
    as_typed,
    check_warmup,
    differences,
    flat,
    load,
    named,
    problems,
    to_dict,
    unchecked,
    validate,
)

__all__ = [
    "OLDER_CLASSES",
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
    "as_typed",
    "check_warmup",
    "differences",
    "flat",
    "load",
    "named",
    "problems",
    "to_dict",
    "unchecked",
    "validate",
]
