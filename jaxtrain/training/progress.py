"""What a run reports while it trains: one record per logged step, fetched one step late."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain import config
from jaxtrain.config import run_length
from jaxtrain.data.pipeline import TrainingBatches
from jaxtrain.distributed import process_group
from jaxtrain.distributed.watchdog import PAUSE_ALLOWANCE_S
from jaxtrain.errors import InputError
from jaxtrain.telemetry import hardware
from jaxtrain.telemetry.console import console_line
from jaxtrain.telemetry.events import BadStep, EventLog, Metrics, Rewound, Sample, StepExamples
from jaxtrain.telemetry.phases import Phases
from jaxtrain.telemetry.throughput import Window
from jaxtrain.training.step import BAD_IN_A_ROW
from jaxtrain.training.validation import Validation

# A run that waits for its input longer than this share of the time says so, and how to mend it.
WAIT_SHARE_TO_MENTION = 0.05

GPU_MEMORY = "train/gpu_memory_usage"


class _Pending(NamedTuple):
    """A step whose metrics have not been fetched yet.

    Attributes:
        found: its metrics, perhaps still being computed.
        position: examples seen before it.
        ids: of this process's examples in it.
    """

    found: dict[str, jax.Array]
    position: int
    ids: list[int]


class Progress:
    """Takes each step's metrics while the next step runs, and records them at cadence.

    The metrics of a step are fetched after the next step has been handed to the device, so that
    logging stalls nothing; waiting for them also keeps the host from running ahead by more than
    one step.

    Args:
        run: the config.
        log: takes records.
        phases: told of each finished step, each record and what is no step.
        total: steps of the whole run.
        position: where it goes on.
        batches: asked how long the loop has waited.
        mesh: over all devices.
        bad_in_a_row: that the run goes on after.
        waits: whether each step is complete when it is handed over, as with --debug. Then it is
            recorded at once: its window would end with the step after it.

    Attributes:
        first: each metric's first value.
        began: completed updates when this start began.
        last: each metric's last value.
        samples: that validations made so far.
        bad_in_a_row: updates that were left out since the last good one, as far as known.
    """

    def __init__(
        self,
        run: config.Run,
        log: EventLog,
        phases: Phases,
        total: int,
        position: run_length.Position,
        batches: TrainingBatches,
        mesh: jax.sharding.Mesh,
        *,
        bad_in_a_row: int = 0,
        waits: bool = False,
        faster: str = "",
    ) -> None:
        self._run = run
        self._waits, self._faster = waits, faster
        self._log = log
        self._phases = phases
        self._total = total
        self._batches = batches
        self._window = Window(
            run.data.batch_size,
            run.model.tokens_per_example(),
            run.model.flops_per_example(),
            mesh.size,
            hardware.peak_bf16_flops(jax.devices()[0].device_kind),
        )
        self.began = self._done = position.done
        self._seen = position.seen
        self._left_out = position.left_out
        self._pending: _Pending | None = None
        self.bad_in_a_row = bad_in_a_row
        self._unsaid = 0  # bad updates in a row, after the first
        self._system_metrics = hardware.SystemMetrics(os.environ, mesh.local_devices, log.say)
        self._of_all = process_group.Exchange(mesh, hardware.MEAN, (*hardware.LARGEST, GPU_MEMORY))
        self._waited_s = 0.0
        self._mentioned_wait = self._recorded = False
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.samples: list[Sample] = []
        self.say = log.say

    @property
    def done(self) -> int:
        """Completed updates, if the one handed over last is a good one."""
        return self._done + (self._pending is not None)

    def position(self) -> run_length.Position:
        """Where the run is; waits for the update handed over last."""
        self.flush()
        return run_length.Position(self._done, self._seen, self._left_out)

    def finished(self) -> bool:
        """Whether the run has all its updates."""
        if self.done >= self._total:
            self.flush()
        return self._done >= self._total

    def push(self, found: dict[str, jax.Array], ids: np.ndarray) -> None:
        """Hands over the metrics of the next update; records those of the update before.

        Args:
            found: of the step.
            ids: of this process's examples in it.
        """
        self.flush()
        self._pending = _Pending(found, self._seen, ids.tolist())
        self._seen += self._run.data.batch_size
        if self._waits:
            self.flush()
        # No step is handed over behind the one after which the run goes back: where it goes on
        # would depend on how far the host was ahead.
        settings = self._run.optim
        if settings.bad_updates == "rollback" and (self.bad_in_a_row or settings.bad_in_a_row == 1):
            self.flush()

    def too_many_bad(self) -> bool:
        """Whether the run has to go back to a checkpoint."""
        settings = self._run.optim
        return settings.bad_updates == "rollback" and self.bad_in_a_row >= settings.bad_in_a_row

    def settled(self) -> bool:
        """Waits for the update handed over last; whether it was a good one."""
        self.flush()
        return self.bad_in_a_row == 0

    def flush(self) -> None:
        """Waits for the metrics handed over last, and records them.

        Raises:
            InputError: a bad update, where the config says to stop.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        found = {name: float(value) for name, value in jax.device_get(pending.found).items()}
        self.bad_in_a_row = int(found.pop(BAD_IN_A_ROW))
        values = {f"train/{name}": value for name, value in found.items()}
        waited_s, self._waited_s = self._batches.wait_s - self._waited_s, self._batches.wait_s
        self._window.step(waited_s)
        done = self._done if self.bad_in_a_row else self._done + 1
        self._phases.stepped(done, waited_s, values)
        if self.bad_in_a_row:
            self._left_out += self._run.data.batch_size
            self._tell_bad(pending, values)
            return
        self._count_bad()
        self._done += 1
        if self._run.loop.record_examples:
            self._log.emit(StepExamples(self._done, pending.position, pending.ids))
        every = self._run.loop.log_every
        if not self._recorded or self._done % every == 0 or self._done == self._total:
            self._record(self._done, values)

    def rewind(self, back_to: run_length.Position) -> None:
        """Goes back to where a checkpoint was saved; the examples seen since stay seen."""
        self._count_bad()
        self._done = back_to.done
        self._left_out = self._seen - back_to.learned
        self.bad_in_a_row = 0
        self._log.emit(Rewound(back_to.done, self._seen))
        self._phases.at(back_to.done)

    @contextlib.contextmanager
    def interrupted(self, name: str, allowance_s: float = PAUSE_ALLOWANCE_S) -> Iterator[None]:
        """For what is no step: an evaluation, a save. Records what is pending before it.

        Its time does not count for the throughput, and has a limit of its own.

        Args:
            name: of the phase.
            allowance_s: as :meth:`jaxtrain.telemetry.phases.Phases.within` takes it.
        """
        self.flush()
        with self._phases.within(name, allowance_s), self._window.paused():
            yield

    def validated(self, done: int, found: Validation) -> None:
        """Records a validation after update ``done``."""
        self._log.emit(Metrics(done, found.values))
        self.first = found.values | self.first
        self.last |= found.values
        self.say(
            f"step {done}/{self._total} | validation | "
            + " | ".join(f"{name} {value:.4g}" for name, value in sorted(found.values.items()))
        )
        for name, content in found.samples.items():
            sample = Sample(done, name, content)
            self._log.emit(sample)
            self.samples.append(sample)

    def close(self) -> None:
        """Ends what measures in the background."""
        self._system_metrics.close()

    def _tell_bad(self, pending: "_Pending", values: dict[str, float]) -> None:
        """Says what is known of a bad update, and which examples were in it."""
        loss, norm = values["train/loss"], values["train/grad_norm"]
        last = pending.position + self._run.data.batch_size - 1
        settings = self._run.optim
        what = (
            f"update {self._done + 1} is bad: its loss is {loss:.4g} and its gradient's norm "
            f"{norm:.4g} (learning rate {values['train/learning_rate']:.3g}, examples "
            f"{pending.position} to {last} of the order)"
        )
        self._log.emit(BadStep(self._done, pending.position, str(loss), str(norm), ids=pending.ids))
        most = {"off": 1, "skip": settings.bad_in_a_row}.get(settings.bad_updates, math.inf)
        if self.bad_in_a_row >= most:
            self._count_bad()
            raise InputError(
                f"{what}: bad_steps.jsonl names them; go on from the newest checkpoint with "
                "--resume latest and a lower --optim.peak_lr, or look with --debug"
            )
        if self.bad_in_a_row == 1:
            self.say(f"{what}: skipped; bad_steps.jsonl lists it")
        else:
            self._unsaid += 1

    def _count_bad(self) -> None:
        """After a row of bad updates: how many followed the first, in one line."""
        if self._unsaid:
            which = "one more update" if self._unsaid == 1 else f"{self._unsaid} more updates"
            self.say(f"{which} in a row skipped as bad; bad_steps.jsonl lists them")
        self._unsaid = 0

    def _record(self, done: int, values: dict[str, float]) -> None:
        values = values | self._window.close()
        found = self._system_metrics.window()
        held = hardware.memory_gib()
        if held is not None:
            found[GPU_MEMORY] = held
        values |= self._of_all(found)
        self.first = values | self.first
        self.last |= values
        self._log.emit(Metrics(done, values))
        self._phases.logged(values)
        # The first window waits for workers to start: it says nothing of those to come.
        starting = not self._recorded
        self._recorded = True
        steps_per_second = None if starting else values.get("train/steps_per_second")
        eta_s = (self._total - done) / steps_per_second if steps_per_second else None
        self.say(console_line(done, self._total, values, eta_s))
        if not starting:
            self._mention_wait(values)

    def _mention_wait(self, values: dict[str, Any]) -> None:
        share = values.get("train/data_wait_fraction", 0.0)
        if share > WAIT_SHARE_TO_MENTION and not self._mentioned_wait:
            self._mentioned_wait = True
            more = f"raise --data.workers (now {self._run.data.workers}) or --data.prefetch (now "
            more += f"{self._run.data.prefetch})"
            fix = f"{self._faster}; or {more}" if self._faster else more
            self.say(f"the step waits for input {share:.0%} of the time (measured): {fix}")
