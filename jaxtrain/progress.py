"""What a run says while it runs: one record a logged step, read one step late."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config, devices, metrics, processes
from jaxtrain.data.pipeline import TrainingBatches
from jaxtrain.errors import InputError
from jaxtrain.watchdog import Watchdog

# A run that waits for its input longer than this share of the time says so, and how to mend it.
WAIT_SHARE_TO_MENTION = 0.05


class Progress:
    """Takes each step's metrics while the next step runs, and records them at cadence.

    The metrics of a step are fetched after the next step has been handed to the device, so that
    logging stalls nothing; waiting for them also keeps the host from running ahead by more than
    one step.

    Args:
        run: the config.
        recorder: where records go.
        watchdog: told of each finished step.
        total: steps of the whole run.
        batches: asked how long the loop has waited.
        mesh: over all devices.

    Attributes:
        first: each metric's first value.
        last: each metric's last value.
        pictures: files made so far.
    """

    def __init__(
        self,
        run: config.Run,
        recorder: metrics.Recorder,
        watchdog: Watchdog,
        total: int,
        batches: TrainingBatches,
        mesh: jax.sharding.Mesh,
    ) -> None:
        self._run = run
        self._recorder = recorder
        self._watchdog = watchdog
        self._total = total
        self._batches = batches
        self._window = metrics.Window(
            run.data.batch_size,
            run.model.tokens_per_example(),
            run.model.flops_per_example(),
            mesh.size,
            metrics.peak_bf16_flops(jax.devices()[0].device_kind),
        )
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._utilization = devices.Utilization(os.environ, mesh.devices.flat[0].platform)
        self._most = processes.Agreement(mesh, jnp.nanmax)
        self._mean = processes.Agreement(mesh, jnp.nanmean)
        self._waited_s = 0.0
        self._mentioned_wait = False
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.pictures: list[Path] = []
        self.say = recorder.say

    def push(self, done: int, found: dict[str, jax.Array]) -> None:
        """Hands over the metrics of update ``done``; records those of the update before."""
        self.flush()
        self._pending = (done, found)

    def flush(self) -> None:
        """Waits for the metrics handed over last, and records them.

        Raises:
            InputError: the loss or the gradient is not finite.
        """
        if self._pending is None:
            return
        done, arrays = self._pending
        self._pending = None
        values = {f"train/{name}": float(value) for name, value in jax.device_get(arrays).items()}
        self._watchdog.beat(done)
        waited_s, self._waited_s = self._batches.wait_s - self._waited_s, self._batches.wait_s
        self._window.step(waited_s)
        if not (math.isfinite(values["train/loss"]) and math.isfinite(values["train/grad_norm"])):
            self._recorder.record(done, values)
            raise InputError(
                f"the loss of update {done} is {values['train/loss']} and its gradient's norm "
                f"{values['train/grad_norm']:.3g} (learning rate "
                f"{values['train/learning_rate']:.3g}): go on from the newest checkpoint with "
                "--resume latest and a lower --optim.peak_lr, or look with --debug"
            )
        if not self.first or done % self._run.loop.log_every == 0 or done == self._total:
            self._record(done, values)

    @contextlib.contextmanager
    def interrupted(self, name: str) -> Iterator[None]:
        """For what is no step: an evaluation, a save. Records what is pending before it.

        Its time counts neither for the throughput nor for the limit of a step.
        """
        self.flush()
        with self._watchdog.pause(name), self._window.paused():
            yield

    def validated(
        self, done: int, values: dict[str, float], pictures: dict[str, np.ndarray]
    ) -> None:
        """Records a validation after update ``done``."""
        self._recorder.record(done, values)
        self.first = values | self.first
        self.last |= values
        self._recorder.say(
            f"step {done}/{self._total} | validation | "
            + " | ".join(f"{name} {value:.4g}" for name, value in sorted(values.items()))
        )
        for name, picture in pictures.items():
            path = self._recorder.image(done, name, picture)
            if path is not None:
                self.pictures.append(path)

    def close(self) -> None:
        """Ends what measures in the background."""
        self._utilization.close()

    def _record(self, done: int, values: dict[str, float]) -> None:
        values = values | self._window.close()
        # Of all hosts. Every process takes part, also one that cannot say (nan).
        for name, agreement, value in (
            ("train/gpu_memory_usage", self._most, devices.memory_gib()),
            ("train/gpu_utilization", self._mean, self._utilization.share()),
        ):
            agreed = agreement.exchange(math.nan if value is None else value)
            if agreed is not None and not math.isnan(agreed):
                values[name] = agreed
        starting = not self.first  # the first window waits for workers to start
        self.first = values | self.first
        self.last |= values
        self._recorder.record(done, values)
        steps_per_second = values.get("train/steps_per_second")
        eta_s = (self._total - done) / steps_per_second if steps_per_second else None
        self.say(metrics.console_line(done, self._total, values, eta_s))
        if not starting:
            self._mention_wait(values)

    def _mention_wait(self, values: dict[str, Any]) -> None:
        share = values.get("train/data_wait_fraction", 0.0)
        if share > WAIT_SHARE_TO_MENTION and not self._mentioned_wait:
            self._mentioned_wait = True
            self.say(
                f"the step waits for input {share:.0%} of the time (measured): raise "
                f"--data.workers (now {self._run.data.workers}) or --data.prefetch (now "
                f"{self._run.data.prefetch})"
            )
