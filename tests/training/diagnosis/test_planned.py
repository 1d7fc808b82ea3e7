"""What a run records of its plan is what ``plan`` prints."""

import types
from typing import Any

import pytest
from planning.step_findings import compiled, traffic

from jaxtrain import config, machine
from jaxtrain.cost import cards
from jaxtrain.data import input_rate
from jaxtrain.formats import GIB
from jaxtrain.planning import planner
from jaxtrain.training.diagnosis import planned

H100 = types.SimpleNamespace(platform="gpu", device_kind=cards.CARDS["h100"].name)
CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")
RUN = ("h100_16", ("--model.frames", "12"))


def step(**changes: Any) -> Any:
    size = {"arguments": int(6.1e9), "outputs": 100, "temporaries": int(3e10), "program": 10**7}
    work = {"flops": 1e15, "moved_bytes": 1e11, "traffic": (traffic(),), "convolutions": True}
    return compiled(**size | work | changes)


@pytest.mark.parametrize("typed", [(), ("--loop.replay_every", "100")])
def test_it_is_what_plan_says(monkeypatch: pytest.MonkeyPatch, typed: tuple[str, ...]) -> None:
    monkeypatch.setattr(planned, "_per_node", lambda: 8)
    monkeypatch.setattr(machine, "cores", lambda processes: 12)
    run = config.load(RUN[0], [*RUN[1], *typed])
    state = int(5e9)
    found = step(second_state=state if typed else 0)
    plan = planner.make_plan(
        found, cards.CARDS["h100"], run, gpus_per_node=8, host=input_rate.Host(cores=12)
    )
    assert planned.planned(run, found.cost, state, H100) == {
        "planned_gib": pytest.approx(plan.memory.needed / GIB),
        "planned_step_s": (plan.time.best, plan.time.worst),
        "planned_input_s": plan.input.seconds,
    }


def test_no_time_is_planned_without_rates_or_communication() -> None:
    run = config.load(RUN[0], RUN[1])
    unread = step(traffic=None).cost
    none = {"planned_step_s": None, "planned_input_s": None}
    assert planned.planned(run, unread, 0, H100).items() >= none.items()
    on_cpu = planned.planned(run, step().cost, 0, CPU)
    assert on_cpu == none | {"planned_gib": step().cost.planned_bytes / GIB}


def test_an_unknown_notation_of_collectives_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Setup:
        def cost(self, traced: Any, compiled: Any, gpus_per_node: int | None = None) -> Any:
            if gpus_per_node is not None:
                raise ValueError("unknown notation")
            return step(traffic=None).cost

    monkeypatch.setattr(planned.jax, "devices", lambda: [H100])
    assert planned.cost(Setup(), None, None).traffic is None  # type: ignore[arg-type]
