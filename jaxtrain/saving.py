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
        "evaluation_due": False,
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

    def judge(self, done: int, values: dict[str, float]) -> bool:
        """Compares a validation with the best so far; whether its state is now the best."""
        settings, best = self._run.checkpoint, self._meta["best"]
        if settings.best_metric is None:
            return False
        value = values[settings.best_metric]
        sign = 1 if settings.best_mode == "max" else -1
        if not math.isfinite(value) or (best and sign * value <= sign * best["value"]):
            if best:
                self._meta["best"] = best | {"validations_since": best["validations_since"] + 1}
            return False
        self._meta["best"] = {
            "metric": settings.best_metric,
            "mode": settings.best_mode,
            "value": value,
            "step": done,
            "validations_since": 0,
        }
        return True

    def save(
        self, done: int, state: states.State, *, regular: bool = True, best: bool = False
    ) -> None:
        """Saves the state after ``done`` updates; returns once it is copied to the host.

        Args:
            done: completed updates.
            state: after them.
            regular: as the newest checkpoint.
            best: as the best one.
        """
        meta = self._meta | {"step": done, "examples_seen": int(state.examples_seen)}
        if regular:
            self._checkpoints.save(state, meta, best=best)
        elif best:
            self._checkpoints.save_best(state, meta)


def patience_over(settings: config.Loop, meta: Meta) -> bool:
    """Whether so many validations brought nothing better that the run should end."""
    patience, best = settings.early_stop_patience, meta["best"]
    return patience is not None and best is not None and best["validations_since"] >= patience


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
    for difference in config.differences(saved["versions"], meta["versions"]):
        say(f"version differs from the checkpoint: {difference}")


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
    in this run's directory (nor does one that was lost): then the next validation is the first.
    """
    if best is None or directory.resolve() not in start_from.resolve().parents:
        return None
    if not checkpoint.is_complete(directory / checkpoint.BEST / str(best["step"])):
        return None
    same = (best["metric"], best["mode"]) == (settings.best_metric, settings.best_mode)
    return best if same else None
