"""The event log and its sinks; the console's step line; throughput."""

import errno
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from telemetry import event_log, full_disk
from telemetry.tensorboard_events import events, scalars
from tensorboardX.proto.event_pb2 import SessionLog

from jaxtrain.errors import InputError
from jaxtrain.storage import json_lines
from jaxtrain.telemetry import console
from jaxtrain.telemetry.console import Console, console_line, validation_line
from jaxtrain.telemetry.events import (
    BadStep,
    EventLog,
    Metrics,
    Rewound,
    Sample,
)
from jaxtrain.telemetry.line_files import LogFile
from jaxtrain.telemetry.throughput import Window
from jaxtrain.training.validation import spread, weighted_means

LINE = {
    "train/loss": 0.12,
    "train/psnr": 20.5,
    "train/gpu_memory_usage": 39.0,
    "train/steps_per_second": 0.9,
    "train/samples_per_second": 115.2,
    "train/data_wait_fraction": 0.009,
    "train/grad_norm": 1.0,
}


def test_a_step_line_fits_the_terminal() -> None:
    """The rates that follow from others are omitted first, and the data wait after them."""
    line = console_line(100, 100000, LINE, 30 * 3600 + 51 * 60)
    assert str(line) == (
        "step 100/100000 | loss 0.1200 | psnr 20.5 dB | gpu 39.0 GiB | 0.90 steps/s | "
        "115 examples/s | data wait 1% | eta 30h51m"
    )
    assert str(line.fitted(130)) == str(line)
    assert str(line.fitted(120)) == str(line).replace(" | 115 examples/s", "")
    assert str(line.fitted(80)) == (
        "step 100/100000 | loss 0.1200 | psnr 20.5 dB | data wait 1% | eta 30h51m"
    )
    assert str(line.fitted(10)) == "step 100/100000 | loss 0.1200"


def test_a_validation_line_breaks_between_fields() -> None:
    values = {"val/loss": 0.5, "val/psnr": 9.0, "val/ssim": 0.3, "val/psnr_std": 2.636}
    line = validation_line(20, 20, values)
    short = "step 20/20 | validation | val/loss 0.5 | val/psnr 9 | val/ssim 0.3"
    assert line.fitted(80).wrapped(80) == [short]
    assert line.fitted(90).wrapped(90) == [str(line)]
    assert line.fitted(40).wrapped(40) == [
        "step 20/20 | validation | val/loss 0.5 |",
        "  val/psnr 9 | val/ssim 0.3",
    ]


def test_records_keep_every_digit_and_reach_the_disk_at_once(tmp_path: Path) -> None:
    log = event_log.attached(tmp_path, 0, 1)
    loss = float(np.float32(0.1)) / 3
    log.emit(Metrics(1, {"train/loss": loss, "train/grad_norm": 2.5}))
    log.emit(Metrics(1, {"val/psnr": 20.0}))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # not closed yet
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1, 1]
    assert records[0]["train/loss"] == loss
    assert records[1]["val/psnr"] == 20.0
    assert scalars(tmp_path) == [
        (1, "train/loss", np.float32(loss)),
        (1, "train/grad_norm", 2.5),
        (1, "val/psnr", 20.0),
    ]
    log.close()


