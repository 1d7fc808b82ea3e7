"""The chapters of benchmarks/gpu: their configs, what they keep, and each of them on a CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import results

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))

import a_run_to_its_end
import b_beside_torch
import c_changes
import chapter
import d_known_shapes
import e_starts_and_versions
import f_shakespeare

from jaxtrain import config
from jaxtrain.xla import options

FOLDER = Path(chapter.__file__).parent
CHAPTERS = sorted(path.name for path in FOLDER.glob("[a-z]_*.py"))


def configs() -> Iterator[tuple[str, ...]]:
    yield from (*c_changes.STEPS.values(), *c_changes.TINY.values())
    yield from (words for _, *words in d_known_shapes.SHAPES.values())
    yield from ((name, *words) for name, words in d_known_shapes._SMALL.items())
    yield (*e_starts_and_versions.REPLAYS, *e_starts_and_versions._REPLAYED)
    yield (*e_starts_and_versions._TINY_REPLAYS, *e_starts_and_versions._REPLAYED)
    yield from (*f_shakespeare.RUNS.values(), *f_shakespeare.TINY.values())
    for words in (a_run_to_its_end.REAL, a_run_to_its_end.TINY):
        yield (a_run_to_its_end.NAME, *words, "--loop.steps", "100")
    for name, what in (("gpt_h200_1", "gpt"), ("mlm_h200_8", "BERT"), ("h100_8", "video")):
        (words,) = (words for key, words in b_beside_torch.TINY.items() if key.startswith(what))
        yield (name, "--mesh.fsdp", "1", "--optim.accumulate", "1", *words)


def test_every_config_of_a_chapter_is_valid() -> None:
    for name, *words in configs():
        config.load(name, words)


def test_other_matmuls_are_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that a model's own option equals would time one program twice."""
    for what, xla_flags in c_changes.OTHER_MATMULS.items():
        of_model = config.named(c_changes.STEPS[what][0]).model.gpu_options
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        own = options.options("gpu", of_model=of_model).get("xla_gpu_enable_triton_gemm", True)
        assert xla_flags == f"--xla_gpu_enable_triton_gemm={not own}"


def test_the_readme_has_every_chapter_in_its_order() -> None:
    text = (FOLDER / "README.md").read_text()
    assert re.findall(r"^\| `(\w+\.py)", text, re.MULTILINE) == CHAPTERS
    assert [name[0] for name in CHAPTERS] == list("abcdef")


def frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> chapter.Chapter:
    monkeypatch.setattr(results, "devices", lambda: ("gpu", "NVIDIA H100 80GB HBM3", 1))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folders = ("--folder", str(tmp_path / "made"), "--work", str(tmp_path / "work"))
    return chapter.Chapter(chapter.flags("").parse_args([*folders, *words]))


FINDINGS: dict[str, Any] = {
    "rows": {
        "start/total": 30.0,
        "start/compile": 20.0,
        "synthetic/step": {"median_s": 0.1447, "p95_s": 0.15, "spread": 0.01, "count": 9},
        "synthetic/examples_per_second": 55.3,
        "synthetic/of_serial_bound": 0.74,
        "memory/compiled_gib": 24.6,
    },
    "notes": {},
    "failed": [],
}


