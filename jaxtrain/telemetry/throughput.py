"""Measures the throughput of a run over a logging window."""

import contextlib
import time
from collections.abc import Callable, Iterator


class Window:
    """Measures throughput between two log lines.

    A window starts when it is created, and again with each :meth:`close`.

    Args:
        batch_size: examples per step, over all devices.
        tokens_per_example: None for a model that counts no tokens.
        flops_per_example: FLOPs of the model, forward and backward, without recomputation.
        peak_flops_per_device: FLOP/s; None omits ``train/mfu``.
    """

    def __init__(
        self,
        batch_size: int,
        tokens_per_example: int | None,
        flops_per_example: float,
        devices: int,
        peak_flops_per_device: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batch_size = batch_size
        self._tokens_per_example = tokens_per_example
        self._flops_per_example = flops_per_example
        self._peak_flops = (
            None if peak_flops_per_device is None else devices * peak_flops_per_device
        )
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Starts the window again, for example after a compilation."""
        self._began = self._clock()
        self._steps = 0
        self._waited_s = 0.0
        self._paused_s = 0.0

    def step(self, wait_s: float) -> None:
        """Counts a finished step that waited ``wait_s`` for its batch."""
        self._steps += 1
        self._waited_s += wait_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes time that is not training, such as validation and saving."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - began

    def close(self) -> dict[str, float]:
        """Returns the window's metrics by full name, {} if no step ended in it; starts the next.

        ``train/mfu`` is (FLOPs the model needs) / (time x devices x datasheet rate), in [0, 1].
        """
        elapsed_s = self._clock() - self._began - self._paused_s
        steps, waited_s = self._steps, self._waited_s
        self.restart()
        if steps == 0 or elapsed_s <= 0:
            return {}
        rate = steps / elapsed_s
        metrics = {
            "train/steps_per_second": rate,
            "train/samples_per_second": rate * self._batch_size,
            "train/data_wait_fraction": min(1.0, waited_s / elapsed_s),
        }
        if self._tokens_per_example is not None:
            tokens = rate * self._batch_size * self._tokens_per_example
            metrics["train/tokens_per_second"] = tokens
        if self._peak_flops is not None:
            needed = rate * self._batch_size * self._flops_per_example
            metrics["train/mfu"] = needed / self._peak_flops
        return metrics
