"""``progress.json`` of a run directory: what a resume needs, but is not part of the state.

It lists the validations so far with all their values, from which the best one, the patience, and
the gates follow, and the last step whose replay had the same result (``loop.replay_every``). A
checkpoint does not contain them: a validation after a save would otherwise change the checkpoint. A
resume counts what belongs to its position, so the file may be newer than the checkpoint.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import jax

from jaxtrain import config, terminal
from jaxtrain.config.gates import Gate
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import process_group
from jaxtrain.storage.atomic import read_json, write_whole
from jaxtrain.storage.disks import disk_trouble

NAME = "progress.json"


@dataclasses.dataclass(frozen=True)
class Criterion:
    """How this start of a run compares validations.

    Attributes:
        metric: ``checkpoint.best_metric``; None if none is compared.
        mode: "max" if larger values of it are better, or "min".
        examples: digest of what validates: the examples, and how many of them.
    """

    metric: str | None
    mode: str | None
    examples: str


@dataclasses.dataclass(frozen=True)
class Validated:
    """A validation of a state.

    Attributes:
        done: completed steps of the state.
        seen: examples that the run had seen. After a rollback, the same steps have seen others.
        values: by metric name; NaN for NaN/Inf.
        kept: whether its checkpoint could be written if it was the best one.
    """

    done: int
    seen: int
    examples: str
    values: Mapping[str, float]
    kept: bool = True

    @classmethod
    def parse(cls, entry: Any) -> Self:
        """Reads an entry of ``progress.json``.

        Raises:
            ValueError: a field is missing or has another type.
        """
        kinds = {"done": int, "seen": int, "examples": str, "values": dict, "kept": bool}
        if not isinstance(entry, dict) or any(
            type(entry.get(name)) is not kind for name, kind in kinds.items()
        ):
            raise ValueError("a validation lacks a field")
        values = entry["values"]
        if not all(value is None or type(value) in (int, float) for value in values.values()):
            raise ValueError("a value of a validation is not a number")
        return cls(**{name: entry[name] for name in kinds} | {"values": _finite_or_nan(values)})

    def to_json(self) -> dict[str, Any]:
        """Returns the entry; JSON has no NaN."""
        values = {name: None if math.isnan(v) else v for name, v in self.values.items()}
        return {**vars(self), "values": values}


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation so far."""

    validated: Validated
    validations_since: int = 0


@dataclasses.dataclass(frozen=True)
class UnmetGate:
    """A gate of ``loop.gates`` that a validation did not meet."""

    gate: Gate
    step: int
    value: float


def is_due(step: int, interval: int | None, total: int) -> bool:
    """Whether what is done every ``interval`` steps, and after the last one, is due now."""
    return interval is not None and (step % interval == 0 or step == total)


class RunProgress:
    """The content of ``progress.json``. All processes have the same; process 0 writes it.

    Args:
        last_equal: the last step whose replay had the same result; None if steps are not replayed.

    Attributes:
        validation_due: whether the state was not validated although it should be, because a stop
            interrupted its validation: a resumed run begins with it.
    """

    def __init__(
        self,
        directory: Path,
        criterion: Criterion,
        validations: Iterable[Validated] = (),
        last_equal: int | None = None,
    ) -> None:
        self._path = directory / NAME
        self._criterion = criterion
        self._validations = list(validations)
        self.last_equal = last_equal
        self.validation_due = False

    @classmethod
    def read(
        cls,
        directory: Path,
        criterion: Criterion,
        position: Position,
        say: Callable[[str], None] = terminal.out,
    ) -> Self:
        """Reads what a run had recorded up to a position, in process 0 for all processes.

        Other hosts may see an outdated file on a network disk, and early stopping must be the same
        in all processes.
        """

        def read() -> str:
            try:
                stored = read_json(directory / NAME)
                _parsed(stored)
                return json.dumps(stored)
            except FileNotFoundError:
                return ""
            except ValueError as why:
                say(
                    f"warning: {directory / NAME} is damaged ({why}): earlier validations do not "
                    "count for the best checkpoint, the patience, and the gates"
                )
                return ""
            except OSError as error:
                raise disk_trouble(
                    error, f"{directory / NAME} cannot be read", "make it readable"
                ) from error

        stored = process_group.process_zero_decides(read)
        validations, last_equal = _parsed(json.loads(stored)) if stored else ([], None)
        return cls(
            directory,
            criterion,
            [entry for entry in validations if entry.seen <= position.examples_seen],
            None if last_equal is None else min(last_equal, position.step),
        )

    def write(self) -> None:
        """Writes the file, in process 0.

        Raises:
            OSError: it is as before.
        """
        content = {
            "last_equal": self.last_equal,
            "validations": [entry.to_json() for entry in self._validations],
        }
        if jax.process_index() == 0:
            write_whole(self._path, json.dumps(content) + "\n")

    @property
    def validations(self) -> list[Validated]:
        """Returns those on the examples of this start, in order: others do not compare."""
        examples = self._criterion.examples
        return [entry for entry in self._validations if entry.examples == examples]

    @property
    def best(self) -> Best | None:
        """Returns the best validation so far by this run's criterion; None before the first."""
        best: Best | None = None
        best_value, sign = -math.inf, 1 if self._criterion.mode == "max" else -1
        for validated in self.validations:
            if not validated.kept:
                continue
            value = sign * validated.values.get(self._criterion.metric or "", math.nan)
            if value > best_value:
                best, best_value = Best(validated), value
            elif best is not None:
                best = Best(best.validated, best.validations_since + 1)
        return best

    @property
    def last_was_on_other_examples(self) -> bool:
        """Whether the last validation does not count now, because the examples changed."""
        return bool(self._validations) and (
            self._validations[-1].examples != self._criterion.examples
        )

    def has(self, position: Position) -> bool:
        """Whether the state at a position was validated."""
        return any(entry.seen == position.examples_seen for entry in self._validations)

    def add(self, position: Position, values: Mapping[str, float]) -> bool:
        """Adds a validation; returns whether its state is the best so far."""
        examples, finite = self._criterion.examples, _finite_or_nan(values)
        validated = Validated(position.step, position.examples_seen, examples, finite)
        self._validations = [
            entry for entry in self._validations if entry.seen != position.examples_seen
        ]
        self._validations.append(validated)
        best = self.best
        return best is not None and best.validated is validated

    def mark(self, best: Best, *, kept: bool) -> None:
        """Sets whether the checkpoint of a validation exists; without, it is not the best one."""
        self._validations = [
            dataclasses.replace(entry, kept=kept) if entry.seen == best.validated.seen else entry
            for entry in self._validations
        ]


def unmet_gate(settings: config.Loop, run_progress: RunProgress) -> UnmetGate | None:
    """Returns the first gate that the validations so far do not meet; None if there is none."""
    for gate in map(Gate.parse, settings.gates):
        decided = gate.decided_by((v.done, v.values) for v in run_progress.validations)
        if decided is not None and not gate.is_met(decided[1]):
            return UnmetGate(gate, *decided)
    return None


def _parsed(stored: Mapping[str, Any]) -> tuple[list[Validated], int | None]:
    entries, last_equal = stored.get("validations"), stored.get("last_equal", "")
    if not isinstance(entries, list):
        raise ValueError("it lacks the validations")
    if last_equal is not None and type(last_equal) is not int:
        raise ValueError("it lacks the last equal step")
    return [Validated.parse(entry) for entry in entries], last_equal


def _finite_or_nan(values: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: float(value) if value is not None and math.isfinite(value) else math.nan
        for name, value in values.items()
    }
