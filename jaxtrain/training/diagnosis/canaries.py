"""Notices at validations that a run cannot succeed: canaries warn or stop it, gates stop it.

A canary asks what costs almost nothing beside a validation:

- did the parameters change since the last one? A wrong mask freezes a part, a learning rate of 0
  all of them;
- is the model better than the best answer that ignores its input: the mean color of each clip, the
  frequencies of the tokens? A public guide's run of 888 GPU-hours on H100s reports 4.24 dB for its
  validation, which a gray picture beats, without a warning;
- did the validation change?
- is the average of the parameters, which is validated, far worse than the parameters?

Each warns once; so does what :class:`DiscriminatorAlarm` finds in all steps. A run ends, with an
exit code after which launchers do not restart it, where nothing can change any more, where a masked
LM has not learned more than the frequencies for long, or where a gate of ``loop.gates`` is not met.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config
from jaxtrain.config import metrics
from jaxtrain.training.run_progress import RunProgress, Validated, unmet_gate
from jaxtrain.training.state import Arrays, ModelDefinition, State
from jaxtrain.training.validation import Validation

# Of the steps after the warm-up, and at least so many: before, a good run may still be worse than a
# constant, as a tiny masked LM was after 5 steps.
_GRACE = 0.1
_GRACE_STEPS = 200
# A masked LM first learns the frequencies of the tokens, and leaves this plateau late: it counts as
# stuck after this share of the run, and this many validations, within 1% of the frequencies.
_STUCK_FRACTION, _STUCK_VALIDATIONS, _STUCK_WITHIN = 0.25, 5, 0.01
# The average follows the parameters within about this many of its time constants.
_SETTLED = 5.0
_FAR_WORSE = 1.5  # times the loss of the parameters themselves
# A discriminator that is nearly always right, or hardly better than chance, for so many steps.
_ALARM_STEPS, _NEVER, _ALWAYS = 500, 0.55, 0.98


class Canaries:
    """Judges each validation of a run. All processes make the same calls, with the same result."""

    def __init__(
        self,
        run: config.Run,
        definition: ModelDefinition,
        total: int,
        warmup: int,
        rate: Callable[[int], float],
        say: Callable[[str], None],
    ) -> None:
        self._run, self._definition, self._say = run, definition, say
        self._rate = rate
        after_warmup = total - warmup
        self._grace_ends = warmup + max(int(_GRACE * after_warmup), _GRACE_STEPS)
        self._stuck_after = warmup + int(_STUCK_FRACTION * after_warmup)
        self._warned: set[str] = set()
        self._last: tuple[int, dict[str, np.ndarray]] | None = None  # steps, marks

    def judge(self, state: State, validation: Validation, run_progress: RunProgress) -> str:
        """Warns about a validation; returns why the run must end, or ""."""
        validations = run_progress.validations
        step = validations[-1].done
        now = jax.device_get(_marks(self._definition.trained(state.params)))
        broken = sorted(name for name, (_, finite) in now.items() if not finite)
        if broken:
            return f"{_listed(broken)} became NaN/Inf, so nothing more can be learned"
        marks = {name: mark for name, (mark, _) in now.items()}
        end = self._unchanged(step, marks)
        self._worse_than_baseline(step, validation)
        self._average(step, validation)
        self._equal(validations[-2:])
        self._last = step, marks
        return (
            end or self._stuck_at_frequencies(validation, validations) or self._gate(run_progress)
        )

    def _unchanged(self, step: int, marks: Mapping[str, np.ndarray]) -> str:
        if self._last is None or self._last[0] >= step:
            return ""
        before, old = self._last
        same = {name for name in marks if marks[name] == old.get(name)}
        if same == marks.keys():
            if all(
                self._rate(sampled) == 0 for sampled in (before, (before + step) // 2, step - 1)
            ):
                self._warn(
                    "rate",
                    f"no parameter changed from step {before} to {step}: the learning rate is 0",
                )
                return ""
            return (
                f"no parameter changed from step {before} to {step}, at a learning rate of "
                f"{self._rate(step - 1):.3g}: check what the optimizer masks"
            )
        modules = _by_module(marks)
        frozen = sorted(module for module, names in modules.items() if names <= same)
        if frozen:
            self._warn(
                f"still {frozen}",
                f"{_listed(frozen)} did not change from step {before} to {step}, although trained: "
                "no gradient reaches it, or the optimizer masks it; freeze it with --model.freeze "
                "if that is wanted",
            )
        return ""

    def _equal(self, last_two: Sequence[Validated]) -> None:
        before, now = last_two[0], last_two[-1]
        finite = not any(map(math.isnan, now.values.values()))
        if before.done < now.done and before.values == now.values and finite:
            self._warn(
                "same",
                f"the validations after {before.done} and {now.done} steps are equal to the last "
                "digit: what is validated does not change",
            )

    def _worse_than_baseline(self, step: int, validation: Validation) -> None:
        if step < self._grace_ends:
            return
        for name, baseline in validation.baseline.items():
            value = validation.values[name]
            better = metrics.describe(name, metrics.table(metrics.added_by(self._run.model))).better
            if (value < baseline) if better == "max" else (value > baseline):
                self._warn(
                    "baseline",
                    f"{name} is {value:.4g} after {step} steps: worse than {baseline:.4g}, the "
                    "value of the best answer that ignores the input. This run has learned nothing "
                    "yet: check its data, rate, and losses",
                )

    def _average(self, step: int, validation: Validation) -> None:
        settings = self._run.optim.average
        if settings is None or not validation.raw:
            return
        if step < _SETTLED * settings.every / (1 - settings.decay):
            return
        averaged, raw = validation.averaged["val/loss"], validation.raw["val/loss"]
        if averaged > _FAR_WORSE * raw > 0:
            self._warn(
                "average",
                f"the average of the parameters (optim.average) has a loss of {averaged:.4g} on "
                f"the first batch, the parameters themselves {raw:.4g}: it does not follow them",
            )

    def _stuck_at_frequencies(
        self, validation: Validation, validations: Sequence[Validated]
    ) -> str:
        baseline = validation.baseline.get("val/loss")
        if self._run.model.task != "fill" or baseline is None:
            return ""

        def close(validated: Validated) -> bool:
            level = (1 - _STUCK_WITHIN) * baseline
            return (
                validated.done > self._stuck_after and validated.values.get("val/loss", 0.0) > level
            )

        stuck = sum(1 for _ in itertools.takewhile(close, reversed(validations)))
        # After the run has ended, a resume with another rate gets as many validations again.
        if stuck == 0 or stuck % _STUCK_VALIDATIONS:
            return ""
        return (
            f"val/loss has stayed at {baseline:.4g}, that of the tokens' frequencies, for {stuck} "
            "validations: this masked LM does not learn; lower --optim.peak_lr, or raise "
            "--optim.warmup_steps"
        )

    def _gate(self, run_progress: RunProgress) -> str:
        unmet = unmet_gate(self._run.loop, run_progress)
        if unmet is None:
            return ""
        value = "NaN/Inf" if math.isnan(unmet.value) else f"{unmet.value:.4g}"
        return f"gate {unmet.gate} is not met: {unmet.gate.metric} is {value}"

    def _warn(self, kind: str, line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._say(f"warning: {line}")


class DiscriminatorAlarm:
    """Warns of a discriminator from which a decoder cannot learn."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._level, self._steps = "", 0

    def stepped(self, values: Mapping[str, float]) -> None:
        """Receives the metrics of a step, by full name."""
        right = values.get("train/discriminator_accuracy", 0.0)  # 0 before it begins
        level = ""
        if right > _ALWAYS:
            level = f"above {_ALWAYS:.0%}"
        elif 0 < right < _NEVER:
            level = f"below {_NEVER:.0%}"
        self._steps = self._steps + 1 if level == self._level else 1
        self._level = level
        if level and self._steps == _ALARM_STEPS:
            why = "it is always right: lower" if right > _ALWAYS else "it learns nothing: raise"
            self._say(
                f"warning: the discriminator's accuracy has been {level} for {_ALARM_STEPS} steps; "
                f"{why} --model.adversary.peak_lr, or set --model.adversary None"
            )


@jax.jit
def _marks(params: Arrays) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns a sum of each parameter's bits, uint32 [], and whether all its values are finite.

    Values that change leave the sum unchanged with a probability of about 2^-32.
    """

    def mark(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
        return jnp.sum(bits, dtype=jnp.uint32), jnp.isfinite(array).all()

    return {name: mark(array) for name, array in params.items()}


def _by_module(names: Any) -> dict[str, set[str]]:
    """Groups dotted paths by their first part, or two if the second is a number."""
    modules: dict[str, set[str]] = {}
    for name in names:
        first, _, rest = name.partition(".")
        second = rest.partition(".")[0]
        modules.setdefault(f"{first}.{second}" if second.isdigit() else first, set()).add(name)
    return modules


def _listed(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"
