"""What is saved when, what is said beside the state, and what a resume refuses.

Beside a state stands what says which run it belongs to: the fingerprint of the data, the config,
the versions, the step, the examples seen, and the best validation so far.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxtrain import checkpoint, config, versions
from jaxtrain import state as states
from jaxtrain.errors import InputError

Meta = dict[str, Any]


def describe(run: config.Run, fingerprint: str) -> Meta:
    """What stands beside the states of a run; the best validation is filled in as it comes."""
    return {
        "fingerprint": fingerprint,
        "config": config.to_dict(run),
        "versions": versions.versions(),
        "best": None,
    }


class Saver:
    """Saves at cadence, keeps the best apart, and counts validations without improvement."""

    def __init__(
        self,
        run: config.Run,
        checkpoints: checkpoint.Checkpoints,
        meta: Meta,
    ) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._meta = meta

    @property
    def patience_over(self) -> bool:
        """Whether so many validations brought nothing better that the run should end."""
        patience, best = self._run.loop.early_stop_patience, self._meta["best"]
        return patience is not None and best is not None and best["validations_since"] >= patience

    def save(self, done: int, state: states.State) -> None:
        """Saves the state after ``done`` updates; returns once it is copied to the host."""
        self._checkpoints.save(state, self._described(done, state))

    def keep_if_best(self, done: int, state: states.State, values: dict[str, float]) -> None:
        """Compares with the best validation so far; keeps this state apart if it is better."""
        settings, best = self._run.checkpoint, self._meta["best"]
        if settings.best_metric is None:
            return
        value = values[settings.best_metric]
        sign = 1 if settings.best_mode == "max" else -1
        if not math.isfinite(value) or (best and sign * value <= sign * best["value"]):
            if best:
                self._meta["best"] = best | {"validations_since": best["validations_since"] + 1}
            return
        self._meta["best"] = {
            "metric": settings.best_metric,
            "mode": settings.best_mode,
            "value": value,
            "step": done,
            "validations_since": 0,
        }
        self._checkpoints.save_best(state, self._described(done, state))

    def _described(self, done: int, state: states.State) -> Meta:
        return self._meta | {"step": done, "examples_seen": int(state.examples_seen)}


def check_resume(saved: Meta, meta: Meta, start_from: Path, say: Callable[[str], None]) -> None:
    """Refuses another seed or other data; prints whatever else differs."""
    if saved["fingerprint"] != meta["fingerprint"]:
        raise InputError(
            f"{start_from} was trained on data with fingerprint {saved['fingerprint']}, this run's "
            f"data has {meta['fingerprint']}: the order of examples would be another; give the "
            "same --data.path, or start a new run"
        )
    if saved["config"]["seed"] != meta["config"]["seed"]:
        raise InputError(
            f"{start_from} was trained with seed {saved['config']['seed']}, this run has seed "
            f"{meta['config']['seed']}: the order of examples would be another; leave --seed out"
        )
    for difference in config.differences(saved["config"], meta["config"]):
        say(f"differs from the checkpoint: {difference}")


def check_best_metric(settings: config.Checkpoint, names: Iterable[str]) -> None:
    """The metric that says which checkpoint is best has to be one of the validation's.

    Raises:
        InputError: it is none; names those that there are.
    """
    if settings.best_metric is not None and settings.best_metric not in names:
        raise InputError(
            f"checkpoint.best_metric is {settings.best_metric!r}, the model's validation gives "
            f"{', '.join(sorted(names))}: set --checkpoint.best_metric to one of these"
        )


def carried_best(
    best: Meta | None, settings: config.Checkpoint, start_from: Path, directory: Path
) -> Meta | None:
    """The best validation that a resumed run starts with.

    That of another metric cannot be compared, and the checkpoint of another run's best does not lie
    in this run's directory: then the next validation is the first.
    """
    if best is None or directory.resolve() not in start_from.resolve().parents:
        return None
    same = (best["metric"], best["mode"]) == (settings.best_metric, settings.best_mode)
    return best if same else None
