"""``jaxtrain prepare``: clips, latents, and a run that trains on them."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import program
import pytest
from data.text import small_text
from data.video import sample_videos as sample

from jaxtrain import main
from jaxtrain.cli.prepare import tokens
from jaxtrain.interop import weights
from jaxtrain.models import video_ae
from jaxtrain.training.state import ModelDefinition

TINY = video_ae.Config.tiny()

CONFIG = """
import dataclasses
from jaxtrain import config
from jaxtrain.models import video_ae
base = config.named("demo")
run = dataclasses.replace(
    base,
    model=video_ae.Config.tiny(),
    data=dataclasses.replace(
        base.data, demo=False, batch_size=8, workers=0, train_split=0.7, max_bad_share=0.2
    ),
    mesh=dataclasses.replace(base.mesh, data=8),
    loop=dataclasses.replace(
        base.loop, steps=2, log_every=1, eval_every=2, eval_examples=8, hang_timeout_s=None
    ),
    optim=dataclasses.replace(base.optim, warmup_fraction=0.5),
    checkpoint=dataclasses.replace(base.checkpoint, every=2),
)
"""


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    for number in range(6):
        sample.write(tmp_path / "videos" / f"{number}.mp4", sample.busy(26, number))
    (tmp_path / "videos/broken.mp4").write_bytes(b"no video" * 99)
    return tmp_path / "videos"


def _main(*arguments: Any) -> int:
    return main.main([str(argument) for argument in arguments])


@pytest.mark.long
def test_clips_then_latents_then_training(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pieces"
    size = ("--height", 16, "--width", 16, "--frames", 12, "--min-frames", 8, "--min-side", 16)
    assert _main("prepare", "clips", videos, out, *size, "--workers", 1) == 1  # one is broken
    printed = capsys.readouterr().out
    assert "12 clips, 156 frames, from 6 videos; excluded 1 video and 0 frames" in printed
    assert f"train with --data.path {out}" in printed

    (tmp_path / "tiny.py").write_text(CONFIG)
    params, _ = ModelDefinition(TINY.build).init(jax.random.key(1))
    teacher = tmp_path / "teacher.safetensors"
    weights.save(teacher, TINY, {name: np.asarray(array) for name, array in params.items()})
    data = ("--config", tmp_path / "tiny.py", "--data.path", out)
    data += ("--data.cache_dir", tmp_path / "cache")
    taught = ("--model.teacher.encoder_weight", 0.5, "--data.windows", "fixed")
    start = ("--model.init_from", teacher, "--optim.peak_lr", 1e-12, "--optim.muon", None)
    start += ("--optim.average.rule", "ema")
    run = (*data, *taught, *start, "--output-dir", tmp_path / "run")
    assert _main(*run) == 2
    complaint = capsys.readouterr().err
    assert " prepare latents`, this run's --config" in complaint
    assert "and --teacher SPEC" in complaint

    assert _main("prepare", "latents", *data, "--teacher", teacher) == 0
    printed = capsys.readouterr().out
    assert "6 of them new (36 clips in total)" in printed
    assert "--data.windows fixed --data.teacher teacher-" in printed
    kept = ("--json", tmp_path / "made.json", "--data.teacher", "whose-latents-training-takes")
    assert _main("prepare", "latents", *data, "--teacher", teacher, *kept) == 0
    assert " 0 of them new" in capsys.readouterr().out
    assert json.loads((tmp_path / "made.json").read_text())["videos"] == 6

    assert _main(*run) == 0
    printed = capsys.readouterr().out
    assert "latents of teacher teacher-" in printed
    assert "encoder_loss" in (tmp_path / "run/metrics.jsonl").read_text()

    assert f"parameters from {teacher}" in printed
    found = weights.load(tmp_path / "run").params
    for name, array in params.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_latents_of_crops_then_training(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.py").write_text(CONFIG)
    params, _ = ModelDefinition(TINY.build).init(jax.random.key(1))
    teacher = tmp_path / "teacher.safetensors"
    weights.save(teacher, TINY, {name: np.asarray(array) for name, array in params.items()})
    data = ("--config", tmp_path / "tiny.py", "--data.path", videos)
    data += ("--data.cache_dir", tmp_path / "cache", "--model.height", 32, "--model.width", 32)
    data += ("--data.crop", 16, 16, "--data.crops_per_clip", 2, "--data.min_crop_scale", 0.5)
    made = ("--teacher", teacher, "--json", tmp_path / "made.json")
    assert _main("prepare", "latents", *data, *made) == 0
    capsys.readouterr()
    about = json.loads((tmp_path / "made.json").read_text())
    assert (about["videos"], about["failed"]) == (6, {})
    sizes = sorted(path.name for path in (tmp_path / "cache/latents").iterdir())
    assert [size.partition("-crops-")[0] for size in sizes] == ["4x16x16-2", "4x32x32"]
    taught = ("--model.teacher.encoder_weight", 0.5, "--data.windows", "fixed")
    assert _main(*data, *taught, "--output-dir", tmp_path / "run") == 0
    assert f"latents of teacher {about['teacher']}" in capsys.readouterr().out
    assert "encoder_loss" in (tmp_path / "run/metrics.jsonl").read_text()


def test_too_many_broken_texts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = small_text.write(tmp_path / "texts", 2)
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    (texts / "cut.jsonl").write_text('{"text": "a"}\n{"text": \n{')
    (texts / "empty.txt").touch()
    data = ("--config", "demo_mlm", "--data.path", texts, "--data.cache_dir", tmp_path / "cache")
    refusal = "3 of 5 input files are broken (60.0%), more than data.max_bad_share (10.0%): fix or"
    for _ in range(2):
        assert _main("prepare", "tokens", *data) == 2
        printed = capsys.readouterr()
        assert refusal in printed.err
        assert printed.out.count("skipped") == printed.out.count("skipped: ") == 3
        assert "ready in" not in printed.out
    assert _main("prepare", "tokens", *data, "--data.max_bad_share", 0.6, "--workers", 1) == 1
    assert capsys.readouterr().out.count("skipped") == 3
    run = ("--output-dir", tmp_path / "run", "--mesh.data", jax.device_count())
    assert _main(*data, *run, "--data.batch_size", jax.device_count()) == 2
    assert refusal in capsys.readouterr().err
    listed = (tmp_path / "run/quarantine.jsonl").read_text().splitlines()
    assert len(listed) == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_leaves_finished_clips_and_no_workers(
    tmp_path: Path, number: int, code: int
) -> None:
    sample.write(tmp_path / "videos/0.mp4", sample.busy(120, 0))
    for copy in range(1, 200):
        os.link(tmp_path / "videos/0.mp4", tmp_path / f"videos/{copy}.mp4")
    size = ("--height", 16, "--width", 16, "--frames", 12, "--min-frames", 8, "--min-side", 16)
    out = tmp_path / "clips"
    typed = ("prepare", "clips", tmp_path / "videos", out, *size, "--workers", 2)
    process = program.started(tmp_path, *typed)
    assert process.stdout is not None
    try:
        while not list(out.glob(".jobs/records/*/*.json")):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.02)
        if number == signal.SIGINT:  # a terminal sends it to the workers, too
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        said, _ = process.communicate(timeout=30)  # their output ends with them
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    kept = "stopped; finished videos are kept: start the same command again to continue\n"
    assert (said, process.returncode) == (kept, code)
    assert 0 < len(list(out.glob(".jobs/records/*/*.json"))) < 200
    assert not list(out.glob(".jobs/half/*"))
    ended_by = time.monotonic() + 10  # Python's resource tracker ends after the command
    while _exists(process.pid):
        assert time.monotonic() < ended_by
        time.sleep(0.02)


def _exists(group: int) -> bool:
    """Whether a process of a group exists."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_stop_of_prepare_tokens_says_that_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_prepare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert _main("prepare", "tokens", "--config", "demo_mlm", "--data.path", tmp_path) == 75
    assert capsys.readouterr().err == (
        "stopped; finished parts are kept: start the same command again to continue\n"
    )
    assert signal.getsignal(signal.SIGTERM) == before


def test_absent_text_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("prepare", "tokens", "--config", "demo_mlm", "--data.path", "gone") == 2
    assert "--data.path gone: no such file or folder" in capsys.readouterr().err
