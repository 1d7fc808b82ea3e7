"""Doctor's checks of the data and of the loader."""

import dataclasses
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from data.video import sample_videos
from doctor.examined import all_ok, only_problem, only_warning, subject, tiny, with_exit_code
from program import write_corpus

from jaxtrain import config
from jaxtrain.data import loader_rate
from jaxtrain.data.loader_rate import Rate
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Sources
from jaxtrain.doctor import data
from jaxtrain.doctor.finding import Finding
from jaxtrain.doctor.subject import Subject
from jaxtrain.errors import BadExample


@dataclasses.dataclass(frozen=True)
class Slow:
    """A slow source with one broken example."""

    seconds: float
    broken: int | None = None
    fingerprint: str = "slow"
    block: int = 1

    def __len__(self) -> int:
        return 64

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        time.sleep(self.seconds)
        if index == self.broken:
            raise BadExample("clip.mp4", "is torn")
        return {"x": np.zeros(4, np.float32)}


def spec(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "x": jax.ShapeDtypeStruct((rows, 4), np.float32),
        "weight": jax.ShapeDtypeStruct((rows,), np.float32),
    }


def measured(place: Path, source: Slow, **changes: float) -> Rate:
    return loader_rate.measure(
        source,
        subject(place).one_device,
        spec,
        rows=8,
        workers=0,
        prefetch=1,
        seed=0,
        quarantine=Quarantine.open(place, 0),
        **{"seconds": 1.0, **changes},
    )


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """Returns the tiny model on a small corpus."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    corpus = str(write_corpus(tmp_path))
    return subject(tmp_path, tiny("--mesh.fsdp", "8", "--data.path", corpus))


def test_the_rate_of_a_slow_source_is_measured(tmp_path: Path) -> None:
    found = measured(tmp_path, Slow(0.02))
    assert found.examples_per_second is not None
    assert 10 < found.examples_per_second < 50  # less than 50 on a busy machine
    assert 10 < found.of_a_core < 50


@pytest.mark.parametrize(("of_a_core", "rows"), [(1.0, 4), (24.0, 8), (1000.0, 8)])
def test_the_trial_reads_complete_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_core: float, rows: int
) -> None:
    """A batch of one or seven examples would divide a block of four between workers."""
    made = Mock(side_effect=StopIteration)
    monkeypatch.setattr(loader_rate.pipeline, "TrainingBatches", made)
    monkeypatch.setattr(loader_rate, "_alone", lambda *_: of_a_core)
    with pytest.raises(StopIteration):
        measured(tmp_path, Slow(0.0, block=4))
    assert made.call_args.args[2] == spec(rows)


def test_a_very_slow_source_does_not_hold_up_doctor(tmp_path: Path) -> None:
    began = time.monotonic()
    found = measured(tmp_path, Slow(0.5), longest_s=0.1)
    assert found.examples_per_second is None
    assert time.monotonic() - began < 60
    for thread in threading.enumerate():
        if thread.name == "trial":
            thread.join(timeout=10)
            assert not thread.is_alive()
    hung = only_problem([data.judge(dataclasses.replace(found, workers=8), 2)])
    assert "almost no batches arrived in 20 s with 8 workers on 2 cores" in hung.seen
    assert hung.cure.startswith("try --data.workers 1, ")


def test_the_real_pipeline_on_real_text(text: Subject) -> None:
    checks = data.checks(text)
    seen = "\n".join(all_ok(checks[name]()) for name in ("open", "loader"))
    assert "6 text files (0 bad)" in seen
    assert "with 0 workers, one core alone" in seen


def found_by(run: config.Run, place: Path, *names: str) -> list[Finding]:
    checks = data.checks(subject(place, run))
    return [one for name in names for one in checks[name]()]


def test_all_missing_files_are_reported(tmp_path: Path) -> None:
    """Initial weights, weights of losses, and the tokenizer."""
    lost = ["--data.path", "gone", "--model.init_from", "weights.safetensors"]
    text = found_by(tiny(*lost, "--data.tokenizer", "words.json"), tmp_path, "inputs", "open")
    lpips = ["--model.perceptual.weights", "lpips.pth"]
    video = found_by(config.load("demo", [*lost, *lpips]), tmp_path, "inputs", "open")
    for found, named in (
        (text, ("init_from weights.safetensors", "--data.path gone", "words.json")),
        (video, ("init_from weights.safetensors", "perceptual.weights=lpips.pth", "gone")),
    ):
        assert {one.level for one in found} == {"problem"}
        for part, one in zip(named, found, strict=True):
            assert part in one.seen


def test_a_run_that_resumes_needs_no_initial_weights(tmp_path: Path) -> None:
    run = tiny("--model.init_from", "gone.safetensors")
    begins = dict(data.checks(subject(tmp_path, run)))["inputs"]
    assert "gone.safetensors" in only_problem(begins()).seen
    resumes = dict(data.checks(subject(tmp_path, run, resumes=True)))["inputs"]
    assert list(resumes()) == []


def test_broken_files_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "videos"
    for number in range(4):
        sample_videos.write(folder / f"good{number}.mp4", sample_videos.busy(30, number))
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("no video at all")
    run = config.load("demo", ["--data.path", str(folder), "--data.max_bad_share", "0.5"])
    found = only_warning(data.opening(subject(tmp_path, run), []))
    assert found.seen.startswith("2 of 6 input files are broken (33.3%)")
    assert "empty.mp4: " in found.seen
    assert "text.mp4: " in found.seen
    strict = config.load("demo", ["--data.path", str(folder)])
    found = only_problem(data.opening(subject(tmp_path, strict), []))
    assert "data.max_bad_share (10.0%)" in found.seen
    assert "fix or remove them" in found.cure


def test_a_file_that_only_the_trial_finds_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants = subject(tmp_path)
    source = Slow(0.0, broken=3)
    model = dataclasses.replace(wants.run.model)
    monkeypatch.setattr(type(model), "batch_spec", lambda self, rows: spec(rows))
    sources = Sources(train=source, val=source, files=9, bad=(), summary="")
    found, _ = with_exit_code(data.trial(wants, sources))
    assert found[-1].level == "warning"
    assert found[-1].seen == "the trial found 1 more broken files: clip.mp4"
