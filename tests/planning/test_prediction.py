"""Tests predictions from bytes and operations: verdict, time and cost."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.planning import cards, duration, input_rate, plan, prediction, report
from jaxtrain.telemetry.hardware import GIB

H100 = cards.card("h100")
NO_BEST = ["--checkpoint.best_metric", "None", "--loop.early_stop_patience", "None"]
CLIPS = input_rate.Host(cores=96, source="clips")  # fast enough


def findings(**more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "parameters": 2e9,
        "optimizer": 4e9,
        "batch": 1e8,
        "gradients": 2e9,
        "outputs": 100,
        "temporaries": 3e10,
        "program": 0,
        "replayed": False,
        "largest": [],
        "model_flops": 8e14,
        "flops": 1e15,
        "convolutions": False,
        "moved_bytes": 1e11,
        "attention": {"forward": 40, "backward": 20},
        "kernels": {"convolutions": 3, "other_convolutions": 2},
        "traffic": [
            {
                "kind": "all-gather",
                "dtype": "bf16",
                "axis": "fsdp",
                "crosses_nodes": True,
                "count": 2,
                "wire_bytes": 1e9,
                "seconds": 0.02,
                "overlapped": 0.5,
            }
        ],
        "formula_bytes": 1e6,
        "elements": 7,
        "checkpoint": 84,
        "samples": {"image": 10**6, "clip": 10**6},
        "unsharded": {"norm": [7]},
        "batch_of": "8 examples",
        "total": 3600,
        "compile_s": 1.0,
        "versions": {"jax": "0"},
        "estimate": False,
    }
    return found | more


def made(
    price: float | None = None,
    host: input_rate.Host = CLIPS,
    typed: Sequence[str] = (),
    efficiency: float | None = None,
    **more: Any,
) -> plan.Plan:
    run = config.load("h100_16", typed)
    return plan.make_plan(
        findings(**more),
        H100,
        run,
        overrides=["--seed", "3"],
        gpus_per_node=8,
        price=price,
        host=host,
        efficiency=efficiency,
    )


def test_needed_memory_is_the_sum_of_the_rows_and_counts_gradients_once() -> None:
    memory = prediction.memory(findings(), H100, 16, 8)
    assert memory.needed == sum(memory.rows.values()) == 2e9 + 4e9 + 1e8 + 3e10 + 100
    assert memory.capacity + sum(memory.outside.values()) <= memory.total == H100.memory


def test_the_other_states_of_a_replayed_step_are_named() -> None:
    lines = report.memory(made(outputs=7 * GIB, replayed=True)).split("\n")
    (second,) = [line for line in lines if "second state" in line]
    assert second.split()[2] == "7.000"
    assert "loop.replay_every computes twice" in second
    estimate = made(outputs=7 * GIB, replayed=True, estimate=True)
    certain = "parameters, optimizer, second state, and batch take 12.7 of"
    assert certain in report.verdict(estimate)


def test_convolutions_and_more_devices_leave_less_memory() -> None:
    plain = prediction.memory(findings(), H100, 1, 8)
    assert prediction.memory(findings(convolutions=True), H100, 1, 8).spare < plain.spare
    small = dataclasses.replace(H100, memory=8 * GIB)  # a tenth of it is less than NCCL needs
    one, node, nodes = (prediction.memory(findings(), small, n, 8).capacity for n in (1, 8, 16))
    assert one > node > nodes


def test_every_card_leaves_room_outside_the_pool() -> None:
    for card in cards.CARDS.values():
        memory = prediction.memory(findings(), card, 16, 8)
        kept = prediction.DRIVER + prediction.CONTEXT + prediction.NCCL["several nodes"]
        assert card.memory - memory.capacity >= kept


@pytest.mark.parametrize("seed", range(20))
def test_best_time_is_at_most_the_worst_and_at_least_each_peak(seed: int) -> None:
    rng = random.Random(seed)
    found = findings(flops=rng.uniform(1e9, 1e17), moved_bytes=rng.uniform(1e6, 1e13))
    found["traffic"][0]["seconds"] = rng.uniform(1e-6, 1)
    time = prediction.time(found, H100, 16, "bfloat16")
    assert time.arithmetic <= time.best <= time.worst
    assert max(time.memory, time.communication) <= time.best
    assert time.best >= max(time.arithmetic, time.memory) + time.communication - time.hidden
    parts = {"arithmetic": time.arithmetic, "memory": time.memory}
    slowest = (parts | {"communication": time.communication})[time.bound]
    assert slowest == max(time.arithmetic, time.memory, time.communication)


def test_a_measured_efficiency_replaces_the_range_and_communication_is_added() -> None:
    time = prediction.time(findings(), H100, 16, "bfloat16", 0.5)
    step = 2 * max(time.arithmetic, time.memory)
    assert time.best == pytest.approx(step / 1.15 + time.communication - time.hidden)
    assert time.worst == pytest.approx(step * 1.15 + time.communication)
    printed = report.text(made(efficiency=0.5))
    assert "at 50% of the GPU's peaks, as measured, plus or minus 15%," in printed
    assert "of the GPU's peaks, no communication" not in printed
    assumed = report.text(made())
    assert "    from 40% of the GPU's peaks, no communication hidden," in assumed
    assert "    to 65%, all overlapped communication hidden" in assumed


def test_float32_matmuls_run_at_half_the_rate() -> None:
    half = prediction.time(findings(), H100, 16, "float32").arithmetic
    assert half == 2 * prediction.time(findings(), H100, 16, "bfloat16").arithmetic


def test_hours_and_cost() -> None:
    found = made(price=2.0)
    parts = found["run"]["seconds"]
    assert parts["steps"][0] == pytest.approx(3600 * found["time"]["best"])
    assert parts["waiting for input"] == (0.0, 0.0)
    assert parts["compilation"] == (1.0, 1.0)
    for end in (0, 1):
        hours = sum(part[end] for part in parts.values()) / 3600
        assert found["run"]["hours"][end] == pytest.approx(hours)
        assert found["run"]["money"][end] == pytest.approx(hours * 16 * 2.0)
    assert made(total=None, price=2.0)["run"]["money"] is None
    assert "hours unknown: loop.epochs depends on the data" in report.text(made(total=None))


def test_hours_and_cost_include_replayed_steps() -> None:
    plain = made(price=2.0)
    found = made(price=2.0, typed=["--loop.replay_every", "1000"])  # of 3,600: 4 with the last one
    assert "replayed steps" not in plain["run"]["seconds"]
    assert "replayed steps" not in report.text(plain)
    extra = found["run"]["seconds"]["replayed steps"]
    for end, step in enumerate(("best", "worst")):
        assert extra[end] == pytest.approx(4 * 1.1 * found["time"][step])
        hours = found["run"]["hours"][end] - plain["run"]["hours"][end]
        assert hours == pytest.approx(extra[end] / 3600)
        money = found["run"]["money"][end] - plain["run"]["money"][end]
        assert money == pytest.approx(hours * 16 * 2.0)
    often = made(typed=["--loop.replay_every", "120"])
    seconds = often["run"]["seconds"]
    assert seconds["replayed steps"][0] == pytest.approx(30 * 1.1 / 3600 * seconds["steps"][0])
    assert "replayed steps:" in report.text(often)


def test_examples_per_second_that_each_host_must_load() -> None:
    found = made()  # 16 GPUs in 2 nodes
    rate = found["run"]["steps_per_second"][0] * found["batch_size"] / 2
    assert f" to {rate:.0f} clips/s needed by the steps: the GPUs do not wait" in report.text(found)


def test_slow_input_bounds_the_step_and_is_paid_for() -> None:
    slow = made(price=2.0, host=input_rate.Host(cores=16, source="videos"))
    fast = made(price=2.0)
    assert slow["time"]["bound"] == "input"
    assert fast["time"]["bound"] == "arithmetic"
    rows = slow["batch_size"] / 2
    assert slow["run"]["steps_per_second"] == pytest.approx(
        [n / rows for n in (12 * 4.6, 12 * 1.9)]
    )
    assert slow["run"]["seconds"]["steps"] == fast["run"]["seconds"]["steps"]
    waited = slow["run"]["seconds"]["waiting for input"]
    assert waited[0] == pytest.approx(3600 * (rows / (12 * 4.6) - slow["time"]["best"]))
    assert slow["run"]["money"][0] > 5 * fast["run"]["money"][0]
    said = report.text(slow)
    for words in (
        "bound by input",
        "the GPUs wait",
        "waiting for input:",
        "prepare clips, once: 11.",
    ):
        assert words in said, words


def test_input_that_may_be_too_slow() -> None:
    found = made(host=input_rate.Host(cores=96, source="videos"), flops=3e15)
    assert found["input"]["waits"] == "maybe"
    assert found["time"]["bound"] == "arithmetic or input"
    assert "the GPUs may wait" in report.text(found)


def test_validation_and_saves_follow_the_config() -> None:
    found = made()["run"]["seconds"]
    often = made(typed=["--loop.eval_every", "50", "--checkpoint.every", "100"])["run"]["seconds"]
    assert often["validation"][0] > 5 * found["validation"][0]
    assert often["validation"][0] > 3600 / 50 * (0.16 + 0.44)  # samples
    assert often["saves"][0] == pytest.approx(37 / 4 * found["saves"][0])
    assert found["start"] == (duration.START_S, duration.START_S)
    saves = len(range(0, 3600, 100)) + 1
    larger = made(checkpoint=2e11, typed=["--checkpoint.every", "100"])["run"]["seconds"]
    # Each of two hosts copies its half of 200 GB.
    assert larger["saves"][0] == pytest.approx(saves * (duration.SAVE_S + 100))
    never = made(typed=["--loop.eval_every", "None", *NO_BEST])["run"]["seconds"]
    assert never["validation"] == (0.0, 0.0)


def test_the_verdict_includes_the_margin() -> None:
    found = made()
    assert report.verdict(found) == (
        f"fits with {found['memory']['spare'] / GIB:.1f} GiB to spare on each device"
    )
    assert report.verdict(made(temporaries=1e11)).startswith("does not fit: ")
    assert report.fits(found) is True
    assert report.fits(made(temporaries=1e11)) is False


@pytest.mark.parametrize("temporaries", [0.0, 1e9, 1e11])
def test_an_estimate_leaves_open_whether_it_fits(temporaries: float) -> None:
    found = made(temporaries=temporaries, estimate=True)
    assert report.fits(found) is None
    said = report.verdict(found)
    assert said.startswith("unknown whether it fits: parameters, optimizer, and batch take ")
    assert f"temporaries take {temporaries / GIB:.1f} GiB on a CPU" in said


def test_an_estimate_rejects_a_state_that_is_too_large_by_itself() -> None:
    found = made(estimate=True)
    found["memory"]["needed"] += 2 * found["memory"]["capacity"]
    assert report.fits(found) is False
    assert report.verdict(found).startswith("does not fit: parameters, optimizer, and batch take ")


def test_the_text_contains_every_section() -> None:
    said = report.text(made(price=1.0))
    for words in (
        *("16 x NVIDIA H100 80GB HBM3 (2 nodes)", "not sharded: norm (7,)", "memory per device"),
        *(
            "bound by",
            "all-gather",
            "between nodes",
            "times the formula's",
            "steps/s",
            "3,600 steps",
        ),
        *("for 16 GPUs at 1 per GPU-hour", "start: ", "compilation: ", "steps: "),
        *("input per host, predicted", "88 workers on 96 cores", "to 4,162 clips/s by"),
        "cuDNN attention: 40 forward calls, 20 backward calls",
        "2 convolutions without cuDNN",
    ):
        assert words in said, words


def test_an_estimate_is_labeled_and_omits_what_it_cannot_predict() -> None:
    found = made(
        estimate=True,
        traffic=None,
        moved_bytes=None,
        attention=None,
        kernels=None,
        largest=None,
        price=2.0,
    )
    assert found["time"] is None
    assert found["run"]["money"] is None
    said = report.text(found)
    assert said.startswith("ESTIMATE")
    assert "unknown whether it fits" in said
    assert "read and written" not in said
    assert "communication per step" not in said
