"""Predicts hours and cost of a run on machines that a provider may take back at any time.

The time between preemptions is taken to be exponential, with the mean M. A run saves after each
interval t of training, which costs C, and a restart costs R, which a preemption may interrupt, too.
Then the expected time for training T is, exactly,

    M exp(R/M) (exp((t + C)/M) - 1) T/t

and the best interval is nearly sqrt(2 C M) (J. W. Young, "A first order approximation to the
optimum checkpoint interval", 1974), which J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", 2006, has improved for an M that is not much more than C.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

from jaxtrain.cost.step_time import Range
from jaxtrain.errors import InputError
from jaxtrain.planning import prediction
from jaxtrain.planning.prediction import HOUR_S

if TYPE_CHECKING:
    from jaxtrain.planning.planner import Plan

DAY_S = 24 * HOUR_S
REPLACE_S = 300.0
"""Assumed: from the end of a machine until its replacement begins to start the run."""
_NEVER = 50.0  # mean times between preemptions for one interval: such a run makes no progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spot:
    """A run on spot machines, as expected, in the best and in the worst case of its plan.

    Attributes:
        price: per GPU-hour, in any currency.
        preemptions: of any machine of the run, per day.
        every_s: seconds of training between checkpoints.
        every_steps: the same in steps, at least one.
        save_s: seconds that a save costs.
        restart_s: seconds from a preemption to the next step.
        hours: of the run; infinite if it makes no progress.
        money: cost of all GPUs in these hours.
        noticed: hours if each preemption is announced early enough to save.
    """

    price: float
    preemptions: float
    every_s: float
    every_steps: int
    save_s: float
    restart_s: float
    hours: Range
    money: Range
    noticed: Range


def best_interval_s(save_s: float, mean_s: float) -> float:
    """Returns Daly's interval of training between checkpoints."""
    if save_s >= 2 * mean_s:
        return mean_s
    ratio = math.sqrt(save_s / (2 * mean_s))
    return math.sqrt(2 * save_s * mean_s) * (1 + ratio / 3 + ratio**2 / 9) - save_s


def expected_s(
    training_s: float, every_s: float, save_s: float, restart_s: float, mean_s: float
) -> float:
    """Returns the expected time for training that is killed without notice; see above."""
    if max(restart_s, every_s + save_s) > _NEVER * mean_s:
        return math.inf
    segment = mean_s * math.exp(restart_s / mean_s) * math.expm1((every_s + save_s) / mean_s)
    return segment * training_s / every_s


def expected_with_notice_s(
    training_s: float, every_s: float, save_s: float, restart_s: float, mean_s: float
) -> float:
    """Returns the expected time if a preemption costs a save and a restart, but no training."""
    if restart_s > _NEVER * mean_s:
        return math.inf
    undisturbed = training_s * (1 + save_s / every_s)
    return undisturbed * (1 + (save_s + mean_s * math.expm1(restart_s / mean_s)) / mean_s)


def check(price: float, preemptions: float) -> None:
    """Checks the numbers of ``plan --spot``."""
    if not (0 <= price < math.inf and 0 < preemptions < math.inf):
        raise InputError(
            f"--spot {price:g} {preemptions:g}: use a price of 0 or more, and preemptions per day "
            "above 0"
        )


def predict(plan: "Plan", price: float, preemptions: float) -> Spot | None:
    """Predicts a planned run on spot machines; None if its length is unknown.

    Args:
        preemptions: per day, of any machine of the run: each ends all processes.
    """
    if plan.run.seconds is None or plan.run.hours is None or plan.run.steps is None:
        return None
    mean_s, by_phase = DAY_S / preemptions, plan.run.seconds
    state_s = plan.step.checkpoint / plan.nodes / prediction.SAVE_BYTES_PER_S
    save_s = prediction.SAVE_S + state_s
    begins = ("start", "compilation")
    restart_s = REPLACE_S + state_s + sum(by_phase[name][0] for name in begins)
    every_s = best_interval_s(save_s, mean_s)
    first_s, training_s = [0.0, 0.0], [0.0, 0.0]
    for name, span in by_phase.items():
        for case in range(2):
            if name in (*begins, "preparing data"):
                first_s[case] += span[case]
            elif name != "saves":
                training_s[case] += span[case]

    def hours(expected: float, case: int) -> float:
        return (first_s[case] + expected) / HOUR_S

    costs = (every_s, save_s, restart_s, mean_s)
    killed = [hours(expected_s(training_s[case], *costs), case) for case in range(2)]
    noticed = [hours(expected_with_notice_s(training_s[case], *costs), case) for case in range(2)]
    devices = plan.step.cost.devices
    return Spot(
        price=price,
        preemptions=preemptions,
        every_s=every_s,
        every_steps=max(1, round(every_s * plan.run.steps / training_s[1])),
        save_s=save_s,
        restart_s=restart_s,
        hours=(killed[0], killed[1]),
        money=(killed[0] * devices * price, killed[1] * devices * price),
        noticed=(noticed[0], noticed[1]),
    )
