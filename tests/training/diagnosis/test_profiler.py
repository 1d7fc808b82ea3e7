"""A trace of some steps, and its summary."""

import contextlib
import gzip
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.training.diagnosis import profiler

SCALARS: Any = np.float32(1 / 600)


@pytest.fixture(scope="module")
def step() -> Any:
    def f(
        state: jax.Array, batch: jax.Array, scalars: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        with jax.named_scope("large"):
            state = state @ batch * scalars
        with jax.named_scope("small"):
            return state, {"loss": jnp.tanh(state).sum()}

    x = jnp.ones((600, 600))
    return jax.jit(f).lower(x, x, SCALARS).compile()


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    assert phase == "profile"
    yield


def run(step: Any, before_step: Callable[[int, Any], None], steps: int) -> None:
    state = batch = jnp.ones((600, 600))
    for done in range(steps):
        before_step(done, state)
        state, _ = step(state, batch, SCALARS)


def events(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_trace_has_its_steps_and_a_summary_of_the_time(tmp_path: Path, step: Any) -> None:
    said: list[str] = []
    with profiler.profiled((2, 5), tmp_path, step, said.append, during) as (
        traced,
        before_step,
    ):
        run(traced, before_step, 8)
    found = events(tmp_path)
    ops = [one for one in found if "hlo_op" in one.get("args", {})]
    assert {one["args"]["hlo_module"] for one in ops} == {"jit_f"}
    assert all(one["dur"] >= 0 for one in ops)
    numbers = [one["args"]["step_num"] for one in found if "step_num" in one.get("args", {})]
    assert sorted(numbers) == ["2", "3", "4"]
    assert {one["args"]["hlo_op"] for one in ops} <= set(re.findall(r"[\w.\-]+", step.as_text()))
    summary = (tmp_path / "summary.txt").read_text().splitlines()
    assert summary[0].startswith("steps 2 to 5 took ")
    assert "%" in summary[1]
    assert any("large/dot_general" in line for line in summary[1:])
    assert said[: len(summary[:6])] == summary[:6]
    assert any("ui.perfetto.dev" in line and ".trace.json.gz" in line for line in said)
    assert any("tensorboard --logdir" in line for line in said)


def test_a_trace_ends_with_its_last_step(tmp_path: Path, step: Any) -> None:
    """A validation or a save may follow before the next step."""
    said: list[str] = []
    with profiler.profiled((2, 4), tmp_path, step, said.append, during) as (
        traced,
        before_step,
    ):
        state = batch = jnp.ones((600, 600))
        for done in range(5):
            before_step(done, state)
            state, _ = traced(state, batch, SCALARS)
            if done == 3:
                assert said[0].startswith("steps 2 to 4 took ")
                time.sleep(2.0)
    (each_ms,) = re.findall(r"took ([\d.]+) ms each", said[0])
    assert float(each_ms) < 900.0


def test_a_run_that_ends_during_a_trace_writes_it(tmp_path: Path, step: Any) -> None:
    with profiler.profiled((1, 9), tmp_path, step, print, during) as (traced, before_step):
        run(traced, before_step, 3)
    assert (tmp_path / "summary.txt").read_text().startswith("steps 1 to 3 took ")


def test_an_unreadable_trace_does_not_end_the_run(
    tmp_path: Path, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    @contextlib.contextmanager
    def counted(phase: str) -> Iterator[None]:
        opened.append(phase)
        yield

    monkeypatch.setattr(profiler, "top_operations", lambda *how, **more: 1 / 0)
    said: list[str] = []
    with profiler.profiled((0, 1), tmp_path, step, said.append, counted) as (traced, before_step):
        run(traced, before_step, 2)
    assert said == [
        "warning: no summary.txt of the trace was written: ZeroDivisionError: division by zero"
    ]
    assert opened == ["profile"]  # its time does not count as training


@pytest.mark.parametrize(("done", "says"), [(9, 0), (10, 1)])
def test_a_resumed_run_past_the_trace_prints_a_note(done: int, says: int) -> None:
    said: list[str] = []
    profiler.check((9, 12), done, 20, said.append)
    assert len(said) == says


def test_the_second_process_writes_a_separate_trace_and_no_summary(
    tmp_path: Path, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler.jax, "process_index", lambda: 1)
    with profiler.profiled((0, 1), tmp_path, step, pytest.fail, during) as (
        traced,
        before_step,
    ):
        run(traced, before_step, 2)
    assert events(tmp_path / "process-1")
    assert not (tmp_path / "summary.txt").exists()


PROGRAM = """\
HloModule jit_f

%body (p: f32[4]) -> f32[4] {
  ROOT %dot.3 = f32[4]{0} dot(%a, %b), metadata={op_name="jit(f)/while/body/dot_general"}
}

ENTRY %main {
  %fusion.1 = (f32[4]{0}, f32[4]{0}) fusion(%p), kind=kLoop, metadata={op_name="jit(f)/add"}
  while.2 = f32[4]{0} while(%x), condition=%c, body=%body
}
"""


def test_on_a_gpu_only_its_streams_count() -> None:
    """Neither the sums over them, which are for the viewer, nor the host's events."""

    def line(name: str, *events: tuple[str, float]) -> Any:
        made = [SimpleNamespace(stats=[("hlo_op", op)], duration_ns=time) for op, time in events]
        return SimpleNamespace(name=name, events=made)

    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("python", ("dot.3", 1000))]),
        SimpleNamespace(
            name="/device:GPU:0",
            lines=[
                line("Stream #7(Compute)", ("dot.3", 5), ("fusion.1", 2), ("dot.3", 5)),
                line("Stream #9(Memcpy)", ("while.2", 100)),  # a container: its body counts
                line("XLA Ops", ("dot.3", 10)),
            ],
        ),
    ]
    profile: Any = SimpleNamespace(planes=planes)
    found = profiler._nanoseconds(profile, profiler._opcodes(PROGRAM))
    assert found == {"dot.3": 10, "fusion.1": 2}
