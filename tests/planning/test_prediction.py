"""Tests predictions from bytes and operations: verdict, time and cost."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from planning.step_findings import compiled, traffic

from jaxtrain import config, formats
from jaxtrain.cost import cards, step_time
from jaxtrain.data import input_rate
from jaxtrain.data.contract import Estimate
from jaxtrain.formats import GIB
from jaxtrain.planning import planner, prediction, report
from jaxtrain.planning.compilation import CompiledStep, Temporary

H100 = cards.card("h100")
TWELVE = ("--model.frames", "12")  # the rates of input are of clips of 12x480x720
NO_BEST = ["--checkpoint.best_metric", "None", "--loop.early_stop_patience", "None"]
MANY = input_rate.Host(cores=96)  # fast enough

TWELVE = ["--model.frames", "12"]  # the rates of input are of such clips


def step(**changes: Any) -> CompiledStep:
    """A step of 16 devices that takes about 0.1 s and 36 GB."""
    size = {"parameters": int(2e9), "optimizer": int(4e9), "gradients": int(2e9)}
    size |= {"arguments": int(6.1e9), "outputs": 100, "temporaries": int(3e10)}
    kernels = {"attention_forward": 40, "attention_backward": 20, "other_convolutions": 2}
    work: dict[str, Any] = {"model_flops": 8e14, "flops": 1e15, "moved_bytes": 1e11}
    work |= {"kernels": kernels, "traffic": (traffic(),)}
    about: dict[str, Any] = {"checkpoint": 84, "samples": {"image": 10**6, "clip": 10**6}}
    about |= {"unsharded": {"norm": (7,)}, "batch_of": "8 examples", "total": 3600}
    return compiled(**size | work | about | changes)


def made(
    price: float | None = None,
    host: input_rate.Host = MANY,
    typed: Sequence[str] = (),
    efficiency: float | None = None,
    name: str = "h100_16",
    preparation: Sequence[Estimate] = (),
    **changes: Any,
) -> planner.Plan:
    return planner.make_plan(
        step(**changes),
        H100,
        config.load(name, [*(TWELVE if name == "h100_16" else ()), *typed]),
        gpus_per_node=8,
        price=price,
        host=host,
        efficiency=efficiency,
        preparation=preparation,
    )


def time_of(found: CompiledStep, precision: str = "bfloat16", **more: Any) -> step_time.StepTime:
    return step_time.step_time(found.cost, H100, precision, **more)


def test_needed_memory_is_the_sum_of_the_rows_and_counts_gradients_once() -> None:
    memory = prediction.memory(step(), H100, 8)
    assert memory.needed == sum(memory.rows.values()) == 2e9 + 4e9 + 1e8 + 3e10 + 100
    assert memory.capacity + sum(memory.outside.values()) <= memory.total == H100.memory
    assert memory.spare == memory.capacity - memory.needed


def test_the_other_states_of_a_replayed_step_are_named() -> None:
    lines = report.memory(made(second_state=7 * GIB)).split("\n")
    (second,) = [line for line in lines if "second state" in line]
    assert second.split()[2] == "7.000"
    assert "loop.replay_every computes twice" in second


def test_convolutions_and_more_devices_leave_less_memory() -> None:
    plain = prediction.memory(step(), H100, 8)
    assert prediction.memory(step(convolutions=True), H100, 8).spare < plain.spare
    small = dataclasses.replace(H100, memory=8 * GIB)  # a tenth of it is less than NCCL needs
    one, node, nodes = (prediction.memory(step(devices=n), small, 8).capacity for n in (1, 8, 16))
    assert one > node > nodes


def test_every_card_leaves_room_outside_the_pool() -> None:
    for card in cards.CARDS.values():
        memory = prediction.memory(step(), card, 8)
        kept = prediction.DRIVER + prediction.CONTEXT + prediction.NCCL["several nodes"]
        assert card.memory - memory.capacity >= kept


def test_a_measured_efficiency_replaces_the_range_and_communication_is_added() -> None:
    time = time_of(step(), efficiency=0.5)
    bound = time.arithmetic / 0.704 + time.memory / 0.887
    assert time.serial == pytest.approx(bound)
    assert time.communication == 1e9 / H100.node_rate
    assert time.best == pytest.approx(2 * bound / 1.15 + time.communication - time.hidden)
    assert time.worst == pytest.approx(2 * bound * 1.15 + time.communication)
    printed = report.text(made(efficiency=0.5))
    assert "at 50% (measured) +- 15%" in printed
    assert "assumed)\n\ninput" not in printed
    assert "at 101% to 74% (assumed)" in report.text(made())


def test_hours_and_cost() -> None:
    found = made(price=2.0)
    parts, time = found.run.seconds, found.time
    assert parts is not None
    assert time is not None
    assert parts["steps"][0] == pytest.approx(3600 * time.best)
    assert parts["waiting for input"] == (0.0, 0.0)
    assert parts["compilation"] == (1.0, 1.0)
    assert found.run.hours is not None
    assert found.run.money is not None
    for end in (0, 1):
        hours = sum(part[end] for part in parts.values()) / 3600
        assert found.run.hours[end] == pytest.approx(hours)
        assert found.run.money[end] == pytest.approx(hours * 16 * 2.0)
    assert made(total=None, price=2.0).run.money is None
    unknown = report.text(made(total=None))
    assert "hours unknown: loop.epochs depends on the data" in unknown
    assert max(map(len, unknown.splitlines())) <= 80


def seconds(found: planner.Plan) -> dict[str, prediction.Range]:
    assert found.run.seconds is not None
    return found.run.seconds


def test_a_gate_costs_the_start_and_its_share_of_the_run() -> None:
    text = "val/loss < 3 at 1500"  # decided by the validation after 1,600 of 3,600 steps
    found = made(price=2.0, typed=["--loop.gates", text, "--loop.eval_every", "400"])
    (hours,) = found.run.gates.values()
    assert found.run.hours is not None
    started = 61 / 3600  # start and compilation
    for end in (0, 1):
        share = (found.run.hours[end] - started) * 1600 / 3600
        assert hours[end] == pytest.approx(started + share)
    (line,) = [line for line in report.text(found).splitlines() if "up to the gate" in line]
    assert f"{text}: {formats.hours(*hours)}; cost" in line


def test_hours_and_cost_include_replayed_steps() -> None:
    plain = made(price=2.0)
    found = made(price=2.0, typed=["--loop.replay_every", "1000"])  # of 3,600: 4 with the last one
    assert seconds(plain)["replayed steps"] == (0.0, 0.0)
    assert "replayed steps" not in report.text(plain)
    extra = seconds(found)["replayed steps"]
    assert found.time is not None
    for end, time in enumerate((found.time.best, found.time.worst)):
        assert extra[end] == pytest.approx(4 * 1.1 * time)
        assert found.run.hours is not None
        assert plain.run.hours is not None
        hours = found.run.hours[end] - plain.run.hours[end]
        assert hours == pytest.approx(extra[end] / 3600)
        assert found.run.money is not None
        assert plain.run.money is not None
        money = found.run.money[end] - plain.run.money[end]
        assert money == pytest.approx(hours * 16 * 2.0)
    often = made(typed=["--loop.replay_every", "120"])
    steps = seconds(often)["steps"]
    assert seconds(often)["replayed steps"][0] == pytest.approx(30 * 1.1 / 3600 * steps[0])
    assert "replayed steps " in report.text(often)


def test_examples_per_second_that_each_host_must_load() -> None:
    found = made()  # 16 GPUs in 2 nodes
    assert found.run.steps_per_second is not None
    rate = found.run.steps_per_second[0] * found.batch_size / 2
    assert f" to {rate:.0f} clips/s needed: the GPUs do not wait" in report.text(found)


def test_slow_input_bounds_the_step_and_is_paid_for() -> None:
    slow = made(price=2.0, host=input_rate.Host(cores=4), typed=TWELVE)
    fast = made(price=2.0, typed=TWELVE)
    assert (slow.bound, fast.bound) == ("input", "arithmetic")
    rows = slow.batch_size / 2
    assert slow.run.steps_per_second == pytest.approx([n / rows for n in (2 * 28.7, 2 * 13.9)])
    assert seconds(slow)["steps"] == seconds(fast)["steps"]
    waited = seconds(slow)["waiting for input"]
    assert slow.time is not None
    assert waited[0] == pytest.approx(3600 * (rows / (2 * 28.7) - slow.time.best))
    assert slow.run.money is not None
    assert fast.run.money is not None
    assert slow.run.money[0] > 5 * fast.run.money[0]
    said = report.text(slow)
    for words in (
        "bound by input",
        "the GPUs wait",
        "waiting for input ",
        "convert_on device: 1.6",
    ):
        assert words in " ".join(said.split()), words


def test_input_that_may_be_too_slow() -> None:
    found = made(host=input_rate.Host(cores=16), flops=3e15)
    assert found.input.waits == "maybe"
    assert found.bound == "arithmetic or input"
    assert "the GPUs may wait" in report.text(found)


def test_validation_and_saves_follow_the_config() -> None:
    found = seconds(made())
    often = seconds(made(typed=["--loop.eval_every", "50", "--checkpoint.every", "100"]))
    assert often["validation"][0] > 5 * found["validation"][0]
    assert often["validation"][0] > 3600 / 50 * (0.16 + 0.44)  # samples
    assert often["saves"][0] == pytest.approx(37 / 4 * found["saves"][0])
    assert found["start"] == (prediction.START_S, prediction.START_S)
    saves = len(range(0, 3600, 100)) + 1
    larger = seconds(made(checkpoint=2e11, typed=["--checkpoint.every", "100"]))
    # Each of two hosts copies its half of 200 GB.
    assert larger["saves"][0] == pytest.approx(saves * (prediction.SAVE_S + 100))
    never = seconds(made(typed=["--loop.eval_every", "None", *NO_BEST]))
    assert never["validation"] == (0.0, 0.0)


def test_the_verdict_includes_the_margin() -> None:
    found = made()
    spare = found.memory.spare / GIB
    assert report.verdict(found) == f"fits with {spare:.1f} GiB to spare on each device"
    assert report.verdict(made(temporaries=10**11)).startswith("does not fit: ")
    assert found.fits is True
    assert made(temporaries=10**11).fits is False


def test_the_text_contains_every_section() -> None:
    said = report.text(made(price=1.0, typed=TWELVE))
    for words in (
        *(
            "16 x NVIDIA H100 80GB HBM3 (2 nodes)",
            "not sharded: norm (7,): mesh.fsdp divides",
            "memory per device",
        ),
        *("bound by", "all-gather", "between nodes", "MB sent", "steps/s", "3,600 steps"),
        *(" at 1 per GPU-hour", "start 60 s; compilation 1 s; steps "),
        *("input per host, predicted", "88 workers on 96 cores", "to 2,526 clips/s by"),
        "cuDNN attention: 40 forward calls, 20 backward calls",
        "2 convolutions without cuDNN",
    ):
        assert words in said, words


@pytest.mark.parametrize(("name", "cores"), [("h100_64", None), ("bert_large_h200_8", 96)])
def test_a_plan_fits_on_one_screen(name: str, cores: int | None) -> None:
    """With everything that a shipped config prints, and more."""
    array = "encoder.blocks.0.conv.kernel"
    slot = Temporary(4 * GIB, "bf16[48,480,720,128]", ("models/video_ae/blocks.py:1 (a)",))
    said = report.text(
        made(
            name=name,
            price=2.5,
            host=input_rate.Host(cores=cores),
            typed=["--loop.replay_every", "100"],
            convolutions=True,
            kernels={"attention_forward": 40, "attention_backward": 20},
            second_state=GIB,
            largest=(slot,) * 5,
            flops=1.5e14,
            moved_bytes=1e9,
            traffic=(traffic(wire_bytes=1e6),) * 9,
            unsharded={f"{array}{number}": (3, 3, 7, 7) for number in range(9)},
            elements=10**9,
            frozen=10**8,
            batch_of="128 examples per step = 4 per device x 16 devices x 2 microbatches",
        )
    )
    lines = said.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]


def test_what_a_run_prepares_costs_time_of_its_gpus() -> None:
    """Unless it takes longer than a run waits: then it is made before."""
    plain, cores = made(price=2), MANY.cores or 0
    minutes = Estimate("24 videos (4,588 frames)", 2 * cores * 600.0, 2**30)  # of two nodes
    plan = made(price=2, preparation=[minutes])
    assert plan.run.seconds is not None
    assert plan.run.hours is not None
    assert plain.run.hours is not None
    assert plan.run.seconds["preparing data"] == (600.0, 600.0)
    assert plan.run.hours[0] - plain.run.hours[0] == pytest.approx(1 / 6)
    page = " ".join(report.text(plan).split())
    assert "before the first step: cutting 24 videos (4,588 frames):" in page
    long = made(price=2, preparation=[minutes._replace(core_s=4 * minutes.core_s)])
    assert long.run.hours == plain.run.hours
    assert "before the run, with prepare clips: cutting 24 videos" in " ".join(
        report.text(long).split()
    )
