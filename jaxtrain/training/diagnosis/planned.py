"""Predicts the compiled step of a run as ``plan`` does, for the devices that the run has.

Reports compare that with measurements (:mod:`jaxtrain.reporting.planned`).
"""

import math
import os
from typing import Any

import jax

from jaxtrain import config, machine
from jaxtrain.cost import cards
from jaxtrain.cost.step_cost import CUDNN, StepCost
from jaxtrain.cost.step_time import step_time
from jaxtrain.data import input_rate
from jaxtrain.distributed import process_group
from jaxtrain.formats import GIB
from jaxtrain.training.step_setup import StepSetup


def cost(setup: StepSetup, traced: jax.stages.Traced, compiled: jax.stages.Compiled) -> StepCost:
    """Reads the cost of the step, on GPUs with its communication if that can be read."""
    if jax.devices()[0].platform == "gpu":
        try:
            return setup.cost(traced, compiled, _per_node())
        except ValueError:  # in an unknown notation, for which no run must end
            pass
    return setup.cost(traced, compiled)


def planned(run: config.Run, step: StepCost, state_bytes: float, device: Any) -> dict[str, Any]:
    """Predicts memory and time of a step.

    Returns:
        ``planned_gib``; and ``planned_step_s`` and ``planned_input_s``, the least and the most
        seconds to compute a step and to load its batch, both None for a device that is not in the
        table of cards, such as a CPU.
    """
    needed = step.planned_bytes + (state_bytes if run.loop.replay_every else 0.0)
    if device.platform == "gpu":
        needed += step.program + (CUDNN if step.convolutions else 0.0)
    known: dict[str, Any] = {"planned_gib": needed / GIB}
    card = cards.of_device(device.device_kind)
    if card is None or (step.devices > 1 and step.traffic is None):
        return known | {"planned_step_s": None, "planned_input_s": None}
    time, gpus = step_time(step, card, run.precision), _per_node()
    processes = process_group.processes_on_this_host(os.environ)
    host = input_rate.Host(cores=machine.cores(processes) * processes)
    no_advice = (math.inf, math.inf)  # as if no step were shorter than the loading
    loading = input_rate.predict(run, gpus, -(-step.devices // gpus), host, no_advice)
    seconds = (time.best, time.worst)
    return known | {"planned_step_s": seconds, "planned_input_s": loading.seconds}


def _per_node() -> int:
    return jax.local_device_count() * process_group.processes_on_this_host(os.environ)
