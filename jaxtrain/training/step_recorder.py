"""Reports a run while it trains: one record per logged step, fetched one step late."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain import config
from jaxtrain.config import run_length
from jaxtrain.cost import cards
from jaxtrain.data.pipeline import TrainingBatches
from jaxtrain.distributed import process_group
from jaxtrain.distributed.watchdog import PAUSE_ALLOWANCE_S
from jaxtrain.errors import BadSteps
from jaxtrain.models.contract import Batch
from jaxtrain.optim.build import rate_flag
from jaxtrain.telemetry import hardware
from jaxtrain.telemetry.console import console_line, validation_line
from jaxtrain.telemetry.events import BadStep, EventLog, Metrics, Rewound, Sample, StepExamples
from jaxtrain.telemetry.images import Labels
from jaxtrain.telemetry.phases import Phases
from jaxtrain.telemetry.throughput import Window
from jaxtrain.training.diagnosis.bad_step import KeptStep
from jaxtrain.training.diagnosis.step_times import SlowProcesses
from jaxtrain.training.model_flops import model_flops
from jaxtrain.training.run_summary import Results
from jaxtrain.training.state import State
from jaxtrain.training.step import BAD_IN_A_ROW
from jaxtrain.training.validation import Validation

# A run that waits for data for more than this fraction of the time prints how to fix that.
WAIT_FRACTION_TO_MENTION = 0.05
# After so many bad steps in a row, the run ends or rolls back.
MOST_IN_A_ROW = 10

GPU_MEMORY = "train/gpu_memory_usage"


class _Pending(NamedTuple):
    """A step whose metrics have not been fetched yet.

    Attributes:
        metrics: its metrics, which the device may still be computing.
        first_example: number of its first example, which is the number of examples seen before it.
    """

    metrics: dict[str, jax.Array]
    first_example: int
    ids: list[int]
    batch: Batch


class StepRecorder:
    """Takes each step's metrics while the next step runs, and records those of every Nth step.

    The metrics of a step are fetched after the next step was dispatched, so that logging does not
    stall the device. Waiting for them also keeps the host at most one step ahead.

    Args:
        waits: whether each step is complete when it is pushed, as with --debug. It is then recorded
            at once; otherwise its throughput window would end with the following step.
        keep: saves a bad step that ends the run, given the state at the end; returns the command
            that examines it, or "".
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
        keep: Callable[[KeptStep, State], str] = lambda bad, state: "",
    ) -> None:
        self._run = run
        self._waits, self._keep = waits, keep
        self._log = log
        self._phases = phases
        self._total = total
        self._batches = batches
        self._window = Window(
            run.data.batch_size,
            run.model.tokens_per_example(),
            model_flops(run.training_model),
            mesh.size,
            cards.rates(jax.devices()[0].device_kind)[0],
        )
        self._step = position.step
        self._examples_seen = position.examples_seen
        self._examples_skipped = position.skipped
        self._pending: _Pending | None = None
        self.bad_in_a_row = bad_in_a_row
        self._unreported = 0  # bad steps in a row after the first
        self._last_bad = ""
        self._limit = 1 if run.optim.bad_updates == "off" else MOST_IN_A_ROW
        self._first_nan: KeptStep | None = None  # since the last good step
        self._system_metrics = hardware.SystemMetrics(os.environ, mesh.local_devices, log.say)
        self._of_all = process_group.Exchange(
            mesh, mean=hardware.MEAN, largest=(*hardware.LARGEST, GPU_MEMORY)
        )
        self._slow = SlowProcesses(mesh, log.say)
        self._waited_s = 0.0
        self._mentioned_wait = self._recorded = False
        self.results = Results(position.step, log.say)
        self.say = log.say

    @property
    def step(self) -> int:
        """The number of completed steps, if the step pushed last is good."""
        return self._step + (self._pending is not None)

    def position(self) -> run_length.Position:
        """Returns the position of the run; waits for the step pushed last."""
        self.flush()
        return run_length.Position(self._step, self._examples_seen, self._examples_skipped)

    def finished(self) -> bool:
        """Returns whether the run has all its steps."""
        if self.step >= self._total:
            self.flush()
        return self._step >= self._total

    def push(
        self, metrics: dict[str, jax.Array], ids: np.ndarray, state: State, batch: Batch
    ) -> None:
        """Takes the metrics of a new step; records those of the step before it.

        Raises:
            BadSteps: a bad step at which the config stops the run.
        """
        self._flush("ahead")
        self._pending = _Pending(metrics, self._examples_seen, ids.tolist(), batch)
        self._batches.note_pending(metrics)
        self._examples_seen += self._run.data.batch_size
        # Nothing may be dispatched after the step that ends the run or triggers a rollback: the
        # state would be another, and the position after the rollback would depend on how far ahead
        # the host was.
        if self._waits or self.bad_in_a_row or self._limit == 1:
            self.flush()
        if self._is_last_bad():
            self._report_bad_count()
            raise BadSteps(
                f"{self._last_bad}; see bad_steps.jsonl: resume from the newest checkpoint with "
                f"--resume latest; {self.advice(state)}"
            )

    def too_many_bad(self) -> bool:
        """Returns whether the run must roll back to a checkpoint."""
        return self._run.optim.bad_updates == "rollback" and self.bad_in_a_row >= self._limit

    def _is_last_bad(self) -> bool:
        return self._run.optim.bad_updates != "rollback" and self.bad_in_a_row >= self._limit

    def last_step_was_good(self) -> bool:
        """Waits for the step pushed last; returns whether it was good."""
        self.flush()
        return self.bad_in_a_row == 0

    def flush(self) -> None:
        """Waits for the metrics pushed last, and records them."""
        self._flush("devices")

    def _flush(self, wait: str) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self._slow.times.inside(wait):
            fetched = jax.device_get(pending.metrics)
        metrics = {name: float(value) for name, value in fetched.items()}
        self.bad_in_a_row = int(metrics.pop(BAD_IN_A_ROW))
        values = {f"train/{name}": value for name, value in metrics.items()}
        waited_s, self._waited_s = self._batches.wait_s - self._waited_s, self._batches.wait_s
        self._window.step(waited_s)
        self._slow.stepped(waited_s)
        step = self._step if self.bad_in_a_row else self._step + 1
        self._phases.stepped(step, waited_s, values)
        if self.bad_in_a_row:
            self._report_bad(pending, values)
            self._examples_skipped += self._run.data.batch_size
            return
        self._first_nan = None
        self._report_bad_count()
        self._step += 1
        self.results.add(values)
        if self._run.loop.record_examples:
            self._log.emit(StepExamples(self._step, pending.first_example, pending.ids))
        interval = self._run.loop.log_every
        if not self._recorded or self._step % interval == 0 or self._step == self._total:
            self._record(self._step, values)

    def rewind(self, back_to: run_length.Position) -> None:
        """Goes back to the position of a checkpoint; examples seen since then are not repeated."""
        self._first_nan = None
        self._report_bad_count()
        self._step = back_to.step
        self._examples_skipped = self._examples_seen - back_to.learned
        self.bad_in_a_row = 0
        self._log.emit(Rewound(back_to.step, self._examples_seen))
        self._phases.at(back_to.step)

    def on_devices(self) -> contextlib.AbstractContextManager[None]:
        """Counts the time inside as a wait for the devices, and so for the other processes."""
        return self._slow.times.inside("devices")

    @contextlib.contextmanager
    def paused_for(self, name: str, allowance_s: float = PAUSE_ALLOWANCE_S) -> Iterator[None]:
        """Pauses the throughput window, for example for a validation or a save.

        It first records the pending step. The phase has a time limit of its own.
        """
        self.flush()
        times = self._slow.times
        with self._phases.within(name, allowance_s), self._window.paused(), times.inside("pause"):
            yield

    def validated(self, step: int, validation: Validation) -> None:
        """Records a validation after step ``step``."""
        # Samples first: a tracker looks for them when it sees the metrics.
        for name, content in validation.samples.items():
            title = f"{name}   step {step:,}   {_measured(validation.values)}".rstrip()
            labels = Labels(title, *validation.labels.get(name, ()))
            self._log.emit(Sample(step, name, content, labels))
        self._log.emit(Metrics(step, validation.values))
        self._log.say(validation_line(step, self._total, validation.values))

    def close(self) -> None:
        """Stops the background measurements."""
        self._system_metrics.close()

    def _report_bad(self, pending: "_Pending", values: dict[str, float]) -> None:
        loss, norm = values["train/loss"], values["train/grad_norm"]
        last = pending.first_example + self._run.data.batch_size - 1
        self._last_bad = (
            f"step {self._step + 1} is bad: loss {loss:.4g}, gradient norm {norm:.4g} (learning "
            f"rate {values['train/learning_rate']:.3g}, examples {pending.first_example} to {last})"
        )
        self._log.emit(
            BadStep(self._step, pending.first_example, str(loss), str(norm), pending.ids)
        )
        losses_and_norms = [
            value for name, value in values.items() if name.endswith(("/loss", "grad_norm"))
        ]
        if self._first_nan is None and not all(map(math.isfinite, losses_and_norms)):
            before = run_length.Position(self._step, pending.first_example, self._examples_skipped)
            self._first_nan = KeptStep(
                before, self.bad_in_a_row - 1, pending.batch, pending.ids, self._last_bad
            )
        if self._is_last_bad():
            return
        if self.bad_in_a_row == 1:
            self.say(f"{self._last_bad}: skipped; see bad_steps.jsonl")
        else:
            self._unreported += 1

    def advice(self, state: State) -> str:
        """Saves the first of the bad steps in a row; returns what to do about them."""
        lower = f"lower {rate_flag(self._run.optim)}"
        if self._first_nan is None:  # only their norms were too large
            return lower
        with self._phases.within("save"):
            command = self._keep(self._first_nan, state)
        return f"{lower}, or find the cause with: {command}" if command else lower

    def _report_bad_count(self) -> None:
        if self._unreported:
            which = "1 more step" if self._unreported == 1 else f"{self._unreported} more steps"
            self.say(f"{which} skipped in a row; see bad_steps.jsonl")
        self._unreported = 0

    def _record(self, step: int, values: dict[str, float]) -> None:
        values = values | self._window.close()
        if not self._recorded:  # these steps include the start of the workers
            self._slow.started()
        measured = self._system_metrics.window()
        used = hardware.memory_gib()
        if used is not None:
            measured[GPU_MEMORY] = used
        with self.on_devices():  # CPUs may compute the exchange at once, with all processes
            self._slow.logged()
            values |= self._of_all.delayed(measured)
        self._log.emit(Metrics(step, values))
        self._phases.logged(values)
        # The first window includes the start of the workers: it does not predict later ones.
        starting = not self._recorded
        self._recorded = True
        steps_per_second = None if starting else values.get("train/steps_per_second")
        eta_s = (self._total - step) / steps_per_second if steps_per_second else None
        self._log.say(console_line(step, self._total, values, eta_s))
        if not starting:
            self._mention_wait(values)

    def _mention_wait(self, values: dict[str, Any]) -> None:
        fraction = values.get("train/data_wait_fraction", 0.0)
        if fraction > WAIT_FRACTION_TO_MENTION and not self._mentioned_wait:
            self._mentioned_wait = True
            workers, prefetch = self._batches.workers, self._run.data.prefetch
            more = f"raise --data.workers (now {workers})"
            if workers:  # each of them holds this many parts of batches ready
                more += f" or --data.prefetch (now {prefetch})"
            if self._run.data.workers is None:
                allowed = f"{workers} worker{'' if workers == 1 else 's'}"
                fewer = "" if jax.default_backend() == "cpu" else ", or fewer GPUs"
                more = f"use a host with more CPU cores (they allow {allowed}){fewer}"
            self.say(f"training waits for data {fraction:.0%} of the time (measured): {more}")


def _measured(values: Mapping[str, float]) -> str:
    if "val/psnr" in values:
        return f"val/psnr {values['val/psnr']:.2f} dB"
    return f"val/loss {values['val/loss']:.4g}" if "val/loss" in values else ""
