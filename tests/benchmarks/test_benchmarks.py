"""The benchmarks' shared parts: alternating sides, rows of results, time limits."""

import argparse
import dataclasses
import json
import multiprocessing
import subprocess
import time
from pathlib import Path
from typing import Any

import fused_attention
import jax
import numpy as np
import plan_vs_measured
import pytest
import results
import run_all
import side_by_side
import study

from jaxtrain.models import mlm
from jaxtrain.planning import planner

ROWS = {
    "start/total": 19.0,
    "start/compile": 11.7,
    "start/warm_total": 5.9,
    "synthetic/step": {"median_s": 0.5, "p95_s": 0.6, "spread": 0.01, "count": 9},
    "synthetic/examples_per_second": 8.0,
    "synthetic/mfu": 0.25,
    "memory/compiled_gib": 0.336,
    "save/blocks_loop": 0.043,
    "save/complete": 0.57,
    "save/gib": 0.008,
}


def test_sides_are_measured_alternately() -> None:
    done: list[str] = []
    ours = side_by_side.Side(lambda: done.append("o"), lambda: done.append("O"))
    theirs = side_by_side.Side(lambda: done.append("t"), lambda: done.append("T"))
    found = side_by_side.alternate(ours, theirs, rounds=2, steps=3, warm_up=1)
    assert "".join(done) == "oOtT" + "oooOtttT" * 2
    assert len(found.ours) == len(found.theirs) == 2


def test_the_configs_of_the_comparison_with_plans_are_valid() -> None:
    for config_of, *typed in plan_vs_measured.GPU.values():
        for count in (1, 8):
            planner.Planner(config_of, typed, "h100", f"1x{count}", None)


def _pausing(seconds: float) -> side_by_side.Side:
    return side_by_side.Side(lambda: time.sleep(seconds), lambda: None)


def _broken() -> side_by_side.Side:
    raise ValueError("no such network")


@pytest.mark.long
def test_sides_may_run_in_separate_processes() -> None:
    apart = side_by_side.Apart
    with apart(_pausing, 0.02) as ours, apart(_pausing, 0.06) as theirs:
        found = side_by_side.alternate(ours, theirs, rounds=2, steps=3, warm_up=1)
    assert 0.02 <= min(found.ours) < 0.06 <= min(found.theirs)
    with pytest.raises(RuntimeError, match="ended with exit code"), apart(_broken) as broken:
        broken.seconds(1)
    assert multiprocessing.active_children() == []


def _mapping_of_64_mib() -> side_by_side.Side:
    """Returns a side whose step takes 0.2 s if the C library maps such a block separately."""
    block = np.ones(2**26, np.uint8)
    heap = next(
        line for line in Path("/proc/self/maps").read_text().splitlines() if "[heap]" in line
    )
    low, high = (int(end, 16) for end in heap.split()[0].split("-"))
    inside = low <= block.ctypes.data < high
    return side_by_side.Side(lambda: time.sleep(0.0 if inside else 0.2), lambda: None)


@pytest.mark.long
def test_a_side_may_keep_freed_memory() -> None:
    apart = side_by_side.Apart
    with apart(_mapping_of_64_mib) as one, apart(_mapping_of_64_mib, keep_freed=True) as two:
        assert one.seconds(1) > 0.1 > two.seconds(1)


def test_a_row_has_the_ratio_of_each_allocator(tmp_path: Path) -> None:
    flags = argparse.Namespace(processes=1, json=tmp_path / "found.json", results=None)
    compared = {
        "one way": side_by_side.Comparison((1.0, 1.0), (2.0, 2.0)),
        "the other": side_by_side.Comparison((1.0, 1.0), (0.5, 0.5)),
    }
    results.record_comparison(flags, "x", compared, examples=2, unit="clips/s", same_work="same")
    found = json.loads(flags.json.read_text())
    assert found["result"] == (
        "one way: ours 2, theirs 1 clips/s: 2.00 times as fast (2.00 to 2.00 in 2 rounds of 1 "
        "processes); the other: ours 2, theirs 4 clips/s: 0.50 times as fast (0.50 to 0.50 in 2 "
        "rounds of 1 processes); same"
    )


def test_the_ratio_is_theirs_over_ours() -> None:
    found = side_by_side.Comparison((1.0, 2.0, 4.0), (2.0, 6.0, 8.0))
    assert found.ratio == 3.0
    assert found.range == (2.0, 3.0)
    assert side_by_side.largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)


