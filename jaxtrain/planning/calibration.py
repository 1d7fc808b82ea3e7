"""Predicts the time of a step from rates that were measured on the same kind of device.

A class of operation (:mod:`jaxtrain.xla.operations`) takes ``seconds = FLOPs / flop_rate + bytes /
byte_rate + calls * call_seconds``. The three coefficients are fitted to the instructions that
``bench`` traced, without negative ones. A class that no measured program contains gets the
coefficients of all classes together. Instructions that run at the same time make a step shorter
than their sum, and gaps between them make it longer: the ratio is measured too.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import InputError, shown
from jaxtrain.storage import atomic
from jaxtrain.xla.operations import Totals

VERSION = 1
_MOST = 1e30  # FLOPs, bytes, calls, seconds: far beyond any step, and their sums stay finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """The instructions of one class in a measured program that cost the same.

    Attributes:
        kind: class of operation.
        flops: of all of them, per step and device.
        moved: bytes read and written by them, per step and device.
        calls: how often they run per step.
        seconds: their measured time, per step and device.
    """

    kind: str
    flops: float
    moved: float
    calls: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A measured step.

    Attributes:
        config: its name and overrides, as typed.
        step_s: median time of a step that was not traced.
        samples: its traced instructions.
        versions: of jax and jaxlib.
    """

    config: str
    step_s: float
    samples: tuple[Sample, ...]
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes:
        seconds: of the step.
        error: factor, less one, by which the measured steps differ most from their prediction.
        kinds: class of operation -> its seconds per step.
    """

    seconds: float
    error: float
    kinds: dict[str, float]


class Calibration:
    """Rates of one kind of device, from measured steps.

    Args:
        device: its name, as jax prints it.
        measured: at least one step, of one device.

    Attributes:
        jax: the versions of jax that measured.

    Raises:
        ValueError: no finite rates follow from the samples.
    """

    def __init__(self, device: str, measured: Sequence[MeasuredStep]) -> None:
        self.device, self.measured = device, tuple(measured)
        self.jax = {step.versions.get("jax", "unknown") for step in measured}
        samples = [one for step in measured for one in step.samples]
        self._any = _fit(samples)
        kinds = {one.kind for one in samples}
        self.rates = {kind: _fit([x for x in samples if x.kind == kind]) for kind in kinds}
        ratios = {
            step.config: step.step_s / sum(self._kinds(total_work(step.samples)).values())
            for step in measured
        }
        self.ratio = float(np.median(list(ratios.values())))
        self.error = max(max(self.ratio / one, one / self.ratio) for one in ratios.values()) - 1
        if not np.isfinite([self.ratio, self.error, *np.ravel(list(self.rates.values()))]).all():
            raise ValueError("no finite rates follow from its samples")

    def predict(self, totals: Mapping[str, Sequence[float]]) -> Prediction:
        """Predicts the time of a step.

        Args:
            totals: class of operation -> FLOPs, bytes, and calls (:func:`operations.totals`).
        """
        kinds = {kind: self.ratio * one for kind, one in self._kinds(totals).items()}
        return Prediction(sum(kinds.values()), self.error, kinds)

    def _kinds(self, totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
        return {
            kind: float(np.dot(self.rates.get(kind, self._any), work))
            for kind, work in totals.items()
        }


def total_work(samples: Iterable[Sample]) -> dict[str, Totals]:
    """Returns class of operation -> its FLOPs, bytes, and calls, per step and device."""
    sums: dict[str, Totals] = {}
    for one in samples:
        flops, moved, calls = sums.get(one.kind, Totals(0.0, 0.0, 0.0))
        sums[one.kind] = Totals(flops + one.flops, moved + one.moved, calls + one.calls)
    return sums


def _fit(samples: Sequence[Sample]) -> np.ndarray:
    """Returns seconds per FLOP, per byte, and per call, by least squares.

    A residual counts relative to the root of the sample's time: neither do a few large operations
    decide alone, nor do many small ones that take no time together. The root is that of at least
    the mean, so that no sample decides alone by a time near zero.
    """
    from scipy import optimize  # takes 0.3 s to import, and few plans have a calibration

    seconds = np.array([one.seconds for one in samples])
    weights = np.maximum(seconds, max(seconds.mean(), 1e-12)) ** -0.5
    work = np.array([(one.flops, one.moved, one.calls) for one in samples], float)
    scale = np.maximum(work.max(axis=0), 1e-30)  # the columns differ by nine orders of magnitude
    found, _ = optimize.nnls(work / scale * weights[:, None], seconds * weights)
    return np.asarray(found / scale)


def load(path: Path) -> Calibration:
    """Reads a calibration file.

    Raises:
        InputError: it is missing, is not a calibration file, or has no usable measurement.
    """
    device, measured = _read(path)
    if not measured:
        raise InputError(f"{path} has no measured step: {_HOW}")
    try:
        return Calibration(device, measured)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise InputError(f"{path} cannot be used: {error}: {_HOW}") from None


_HOW = "write one with jaxtrain bench --config NAME --calibration FILE"


def measured_step(config: str, findings: Mapping[str, Any]) -> MeasuredStep:
    """Returns the measured step in what ``bench`` found.

    Args:
        config: name and overrides, as typed.
        findings: of :mod:`jaxtrain.bench.measurement`, with its parts "steps" and "trace".
    """
    return MeasuredStep(
        config=config,
        step_s=findings["rows"]["synthetic/step"]["median_s"],
        samples=tuple(Sample(**one) for one in findings["samples"]),
        versions={name: metadata.version(name) for name in ("jax", "jaxlib")},
    )


def check(path: Path) -> None:
    """Checks that measurements can be added to a file; a missing one is fine.

    Raises:
        InputError: it cannot be read as one.
    """
    if path.exists():
        _read(path)


def add(path: Path, device: str, measured: MeasuredStep) -> None:
    """Adds a measured step to a file, which it creates; the same config replaces its earlier one.

    Raises:
        InputError: the file is of another device, or cannot be read as a calibration file.
    """
    before: tuple[MeasuredStep, ...] = ()
    if path.exists():
        of, before = _read(path)
        if of != device:
            raise InputError(
                f"{path} holds measurements of {of}, not of {device}: use another file"
            )
    kept = [one for one in before if one.config != measured.config]
    content = {
        "version": VERSION,
        "device": device,
        "measured": [dataclasses.asdict(one) for one in [*kept, measured]],
    }
    atomic.write_whole(path, json.dumps(content, indent=1).encode() + b"\n")


def _read(path: Path) -> tuple[str, tuple[MeasuredStep, ...]]:
    try:
        content = atomic.read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: {_HOW}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a calibration file: {error}: {_HOW}") from None
    try:
        if content["version"] != VERSION:
            raise InputError(
                f"{path} has version {shown(content['version'])} of a calibration file; this "
                f"program reads version {VERSION}: measure again"
            )
        return str(content["device"]), tuple(_measured(one) for one in content["measured"])
    except (ArithmeticError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is not a calibration file ({type(error).__name__}: {error}): {_HOW}"
        ) from None


def _measured(one: dict[str, Any]) -> MeasuredStep:
    samples = tuple(
        Sample(
            kind=str(x["kind"]),
            flops=_number(x["flops"]),
            moved=_number(x["moved"]),
            calls=_number(x["calls"]),
            seconds=_number(x["seconds"]),
        )
        for x in one["samples"]
    )
    step_s = _number(one["step_s"])
    if not samples or not step_s or not any(x.seconds for x in samples):
        raise ValueError("a measured step without times")
    versions = {str(name): str(value) for name, value in one["versions"].items()}
    return MeasuredStep(
        config=str(one["config"]), step_s=step_s, samples=samples, versions=versions
    )


def _number(value: Any) -> float:
    number = float(value)
    if not 0 <= number < _MOST:
        raise ValueError(
            f"{shown(value)} where a number of 0 or more, below {_MOST:g}, is expected"
        )
    return number
