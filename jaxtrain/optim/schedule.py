"""Computes the learning rates, momenta, and weight decays of each step, on the host.

The compiled step receives them as an argument, so that runs of other lengths, rates, or decays use
the same program. Each is a number of the config times a function of ``s``, the number of completed
steps. ``T`` is the length of the run and ``w`` that of the linear warm-up, in steps:

- warm-up: ``(s + 1) / w``, so the first step has a rate, and step ``w`` the peak;
- cosine: ``0.5 (1 + cos(pi p))`` with ``p = (s - w) / (T - w)``;
- linear: ``1 - p``;
- constant: 1;
- trapezoid (WSD): 1, then linear, or by ``1 - sqrt`` (https://arxiv.org/abs/2405.18392), over the
  last ``d`` steps, or in one step before them.

All but constant fall to ``warmdown_to`` instead of 0.

After ``T`` the rate stays as at ``T``. The cosine and linear forms are those of
``diffusers.get_scheduler`` and ``transformers``, warm-up and trapezoid are nanochat's.

All processes must pass equal bits. So this file uses only ``+ - * /`` and square roots of float64,
which IEEE 754 rounds in one way, and no cosine of a C library.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config
from jaxtrain.config import param_groups
from jaxtrain.errors import InputError

# The group of parameters without a role, and the entry with the rate that is recorded.
ADAMW = "adamw"
_RECORDED = "learning_rate"


class GroupScalars(NamedTuple):
    """The scalars of a group of parameters in one step, as floats or as arrays [].

    Attributes:
        rate: the learning rate.
        decay: weight decay, which the optimizer multiplies by the rate.
        momentum: of Muon.
    """

    rate: Any
    decay: Any = 0.0
    momentum: Any = 0.0


class Scalars(NamedTuple):
    """What a compiled step receives from the host.

    When the host starts a step, it does not know yet whether the step before it was good, and so
    counts. It passes the values for both cases.

    Attributes:
        step: completed steps if the step before was good, uint32 [].
        warmup: length of the warm-up in steps, uint32 [].
        values: float32 [2, groups, 3], if the step before was bad, and if it was good.
    """

    step: Any
    warmup: Any
    values: Any


class Schedule:
    """The scalars of each step of a run.

    Args:
        settings: schedule, rates, and decays.
        total_steps: steps of the run, warm-up included.
        groups: groups of the model.

    Raises:
        InputError: warm-up and warm-down do not fit into the run.
    """

    def __init__(
        self,
        settings: config.Optim,
        total_steps: int,
        groups: param_groups.Groups | None = None,
    ) -> None:
        self._settings, self._total = settings, total_steps
        self._warmup = warmup_steps(settings, total_steps)
        self._warmdown = warmdown_steps(settings, total_steps)
        span = total_steps - self._warmup
        if settings.schedule == "trapezoid" and self._warmdown > span:
            raise InputError(
                f"the warm-up of {self._warmup} steps and the warm-down of {self._warmdown} steps "
                f"(optim.warmdown_fraction={settings.warmdown_fraction}) are longer than the run "
                f"of {total_steps} steps: lower one of them"
            )
        self._roles = {} if settings.muon is None else param_groups.roles(groups or {})
        self._separate = param_groups.separate_groups(groups or {})

    def learning_rate(self, step: int) -> float:
        """Returns the rate after ``step`` completed steps that is recorded: Muon's, if it is on."""
        muon = self._settings.muon
        return (self._settings.peak_lr if muon is None else muon.peak_lr) * self._factor(step)

    def at(self, step: int) -> dict[str, GroupScalars]:
        """Returns the scalars of each group after ``step`` completed steps, in float64."""
        settings, factor = self._settings, self._factor(step)
        of = {
            _RECORDED: GroupScalars(self.learning_rate(step)),
            ADAMW: GroupScalars(settings.peak_lr * factor, self._decay(settings.peak_lr)),
        }
        for label, role in self._roles.items():
            assert settings.muon is not None, "only then there are roles"
            peak_lr = peak_of_role(role, settings.muon)
            rate = peak_lr * factor
            if role.role == "matrix":
                decay = self._decay(peak_lr)
                if settings.muon.cautious_decay:
                    decay *= half_cosine(min(step / self._total, 1.0))
                of[label] = GroupScalars(rate, decay, self._momentum(settings.muon, step))
            else:
                of[label] = GroupScalars(rate, role.weight_decay)
        for label, group in self._separate.items():
            rate = group.peak_lr if step >= group.start_step else 0.0
            of[label] = GroupScalars(rate, group.weight_decay)
        return of

    def scalars(self, step: int) -> Scalars:
        """Returns the argument of a step.

        Args:
            step: completed steps before it, if the step before it was good.
        """
        cases = [list(self.at(max(0, number)).values()) for number in (step - 1, step)]
        return Scalars(np.uint32(step), np.uint32(self._warmup), np.array(cases, np.float32))

    @property
    def spec(self) -> Scalars:
        """Shapes and dtypes of the argument."""
        return Scalars(
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.scalars(0))
        )

    def of_step(self, scalars: Scalars, step: jax.Array) -> dict[str, GroupScalars]:
        """Returns each group's scalars in the compiled step.

        Args:
            scalars: its argument.
            step: completed steps before it.
        """
        bad, good = scalars.values
        values = jnp.where(step == scalars.step, good, bad)
        return {label: GroupScalars(*values[row]) for row, label in enumerate(self.at(0))}

    def _factor(self, step: int) -> float:
        """Returns the rate after ``step`` completed steps as a fraction of the peak."""
        if step < self._warmup:
            return (step + 1) / self._warmup
        settings = self._settings
        step = min(step, self._total)
        left = (self._total - step) / (self._total - self._warmup)
        if settings.schedule == "constant":
            return 1.0
        if settings.schedule in ("cosine", "linear"):
            height = left if settings.schedule == "linear" else half_cosine(1 - left)
            return settings.warmdown_to + (1 - settings.warmdown_to) * height
        down = self._warmdown_progress(step)
        shapes = {"linear": down, "sqrt": math.sqrt(down)}
        if settings.warmdown_shape == "step":
            shapes["step"] = float(step >= self._total - self._warmdown)
        return 1 + (settings.warmdown_to - 1) * shapes[settings.warmdown_shape]

    def _decay(self, peak_lr: float) -> float:
        """Returns the decay that the rate multiplies."""
        settings = self._settings
        return settings.weight_decay / peak_lr if settings.decouple_lr else settings.weight_decay

    def _momentum(self, muon: config.Muon, step: int) -> float:
        """Returns the smaller of the rise and the fall."""
        fraction = min(step / muon.momentum_steps, 1.0) if muon.momentum_steps else 1.0
        risen = (1 - fraction) * muon.first_momentum + fraction * muon.momentum
        if muon.last_momentum is None:
            return risen
        down = self._warmdown_progress(step)
        return min(risen, (1 - down) * muon.momentum + down * muon.last_momentum)

    def _warmdown_progress(self, step: int) -> float:
        """Returns the fraction of the warm-down that is complete."""
        length = max(self._warmdown, 1)
        return min(max((step - (self._total - length)) / length, 0.0), 1.0)


