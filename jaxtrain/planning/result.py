"""What :func:`jaxtrain.plan` returns."""

import html
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain import config
from jaxtrain.config import invocation, overrides
from jaxtrain.errors import InputError
from jaxtrain.planning import input_measurement, input_rate, report
from jaxtrain.planning.planner import Planner


class PlanResult(dict[str, Any]):
    """A plan: the content of ``plan --json``.

    ``str()`` returns the text that ``plan`` prints, with arguments instead of flags.
    """

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None if unknown, because JAX's GPU compiler is missing."""
        return report.fits(self)

    def __str__(self) -> str:
        """The page that ``jaxtrain plan`` prints."""
        parts = ["\n".join(self["assumptions"]), report.text(self)]
        return invocation.with_arguments("\n\n".join(filter(None, parts)))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f'<pre style="font-family: monospace">{html.escape(str(self))}</pre>'


def predict(
    name: "str | config.Run",
    *,
    gpu: str | None,
    devices: str | None,
    price: float | None,
    changes: Mapping[str, Any],
    cores: int | None = None,
    source: input_rate.Source | None = None,
    measure_input: bool = False,
    efficiency: Path | None = None,
) -> PlanResult:
    """Compiles the step for the GPUs and predicts the run.

    Args:
        name: of the config; or a run that was loaded from one.
        gpu: short name of the card; None takes the one in the config's name.
        devices: such as "2x8"; None takes the config's mesh.
        price: per GPU and hour.
        changes: overrides, dotted name -> value.
        cores: CPU cores of each node; None assumes a number per GPU.
        source: ``clips`` for the output of ``prepare clips``, ``videos`` for others; None looks at
            the data, or assumes ``videos``.
        measure_input: whether to measure on this machine how fast a core loads the data.
        efficiency: a file that ``bench --efficiency`` wrote on the card; None assumes a range.

    Raises:
        InputError: wrong use, or the step cannot be compiled.
    """
    typed = [
        word
        for field, value in changes.items()
        for word in (f"--{field}", *overrides.words(overrides.plain(value)))
    ]
    if isinstance(name, config.Run):
        given = config.as_typed(name)
        if not given:
            raise InputError(
                f"the run {name.name!r} was not loaded from a config, and plan loads it again in "
                "another process: pass a config's name or path, and overrides"
            )
        name, typed = given[1], [*given[2:], *typed]
    if cores is not None and cores < 1:
        raise InputError(f"--cores {cores}: use at least 1")
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"--price-per-gpu-hour {price:g}: use 0 or more")
    measured = input_measurement.measure(name, typed, None) if measure_input else None
    host = input_rate.Host(cores=cores, source=source, measured=measured)
    planner = Planner(name, typed, gpu, devices, price, host=host, efficiency=efficiency)
    return PlanResult(planner.compiled(()) | {"assumptions": planner.said})