def test_a_row_names_the_commit_and_whether_other_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results.common_start, "CHECKOUT", tmp_path)
    monkeypatch.setenv("JAXTRAIN_COMMIT", "of a copy")
    assert results.commit() == "of a copy"
    (tmp_path / "benchmarks").mkdir()
    table, program = tmp_path / "benchmarks" / "RESULTS.md", tmp_path / "x.py"
    table.touch()
    program.touch()
    user = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *user, *command], check=True)
    table.write_text("a row")
    assert len(results.commit()) == 12
    program.write_text("x = 1")
    assert results.commit()[12:] == "+"


def test_a_row_creates_a_missing_table_and_cannot_break_it(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    for _ in range(2):
        results.append_row(path, "NVIDIA H200", "a | b", "fast\nvery", "python x.py")
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {7}
    assert "a / b" in lines[2]
    assert "fast very" in lines[2]
    assert "NVIDIA H200" in lines[2]


def test_bench_results_are_one_line_each() -> None:
    found: dict[str, Any] = {
        "rows": ROWS,
        "notes": {"pipeline": "no data", "save": "disk full"},
        "failed": ["save"],
    }
    assert results.bench_results(found) == [
        "pipeline skipped: no data",
        "save failed: disk full",
        "first step after 19.0 s cold (compile 11.7), 5.9 s warm",
        "a save blocks 43 ms, complete in 0.57 s (0.008 GiB)",
        "synthetic: step 500.0 ms (p95 600.0, spread 1.0% of 9), 8 examples/s, 25.0% MFU, "
        "0.336 GiB planned",
    ]
    out = {"failure": "out of memory", "detail": "16 GiB"}
    assert results.bench_results(out) == ["failed: out of memory 16 GiB"]


def test_local_folders_are_hidden_in_the_table() -> None:
    typed = ["--data.path", "/data/x", "--json", "y", "--rounds", "3", "--processes", "2"]
    assert results.shown(results._without_results(typed)) == ["--data.path", "DIR", "--rounds", "3"]


def test_a_measurement_and_its_children_end_at_the_time_limit(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = (
        f"import pathlib, time\nwhile True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.05)"
    )
    parent = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    one = run_all.Measurement("endless", ("-c", parent + "time.sleep(600)"))
    began = time.monotonic()
    run_all.run(one, tmp_path / "found.json", tmp_path / "RESULTS.md", 3.0, "cpu")
    assert time.monotonic() - began < 20
    mark.unlink()
    time.sleep(0.5)
    assert not mark.exists()


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in fused_attention.CASES}))
def test_the_check_of_fused_attention_finds_a_wrong_mask(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On a CPU, with jax's own implementation in place of cuDNN."""
    call = jax.nn.dot_product_attention
    changed: dict[str, Any] = {}

    def by_xla(*arrays: jax.Array, implementation: str, **options: Any) -> jax.Array:
        return call(*arrays, implementation="xla", **(options | changed))

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    found = fused_attention.errors(kind, (3, 16, 2, 8))
    assert all(fused <= 2 * plain + 1e-3 for fused, plain in found.values()), found
    changed |= {"is_causal": kind != "causal", "mask": None}
    found = fused_attention.errors(kind, (3, 16, 2, 8))
    assert all(fused > 2 * plain + 1e-3 for fused, plain in found.values()), found


@pytest.mark.long
@pytest.mark.parametrize("attend", ["sequence", "document"])
def test_the_check_of_fused_attention_compares_a_model(
    monkeypatch: pytest.MonkeyPatch, attend: str
) -> None:
    call = jax.nn.dot_product_attention

    def by_xla(*arrays: jax.Array, implementation: str, **options: Any) -> jax.Array:
        return call(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    small = dataclasses.replace(
        mlm.Config.tiny(), sequence_length=32, hidden=32, layers=1, dropout=0.0
    )
    assert 0 < fused_attention.model_error(attend, small, 4) < 2e-2


def test_an_answer_stays_when_its_question_is_not_asked_any_more() -> None:
    answers = {"old": {"a": 1}, "second": {"a": 2}, "first": {"a": 3}}
    assert list(study.in_order(answers, {"first": {}, "new": {}, "second": {}})) == [
        "first",
        "second",
        "old",
    ]


def test_a_study_records_a_command_without_local_paths(tmp_path: Path) -> None:
    typed = ["--data.path", str(tmp_path), "--pairs", "20", "--model.init_from", "None"]
    command = study.recorded(["compare", "a.py", *typed], pairs=6)
    assert command == "compare a.py --data.path PATH --model.init_from None --pairs 6"


def test_recorded_answers_of_studies_have_complete_commands(checkout: Path) -> None:
    """With the limit of pairs and the data; `benchmarks/study.py` records what was typed."""
    for path in (checkout / "benchmarks" / "studies").glob("*/answers.json"):
        for name, answer in json.loads(path.read_text()).items():
            command = answer["command"]
            assert f"--pairs {len(answer['pairs'])} " in f"{command} ", name
            assert "--data.path " in command, name