def recorded_rate(step: Mapping[str, GroupScalars]) -> Any:
    """Returns the learning rate of the metrics, from :meth:`Schedule.of_step`."""
    return step[_RECORDED].rate


def half_cosine(fraction: float) -> float:
    """Falls from 1 to 0 while ``fraction`` rises: ``0.5 (1 + cos(pi fraction))``.

    As the square of a sine, by its Taylor series: exact to some units of the last place of
    float64, where it is near 0, too.
    """
    angle = 0.5 * math.pi * (1 - fraction)
    sine = term = angle
    for n in range(2, 24, 2):
        term *= -angle * angle / (n * (n + 1))
        sine += term
    return sine * sine


def warmup_steps(settings: config.Optim, total_steps: int) -> int:
    """Returns the length of the warm-up in steps.

    Raises:
        InputError: the warm-up is not shorter than the run.
    """
    if settings.warmup_steps is not None:
        steps = settings.warmup_steps
    else:
        assert settings.warmup_fraction is not None, "config.validate() ensures that one is set"
        steps = _rounded_down(settings.warmup_fraction, total_steps)
    if steps >= total_steps:
        raise InputError(
            f"the warm-up of {steps} steps must be shorter than the run of {total_steps} steps: "
            "lower --optim.warmup_steps or --optim.warmup_fraction"
        )
    return steps


def warmdown_steps(settings: config.Optim, total_steps: int) -> int:
    """Returns the length of the warm-down of a trapezoid, in steps."""
    return _rounded_down(settings.warmdown_fraction, total_steps)


def peak_of_role(role: config.Role, settings: config.Muon) -> float:
    """Returns the peak rate of a role's parameters."""
    rates = {
        "matrix": settings.peak_lr,
        "embedding": settings.embedding_lr,
        "unembedding": settings.unembedding_lr,
        "scalar": settings.scalar_lr,
    }
    return role.scale * rates[role.role]


def schedule_change(
    before: tuple[config.Optim, int], after: tuple[config.Optim, int], step: int
) -> str | None:
    """Returns how the learning rate of a resumed run differs from before; None if it does not.

    Args:
        before: settings and total steps of the run that saved the checkpoint.
        after: of this run.
        step: completed steps.

    Raises:
        InputError: warm-up and warm-down do not fit into a run.
    """
    old, new = (Schedule(*run).learning_rate(step) for run in (before, after))
    (_, old_total), (settings, total) = before, after
    same = math.isclose(old, new, rel_tol=1e-6)
    if same and (old_total == total or settings.schedule == "constant"):
        return None
    rate = f"stays {new:.3g}" if same else f"changes from {old:.3g} to {new:.3g}"
    if old_total == total:
        return f"the learning rate at step {step} {rate}"
    return (
        f"the learning rate schedule ({settings.schedule}) now covers {total} steps instead of "
        f"{old_total}: the rate at step {step} {rate}"
    )


def _rounded_down(fraction: float, total: int) -> int:
    """Rounds down, like ``total // 10``; 0.29 x 100 is 29, although the product is 28.999..."""
    return int(fraction * total + 1e-9)