def test_nan_and_inf_are_strict_json_and_read_back(tmp_path: Path) -> None:
    log = event_log.attached(tmp_path, 0, 1)
    log.emit(Metrics(3, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/psnr": 1.0}))
    log.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert strict["train/loss"] is None
    assert strict["nonfinite"] == {"train/loss": "nan", "train/grad_norm": "inf"}
    (record,) = json_lines.read(tmp_path / "metrics.jsonl")
    assert math.isnan(record["train/loss"])
    assert record["train/grad_norm"] == math.inf
    assert record["train/psnr"] == 1.0


@pytest.mark.parametrize("name", ["trian/loss", "val/PSNR"])
def test_a_misspelled_name_raises(tmp_path: Path, name: str) -> None:
    for process in (0, 1):
        with pytest.raises(ValueError, match="is not train/NAME or val/NAME"):
            event_log.attached(tmp_path, process, 2).emit(Metrics(1, {name: 1.0}))


def test_a_resumed_run_replaces_its_later_records(tmp_path: Path) -> None:
    log = event_log.attached(tmp_path, 0, 1)
    for step in (10, 20, 30):
        log.emit(Metrics(step, {"train/loss": step}))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/lo')  # the process was killed here

    assert [record["step"] for record in json_lines.read(tmp_path / "metrics.jsonl")] == [
        10,
        20,
        30,
    ]
    resumed = event_log.attached(tmp_path, 0, 1)
    resumed.emit(Rewound(20, 160))
    resumed.emit(Metrics(30, {"train/loss": -1.0}))
    resumed.close()
    records = list(json_lines.read(tmp_path / "metrics.jsonl"))
    assert [(record["step"], record["train/loss"]) for record in records] == [
        (10, 10.0),
        (20, 20.0),
        (30, -1.0),
    ]
    starts = [event for event in events(tmp_path) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in starts] == [(21, SessionLog.START)]


def test_a_foreign_metrics_file_is_an_input_error(tmp_path: Path) -> None:
    for content, message in (
        (b"hello\n", r"contains a line that jaxtrain did not write .*hello"),
        (b"\xff\n", r"is not UTF-8 \(invalid start byte at byte 0\)"),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        with pytest.raises(InputError, match=f"metrics.jsonl {message}"):
            event_log.attached(tmp_path, 0, 1).emit(Rewound(0, 0))


def test_images(tmp_path: Path) -> None:
    log = event_log.attached(tmp_path, 0, 1)
    image = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    sample = Sample(40, "reconstruction", image)
    log.emit(sample)
    path = tmp_path / sample.file
    log.close()
    assert path == tmp_path / "samples" / "reconstruction_40.png"
    np.testing.assert_array_equal(np.asarray(Image.open(path)), image)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    (value,) = events(tmp_path)[-1].summary.value
    assert (value.tag, value.image.height, value.image.width) == ("reconstruction", 6, 8)
    assert value.image.encoded_image_string == path.read_bytes()
    with pytest.raises(ValueError, match="sample name"):
        log.emit(Sample(1, "../x", image))


def test_texts(tmp_path: Path) -> None:
    log = event_log.attached(tmp_path, 0, 1)
    sample = Sample(40, "text", "# one\n*two* größer\n")
    log.emit(sample)
    path = tmp_path / sample.file
    log.close()
    assert path == tmp_path / "samples" / "text_40.txt"
    assert path.read_text() == "# one\n*two* größer\n"
    (value,) = events(tmp_path)[-1].summary.value
    assert (value.tag, value.metadata.plugin_data.plugin_name) == ("text/text_summary", "text")
    (shown,) = value.tensor.string_val  # as code, which Markdown does not change
    assert shown.decode() == "    # one\n    *two* größer\n    \n"


def test_every_process_logs_and_only_the_first_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for process in (0, 2):
        log = event_log.attached(tmp_path, process, 3)
        log.say(f"one from {process}")
        log.say("two")
        log.emit(Metrics(1, {"train/loss": float(process)}))
        log.emit(Sample(1, "x", np.zeros((2, 2, 3), np.uint8)))
        assert (tmp_path / "samples" / "x_1.png").exists() == (process == 0)
        shutil.rmtree(tmp_path / "samples", ignore_errors=True)
        log.emit(Rewound(0 if process else 1, 0))
        log.close()
    assert capsys.readouterr().out == "one from 0\ntwo\n"
    for name, process in (("log.txt", 0), ("log.2.txt", 2)):
        first, second = (tmp_path / name).read_text().splitlines()
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ one from {process}", first)
        assert second.endswith("Z two")
    (record,) = json_lines.read(tmp_path / "metrics.jsonl")
    assert record["train/loss"] == 0.0


def test_a_full_disk_is_reported_once_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = event_log.attached(tmp_path, 0, 1)
    with full_disk.full(monkeypatch, "metrics.jsonl", "log.txt"):
        for step in (1, 2, 3):
            log.say(f"line {step}")
            log.emit(Metrics(step, {"train/loss": 1.0}))
    said = capsys.readouterr().out.splitlines()
    warnings = [line for line in said if line.startswith("warning: cannot write")]
    assert [line for line in said if line.startswith("line")] == ["line 1", "line 2", "line 3"]
    assert len(warnings) == 2
    assert all("No space left on device" in line for line in warnings)
    assert len(scalars(tmp_path)) == 3  # TensorBoard is unaffected

    log.emit(Metrics(4, {"train/loss": 4.0}))
    log.close()
    steps = [record["step"] for record in json_lines.read(tmp_path / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4]  # the failed writes were retried
    assert "metrics.jsonl" in capsys.readouterr().out


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_rewind_that_a_full_disk_prevents_is_retried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = event_log.attached(tmp_path, 0, 1)
    for step in (1, 2, 3):
        log.emit(Metrics(step, {"train/loss": 1.0}))
        log.emit(BadStep(step, 8 * step, "nan", "nan", ids=[step]))
    with monkeypatch.context() as full:
        full.setattr(json_lines.os, "truncate", no_space)
        log.emit(Rewound(1, 16))
        log.emit(Metrics(2, {"train/loss": 2.0}))  # must wait for the rewind
    steps = [record["step"] for record in json_lines.read(tmp_path / "metrics.jsonl")]
    assert steps == [1, 2, 3]
    log.emit(Metrics(3, {"train/loss": 3.0}))
    log.close()  # retries lists that got no further event
    records = list(json_lines.read(tmp_path / "metrics.jsonl"))
    assert [(record["step"], record["train/loss"]) for record in records] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]
    bad = (tmp_path / "bad_steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["position"] for line in bad] == [8]
    said = capsys.readouterr().out
    assert said.count("warning: cannot write metrics.jsonl") == 1
    assert said.count("warning: cannot write bad_steps.jsonl") == 1
    assert "metrics.jsonl in" in said.splitlines()[-1]


def test_samples_of_abandoned_steps_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = event_log.attached(tmp_path, 0, 1)
    folder = tmp_path / "samples"
    image = np.zeros((2, 2, 3), np.uint8)
    for step in (10, 20, 30):
        log.emit(Sample(step, "x", image))
        log.emit(Sample(step, "text", "a"))
    (folder / "notes.md").touch()  # not a sample
    with monkeypatch.context() as full:
        full.setattr(Path, "unlink", no_space)
        log.emit(Rewound(20, 160))
    assert (folder / "x_30.png").exists()
    log.emit(Sample(25, "x", image))  # retries the removal first
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["notes.md", "text_10.txt", "text_20.txt", "x_10.png", "x_20.png", "x_25.png"]
    )
    log.emit(Rewound(20, 160, validated=False))  # the validation after step 20 will be repeated
    assert sorted(path.name for path in folder.iterdir()) == ["notes.md", "text_10.txt", "x_10.png"]
    log.close()


def test_files_of_a_user_beside_the_samples_stay(tmp_path: Path) -> None:
    """Also those with similar names, and all behind a link."""
    folder, elsewhere = tmp_path / "samples", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x_30.png").touch()
    run = event_log.attached(tmp_path, 0, 1)
    run.emit(Sample(30, "x", "a"))
    mine = [
        "frame_0001.png",
        "Holiday_2019.mp4",
        "x_30.jpg",
        "x_30.png.bak",
        "30.png",
        "x-y_30.txt",
    ]
    mine += ["x_30\n.png", "x_\u0663\u0660.png", "folder_30.png/x_30.png"]
    for name in mine:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "link_30.png").symlink_to(elsewhere / "x_30.png")
    run.emit(Rewound(0, 0))
    left = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert sorted(left) == sorted([*mine, "link_30.png"])
    run.close()
    other = tmp_path / "other"
    other.mkdir()
    (other / "samples").symlink_to(elsewhere)
    run = event_log.attached(other, 0, 1)
    run.emit(Rewound(0, 0))
    run.close()
    assert (elsewhere / "x_30.png").exists()


@pytest.mark.parametrize("name", ["examples.01.jsonl", "examples.x.2.jsonl", "examples.2.jsonl"])
def test_only_the_lists_of_former_processes_are_rewound(tmp_path: Path, name: str) -> None:
    """The last name is such a list, but behind a link."""
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"step": 5}\n')
    (tmp_path / name).symlink_to(mine) if name == "examples.2.jsonl" else mine.rename(
        tmp_path / name
    )
    (tmp_path / "examples.1.jsonl").write_text('{"step": 1}\n{"step": 5}\n')
    log = event_log.attached(tmp_path, 0, 1)
    log.emit(Rewound(1, 8))
    log.close()
    assert (tmp_path / name).read_text() == '{"step": 5}\n'
    assert (tmp_path / "examples.1.jsonl").read_text() == '{"step": 1}\n'


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_window() -> None:
    clock = Clock()
    window = Window(8, 16, 1e12, 4, 10e12, clock)
    for _ in range(5):
        clock.now += 2.0
        window.step(wait_s=0.5)
    with window.paused():
        clock.now += 1000.0  # a validation does not count
    assert window.close() == pytest.approx(
        {
            "train/steps_per_second": 0.5,
            "train/samples_per_second": 4.0,
            "train/tokens_per_second": 64.0,
            "train/mfu": 4.0 * 1e12 / 40e12,
            "train/data_wait_fraction": 0.25,
        }
    )
    clock.now += 1.0
    window.step(wait_s=0.0)
    assert window.close()["train/steps_per_second"] == 1.0  # a new window
    assert window.close() == {}


def test_weighted_means_divide_once() -> None:
    values = np.array([1.0, 2.0, 6.0])
    weights = np.array([1.0, 1.0, 0.0])  # the last row is padding
    assert weighted_means({"psnr": (values @ weights, weights.sum())}) == {"psnr": 1.5}
    assert math.isnan(weighted_means({"x": (0.0, 0.0)})["x"])


def test_the_spread_is_over_the_means_of_groups() -> None:
    sums, weights = np.array([1.0, 6.0, 0.0, 0.5]), np.array([1.0, 2.0, 0.0, 0.5])
    assert spread(sums, weights) == pytest.approx(np.std([1.0, 3.0, 1.0], ddof=1))
    assert spread(sums[:1], weights[:1]) == 0.0
    assert math.isnan(spread(sums[2:3], weights[2:3]))
    assert math.isnan(spread(np.array([math.nan, 1.0]), np.ones(2)))


class Tracker:
    """A third-party sink: keeps the events it gets, and fails while ``down``."""

    name = "tracker"
    takes = (Metrics, Rewound)

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.down = False
        self.closed = False

    def handle(self, event: Metrics | Rewound) -> None:
        if self.down:
            raise ConnectionError(111, "Connection refused")
        self.got.append(event)

    def close(self) -> None:
        self.closed = True


def test_a_tracker_is_one_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It gets its types of events, including those emitted before it was attached, and may fail."""
    log, tracker = EventLog(Console(event_log.phases(), 0)), Tracker()
    log.emit(Metrics(1, {"train/loss": 2.0}))
    log.say("before the run directory exists")
    log.attach([tracker], tmp_path)
    log.emit(Rewound(0, 0))
    assert tracker.got == [Metrics(1, {"train/loss": 2.0}), Rewound(0, 0)]

    tracker.down = True
    for step in (1, 2):
        log.emit(Metrics(step, {"train/loss": 1.0}))
    tracker.down = False
    log.emit(Metrics(3, {"train/loss": 1.0}))
    log.close()
    assert [event.step for event in tracker.got] == [1, 0, 3]
    assert tracker.closed
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "before the run directory exists",
        f"warning: cannot write tracker in {tmp_path} (Connection refused): training continues; "
        "unwritten data is kept in memory, up to 16 MiB (samples: 64 MiB), and retried",
        f"tracker in {tmp_path} is written again",
    ]


class Broken(Tracker):
    """A sink with a bug."""

    name = "broken"

    def handle(self, event: Metrics | Rewound) -> None:
        self.got.append(event)
        raise ValueError("no such\ncolumn")

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("not open")


def test_a_sink_that_raises_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a sink raises, the run and the other sinks continue; it is reported once."""
    log, broken, other = EventLog(Console(event_log.phases(), 0)), Broken(), Tracker()
    log.attach([broken, LogFile(tmp_path, 0), other], tmp_path)
    for step in (1, 2, 3):
        log.emit(Metrics(step, {"train/loss": 1.0}))
    log.close()
    assert len(broken.got) == 1
    assert broken.closed
    assert [event.step for event in other.got] == [1, 2, 3]
    assert capsys.readouterr().out.splitlines() == [
        "warning: broken failed (ValueError: no such): training continues without broken",
        "warning: cannot close broken (not open)",
    ]
    logged = (tmp_path / "log.txt").read_text()
    assert "Traceback" in logged
    assert logged.count("warning: broken failed") == 1


def test_every_phase_of_a_run_has_a_label(checkout: Path) -> None:
    """A phase without one would end the console's thread."""
    files = (checkout / "jaxtrain" / "training").glob("*.py")
    opened = r'(?:within|paused_for)\(\s*"(\w+)"'
    used = {name for path in files for name in re.findall(opened, path.read_text())}
    assert {"compile", "save", "upload"} <= used
    assert used <= console._LABELS.keys()