def test_a_row_is_on_disk_before_the_next_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = frame(tmp_path, monkeypatch)
    outputs = iter([f"warning\n{json.dumps(FINDINGS)}", "Traceback\nValueError: no: exit code 1"])
    monkeypatch.setattr(one, "finished", lambda *_, **__: next(outputs))
    rows = one.steps("video", "h100_8", ["--data.path", "/home/x"], note="published: 50")
    assert rows["synthetic/examples_per_second"] == 55.3
    table = one.folder / "rows.md"
    written = table.read_text().splitlines()
    assert len(written) == 3
    assert "step 144.7 ms" in written[-1]
    assert "74.0% of the serial bound" in written[-1]
    assert written[-1].endswith("published: 50 | `jaxtrain bench h100_8 --data.path DIR` |")
    assert one.steps("broken", "h100_8", [], xla_flags="--x=1") == {}
    assert "ValueError: no: exit code 1" in table.read_text().splitlines()[-1]
    assert "XLA_FLAGS='--x=1' jaxtrain bench" in table.read_text().splitlines()[-1]
    lines = (one.folder / "findings.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines] == ["video", "broken"]


def test_nothing_begins_when_the_time_is_over_or_it_was_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = frame(tmp_path, monkeypatch, "--minutes", "0.1")
    monkeypatch.delattr(one.__class__, "finished")
    assert one.steps("video", "h100_8", []) == {}
    other = frame(tmp_path, monkeypatch, "--only", "gpt")
    assert other.steps("video", "h100_8", []) == {}
    assert other.begins("gpt of depth 12")


def test_what_is_kept_begins_with_autotuning_and_the_newest_programs(tmp_path: Path) -> None:
    compiled, kept = tmp_path / "compiled", tmp_path / "compiled.tar"
    tuned = compiled / chapter.AUTOTUNE / "conv.textproto"
    tuned.parent.mkdir(parents=True)
    tuned.write_bytes(b"t" * 1000)
    for age, name in enumerate(("new", "old", "oldest")):
        (compiled / name).write_bytes(name.encode() * 100_000)
        os.utime(compiled / name, (1e9 - age, 1e9 - age))
    os.utime(tuned, (1, 1))
    chapter.pack(compiled, kept, 0.7)  # MiB: the oldest does not fit
    with tarfile.open(kept) as archive:
        names = [Path(name).name for name in archive.getnames()]
    assert names == ["conv.textproto", "new", "old"]
    assert [path.name for path in tmp_path.iterdir()].count("compiled.part") == 0
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "new").write_text("mine")
    chapter.unpack(kept, fresh)
    assert (fresh / "new").read_text() == "mine"
    assert (fresh / "old").read_bytes() == (compiled / "old").read_bytes()
    assert (fresh / chapter.AUTOTUNE / "conv.textproto").read_bytes() == tuned.read_bytes()
    chapter.unpack(tmp_path / "missing.tar", fresh)


def test_the_first_chapter_fits_its_run_and_compares_what_was_computed_twice() -> None:
    steps = a_run_to_its_end.that_fit(320.0, 50.0)
    assert steps % a_run_to_its_end.PARTS == 0
    assert steps / 50.0 == pytest.approx((320 - 150) / 1.2, rel=0.01)
    assert a_run_to_its_end.that_fit(10.0, 50.0) == a_run_to_its_end.PARTS
    before = {step: {"time": step, "train/loss": 1.0} for step in range(4)}
    after = before | {
        2: {"time": 12, "train/loss": 1.0},
        3: {"time": 13, "train/loss": 1.5},
        4: {"time": 14, "train/loss": 0.5},
    }
    found = a_run_to_its_end.computed_twice(before, after)
    assert found == "of 2 losses that were computed twice, 1 differ"


def started(tmp_path: Path, name: str, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            *(sys.executable, str(FOLDER / name), "--tiny", "--minutes", "15"),
            *("--folder", str(tmp_path / "made"), "--work", str(tmp_path / "work"), *words),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def rows_of(tmp_path: Path) -> list[str]:
    table = tmp_path / "made" / "rows.md"
    return table.read_text().splitlines()[2:] if table.exists() else []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("a_run_to_its_end.py", 5),
        ("c_changes.py", 15 + len(c_changes.STEPS) + len(c_changes.OTHER_MATMULS)),
        ("d_known_shapes.py", len(d_known_shapes.SHAPES)),
        ("e_starts_and_versions.py", 6),
        ("f_shakespeare.py", len(f_shakespeare.RUNS)),
    ],
)
def test_a_chapter_runs_on_a_cpu(tmp_path: Path, name: str, count: int) -> None:
    """In tests/interop/torch_chapter.py: the one that compares with PyTorch."""
    process = started(tmp_path, name)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    written = rows_of(tmp_path)
    assert len(written) == count, output
    assert not [row for row in written if "failed" in row or "skipped" in row]
    assert {row.count("|") for row in written} == {7}
    assert (tmp_path / "made" / "compiled.tar").stat().st_size < 16 * 2**20
    if name.startswith("a"):
        (resumed,) = [row for row in written if "resumed to its end" in row]
        assert re.search(r"of [1-9]\d* losses that were computed twice, 0 differ", resumed)
        assert (tmp_path / "made" / "a_report.html").is_file()


@pytest.mark.long
def test_a_chapter_can_be_cut_off_at_any_moment(tmp_path: Path) -> None:
    process = started(tmp_path, "d_known_shapes.py")
    deadline = time.monotonic() + 300
    while not rows_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(rows_of(tmp_path)) >= 1
    with tarfile.open(tmp_path / "made" / "compiled.tar") as archive:
        assert archive.getnames()
