"""``progress.json`` of a run directory: what a resume needs, but is not part of the state.

It lists the validations so far, from which the best one and the patience follow, and the last step
whose replay had the same result (``loop.replay_every``). A checkpoint does not contain them: a
validation after a save would otherwise change the checkpoint. A resume counts what belongs to its
position, so the file may be newer than the checkpoint.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import jax

from jaxtrain import terminal
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import process_group
from jaxtrain.storage.atomic import read_json, write_whole
from jaxtrain.storage.disks import disk_trouble

NAME = "progress.json"


@dataclasses.dataclass(frozen=True)
class Criterion:
    """How validations are compared.

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
        criterion: of the run at that time.
        value: of the metric; None if there is no metric or the value is NaN/Inf.
        kept: whether its checkpoint could be written if it was the best one.
    """

    done: int
    seen: int
    criterion: Criterion
    value: float | None
    kept: bool = True


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation so far.

    Attributes:
        validated: that validation.
        validations_since: the number of later ones, without improvement.
    """

    validated: Validated
    validations_since: int = 0


def is_due(done: int, every: int | None, total: int) -> bool:
    """Whether something that is done every few steps, and after the last one, is due now."""
    return every is not None and (done % every == 0 or done == total)


class RunProgress:
    """The content of ``progress.json``. All processes have the same; process 0 writes it.

    Args:
        directory: of the run.
        criterion: how this run compares validations.
        validations: so far.
        last_equal: the last step whose replay had the same result; None if steps are not replayed.

    Attributes:
        last_equal: see above.
        unmet_gate: the gate of ``loop.gates`` that ended the run; None if none did.
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
        self.unmet_gate: str | None = None
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

        Args:
            directory: of the run that is resumed.
            criterion: of this start.
            position: from which it continues.
            say: receives a line if the file is damaged.

        Raises:
            InputError, RunAgain: in all processes, if the disk does not respond.
        """

        def read() -> str:
            try:
                return json.dumps(read_json(directory / NAME))
            except FileNotFoundError:
                return "{}"
            except ValueError as why:
                say(
                    f"warning: {directory / NAME} is damaged ({why}): earlier validations do not "
                    "count for the best checkpoint and the patience"
                )
                return "{}"
            except OSError as error:
                raise disk_trouble(
                    error, f"{directory / NAME} cannot be read", "make it readable"
                ) from error

        stored: dict[str, Any] = json.loads(process_group.process_zero_decides(read))
        validations = [
            Validated(**entry | {"criterion": Criterion(**entry["criterion"])})
            for entry in stored.get("validations", ())
        ]
        last_equal = stored.get("last_equal")
        progress = cls(
            directory,
            criterion,
            [entry for entry in validations if entry.seen <= position.seen],
            None if last_equal is None else min(last_equal, position.done),
        )
        progress.unmet_gate = stored.get("unmet_gate")
        return progress

    def write(self) -> None:
        """Writes the file, in process 0.

        Raises:
            OSError: it is as before.
        """
        content = {
            "last_equal": self.last_equal,
            "unmet_gate": self.unmet_gate,
            "validations": [dataclasses.asdict(entry) for entry in self._validations],
        }
        if jax.process_index() == 0:
            write_whole(self._path, json.dumps(content) + "\n")

    @property
    def best(self) -> Best | None:
        """Returns the best validation so far by this run's criterion; None before the first."""
        best: Best | None = None
        sign = 1 if self._criterion.mode == "max" else -1
        for validated in self._validations:
            if validated.criterion != self._criterion or not validated.kept:
                continue
            if validated.value is not None and (
                best is None or sign * validated.value > sign * (best.validated.value or 0.0)
            ):
                best = Best(validated)
            elif best is not None:
                best = Best(best.validated, best.validations_since + 1)
        return best

    @property
    def last_by_another_criterion(self) -> Validated | None:
        """Returns the last validation that does not count now, because the criterion changed."""
        if self._validations and self._validations[-1].criterion != self._criterion:
            return self._validations[-1]
        return None

    def has(self, position: Position) -> bool:
        """Whether the state at a position was validated."""
        return any(entry.seen == position.seen for entry in self._validations)

    def add(self, position: Position, value: float | None) -> bool:
        """Adds a validation; returns whether its state is the best so far.

        Args:
            position: of the state.
            value: of the metric, if there is one.
        """
        if value is not None and not math.isfinite(value):
            value = None
        validated = Validated(position.done, position.seen, self._criterion, value)
        self._validations = [entry for entry in self._validations if entry.seen != position.seen]
        self._validations.append(validated)
        best = self.best
        return best is not None and best.validated is validated

    def mark(self, best: Best, *, kept: bool) -> None:
        """Sets whether the checkpoint of a validation exists; without, it is not the best one."""
        self._validations = [
            dataclasses.replace(entry, kept=kept) if entry.seen == best.validated.seen else entry
            for entry in self._validations
        ]
