"""Validates a state on all devices, and makes the sample images and texts of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxtrain import config
from jaxtrain.data.pipeline import ValidationBatches
from jaxtrain.data.source import as_numbers
from jaxtrain.ops import generation
from jaxtrain.optim import ema
from jaxtrain.sharding import ShardingRule
from jaxtrain.training.state import ModelDefinition, State
from jaxtrain.training.step import build_eval_step, jit_eval_step
from jaxtrain.xla import options

_LOOK_EVERY_S = 0.05  # for a stop, while validation is compiled


class Validation(NamedTuple):
    """The results of a validation.

    Attributes:
        values: ``val/NAME`` -> value, the same in every process.
        samples: name -> sample of the first batch: an image uint8 [H, W, 3], a clip
            uint8 [T, H, W, 3], or a text.
        labels: name -> labels of the rows and of the columns of a sample.
        baseline: ``val/NAME`` -> value of the best answer that ignores the input.
        averaged: ``val/NAME`` -> value over the first batch.
        raw: the same for the parameters themselves, if what is validated is their average.
    """

    values: dict[str, float]
    samples: dict[str, np.ndarray | str]
    labels: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {}
    baseline: Mapping[str, float] = {}
    averaged: Mapping[str, float] = {}
    raw: Mapping[str, float] = {}


class Stop(Protocol):
    """Decides whether a run stops (:class:`jaxtrain.training.stopping.Stopping`)."""

    def signaled(self) -> bool:
        """Returns whether this process received a stop signal."""

    def agreed(self) -> bool:
        """Returns whether all processes stop; waits for all of them."""


class Evaluator:
    """Validates states, always on the same examples."""

    def __init__(
        self,
        definition: ModelDefinition,
        rule: ShardingRule,
        precision: config.Precision,
        target: State,
        batches: ValidationBatches,
        *,
        deterministic: bool = False,
        decode: Callable[[Sequence[int]], str] = as_numbers,
    ) -> None:
        def jitted(method: str) -> Any:
            step = build_eval_step(definition, rule, precision=precision, method=method)
            return jit_eval_step(step, target, rule.mesh, deterministic=deterministic)

        self._derived, self._baseline_of = definition.derived, definition.baseline
        self._baseline: dict[str, float] | None = None
        self._labels = definition.sample_labels(batches.spec)
        self._batches = batches
        self._groups = int(batches.chosen.groups.max(initial=0)) + 1
        self._decode = decode
        self._target = target
        self._jitted = {name: jitted(name) for name in ("evaluate", "samples", "baseline_sums")}
        self._programs: futures.Future[dict[str, Any]] | None = None

    def names(self) -> set[str]:
        """Returns the names of the metrics, without computing them."""
        sums = jax.eval_shape(self._jitted["evaluate"], *self._arguments())
        spreads = {f"val/{name}_std" for name, terms in sums.items() if len(terms) == 3}
        derived = self._derived(dict.fromkeys(sums, 0.0))
        return {f"val/{name}" for name in (*sums, *derived)} | spreads

    def ensure_compiled(self, stop: Stop) -> None:
        """Compiles on the first call; returns early if this process received a stop signal."""
        if self._programs is None:
            self._programs = options.in_background(self._compile)
        while not self._programs.done() and not stop.signaled():
            futures.wait([self._programs], _LOOK_EVERY_S)

    def __call__(
        self, state: State, stop: Stop, alive: Callable[[], None] = lambda: None
    ) -> Validation | None:
        """Validates a state; uses the EMA of its parameters if there is one.

        Returns:
            The results; None, in every process alike, if the run stops.
        """
        self.ensure_compiled(stop)
        if stop.agreed():
            return None
        assert self._programs is not None, "ensure_compiled() has made them"
        programs = self._programs.result()
        params = ema.with_averages(state.params, state.opt)
        sums: dict[str, np.ndarray] = {}
        counted: dict[str, np.ndarray] = {}
        averaged: dict[str, float] = {}
        raw: dict[str, float] = {}
        samples: dict[str, np.ndarray | str] = {}
        of_groups: dict[str, np.ndarray] = {}
        batches = iter(self._batches)
        for number in range(len(self._batches)):
            alive()
            if stop.agreed():
                return None
            batch = next(batches)
            if number == 0:
                arrays = jax.device_get(programs["samples"](params, state.extras, batch))
                samples = {
                    name: self._for_display(np.asarray(array)) for name, array in arrays.items()
                }
            result = jax.device_get(programs["evaluate"](params, state.extras, batch))
            _add(sums, {name: np.asarray(terms[:2]) for name, terms in result.items()})
            groups = self._batches.groups(number)
            _add(
                of_groups,
                {
                    name: _by_group(np.asarray(terms[2]), groups, self._groups)
                    for name, terms in result.items()
                    if len(terms) > 2
                },
            )
            if (
                number == 0
                and params.keys()
                and any(params[name] is not array for name, array in state.params.items())
            ):
                averaged = _named(weighted_means(result))
                raw_sums = jax.device_get(programs["evaluate"](state.params, state.extras, batch))
                raw = _named(weighted_means(raw_sums))
            if self._baseline is None:
                _add(
                    counted, jax.device_get(programs["baseline_sums"](params, state.extras, batch))
                )
        if self._baseline is None:
            self._baseline = _named(self._baseline_of(counted)) if counted else {}
        finished = weighted_means({name: tuple(terms) for name, terms in sums.items()})
        finished |= self._derived(finished)
        finished |= {f"{name}_std": spread(*terms) for name, terms in of_groups.items()}
        return Validation(_named(finished), samples, self._labels, self._baseline, averaged, raw)

    def _for_display(self, sample: np.ndarray) -> np.ndarray | str:
        if np.issubdtype(sample.dtype, np.int32):
            return generation.page(sample, self._decode)
        return sample

    def _arguments(self) -> tuple[Any, ...]:
        return self._target.params, self._target.extras, self._batches.spec

    def _compile(self) -> dict[str, Any]:
        return {
            name: jitted.lower(*self._arguments()).compile()
            for name, jitted in self._jitted.items()
        }


def _named(values: Mapping[str, float]) -> dict[str, float]:
    return {f"val/{name}": value for name, value in values.items()}


def _add(sums: dict[str, np.ndarray], more: Mapping[str, np.ndarray]) -> None:
    for name, array in more.items():
        added = np.asarray(array, np.float64)
        sums[name] = sums[name] + added if name in sums else added


def weighted_means(sums: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """Divides (sum, weight, ...) of each name once, after all devices and batches; NaN for weight
    0.
    """
    return {
        name: float(terms[0]) / float(terms[1]) if terms[1] else math.nan
        for name, terms in sums.items()
    }


def spread(sums: np.ndarray, weights: np.ndarray) -> float:
    """Returns the standard deviation over groups of a sample, as `evaluate` has it over videos.

    Groups of weight zero do not count. It is 0 for a single group, and NaN for none.
    """
    means = sums[weights > 0] / weights[weights > 0]
    if len(means) < 2:
        return 0.0 if len(means) else math.nan
    return float(np.std(means, ddof=1))


def _by_group(of_examples: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """Sums up values and weights of examples [2, B] by their groups: [2, count]."""
    known = groups >= 0
    return np.stack(
        [np.bincount(groups[known], row[known], minlength=count) for row in of_examples]
    )
