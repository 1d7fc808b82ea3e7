"""Reports of run directories that someone else made: always a page, or a one-line error."""

import dataclasses
import json
import math
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import written_run

from jaxtrain import main
from jaxtrain.reporting import page, run_files
from jaxtrain.storage import json_lines

ODD: tuple[Any, ...] = (
    *(None, True, "abc", "", [], [[1]], {}, {"a": {"b": 1}}, 0, -1, 0.5, 10**30, 1e300, 1e308),
    *(-1e300, math.nan, math.inf, "</script><b>", "\x1b[2J", "x" * 5000, int("9" * 4300)),
)
FEW = (None, True, "abc", [[1]], {"a": {"b": 1}}, -1, 1e300, math.nan)
BEGAN = written_run.BEGAN


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_plotly", lambda: "")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written_run.write(tmp_path / "run", history=written_run.full_history())


def paged(directory: Path) -> str:
    """Writes the page with the command."""
    out = directory.parent / "page.html"
    assert main.main(["report", str(directory), "--out", str(out)]) == 0
    return out.read_text()


def changed(
    value: Any, path: tuple[Any, ...] = (), deep: int = 3, odds: tuple[Any, ...] = ODD
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields copies of a JSON value in which one value is removed or replaced by an odd one."""
    if isinstance(value, dict | list) and len(path) < deep:
        for key in value if isinstance(value, dict) else range(len(value)):
            for where, one in changed(value[key], (*path, key), deep, odds):
                copy = dict(value) if isinstance(value, dict) else list(value)
                copy[key] = one
                yield where, copy
            copy = dict(value) if isinstance(value, dict) else list(value)
            del copy[key]
            yield (*path, key, "gone"), copy
    for odd in odds:
        yield (*path, ascii(odd)), odd


def test_no_value_of_the_config_breaks_the_page(run: Path) -> None:
    for where, config in changed(written_run.CONFIG):
        (run / "config.json").write_text(json.dumps(config))
        assert page.page([run_files.read(run, "a")]), where


def test_no_value_of_the_history_breaks_the_page(run: Path) -> None:
    full = written_run.full_history()
    kinds = {event["event"]: index for index, event in enumerate(full)}
    kinds["training"] = next(i for i, one in enumerate(full) if one.get("name") == "training")
    for kind, index in kinds.items():
        for where, event in changed(full[index], deep=1, odds=FEW):
            written_run.lines(run / "history.jsonl", [*full[:index], event, *full[index + 1 :]])
            assert page.page([run_files.read(run, "a")]), (kind, where)


def test_no_value_of_the_metrics_breaks_the_page(run: Path) -> None:
    record = written_run.records([50])[0] | {"nonfinite": {"val/x": "nan"}}
    for where, one in changed(record):
        written_run.lines(run / "metrics.jsonl", [one])
        assert page.page([run_files.read(run, "a")]), where


@pytest.mark.parametrize("name", ["quarantine.jsonl", "quarantine.7.jsonl", "bad_steps.jsonl"])
def test_no_value_of_the_lists_breaks_the_page(run: Path, name: str) -> None:
    record = {"path": "a", "reason": "b", "found": "c", "step": 1, "position": 2, "loss": 0.5}
    for where, one in changed(record):
        written_run.lines(run / name, [one])
        assert page.page([run_files.read(run, "a")]), where


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "history.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n\n", b"\0" * 100, b"\xff\xfe\n", b"[" * 10**6, b'{"a":' * 10**5, b"null\n"),
        *(b"9" * 10**5 + b"\n", b'{"step": 1e999, "time": 1}\n', b'{"\\ud800": 1}\n', b"{}\n" * 9),
    ],
    ids=lambda content: ascii(content[:12]),
)
def test_files_with_other_contents_are_reported(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    found = run_files.read(run, "a")
    assert {"config.json": not found.config or content.startswith(b'{"step"')}.get(name, True)
    assert name in "\n".join(found.missing) or not content or name == "config.json"
    paged(run)


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "history.jsonl", "quarantine.jsonl", "bad_steps.jsonl"]
)
def test_pipes_devices_and_folders_are_not_read(run: Path, name: str) -> None:
    path, began = run / name, time.monotonic()
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert name in "\n".join(run_files.read(run, "a").missing)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert name in "\n".join(run_files.read(run, "a").missing)
    paged(run)
    path.unlink()
    path.mkdir()
    assert name in "\n".join(run_files.read(run, "a").missing)
    (run / ".lock").unlink(missing_ok=True)
    os.mkfifo(run / ".lock")
    paged(run)
    assert time.monotonic() - began < 20


def test_long_files_are_read_up_to_a_limit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = written_run.records(range(1, 99))
    written_run.lines(run / "metrics.jsonl", records)
    monkeypatch.setattr(run_files, "_MAX_LINES", 10)
    found = run_files.read(run, "a")
    assert len(found.records) == 10
    assert any("metrics.jsonl has more than 10 lines" in line for line in found.missing)
    monkeypatch.undo()
    monkeypatch.setattr(run_files, "_MAX_BYTES", 1000)
    found = run_files.read(run, "a")
    assert 0 < len(found.records) < len(records)
    assert any("or 1,000 bytes: the rest was skipped" in line for line in found.missing)
    monkeypatch.undo()
    found = run_files.read(run, "a")
    assert len(found.records) == len(records)
    monkeypatch.setattr(run_files, "_MAX_BYTES", 2**22)
    with (run / "metrics.jsonl").open("r+b") as file:
        file.truncate(2**40)  # takes no disk space
    assert len(run_files.read(run, "a").records) == len(records)


def test_thousands_of_metric_names_are_not_read(run: Path) -> None:
    record = {"step": 1, "time": BEGAN} | {f"val/{number}": 1.0 for number in range(5000)}
    written_run.lines(run / "metrics.jsonl", [record])
    found = run_files.read(run, "a")
    assert not found.records
    assert any(line.startswith("Line 1 of metrics.jsonl is not a record") for line in found.missing)


def test_samples_must_match_their_extensions(run: Path, tmp_path: Path) -> None:
    (run / "samples").mkdir()
    secret = tmp_path / "secret"
    secret.write_text("the reader's own")
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    for name, content in (
        ("script_1.png", b"<svg onload=alert(1)>"),
        ("giant_1.png", png + struct.pack(">II", 2**20, 2**20) + bytes(20)),
        ("cut_1.png", png),
        ("page_1.mp4", b"<html>"),
        ("text_1.txt", b"a" * 10**6),
    ):
        (run / "samples" / name).write_bytes(content)
    (run / "samples" / "link_1.txt").symlink_to(secret)
    (run / "samples" / "zero_1.png").symlink_to("/dev/zero")
    os.mkfifo(run / "samples" / "pipe_1.png")
    text = paged(run)
    assert "script_1.png is omitted: it is not a PNG image" in text
    assert "giant_1.png is omitted: it has 1048576x1048576 pixels" in text
    assert "cut_1.png is omitted: it is not a PNG image" in text
    assert "page_1.mp4 is omitted: it is not an MP4 video" in text
    assert "980,000 more characters" in text
    assert "the reader's own" not in text.replace("&#x27;", "'")
    assert "data:" not in text.replace("default-src", "").replace("img-src data:", "").replace(
        "media-src data:", ""
    )


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "metrics.jsonl", "history.jsonl", "bad_steps.jsonl"),
        *("quarantine.jsonl", "quarantine.2.jsonl"),
    ],
)
def test_a_linked_file_is_not_read(run: Path, tmp_path: Path, name: str) -> None:
    path, own = run / name, tmp_path / "own"
    if path.exists():
        path.rename(own)
    else:
        written_run.lines(own, [{"path": "the reader's", "reason": "b", "found": "c", "step": 1}])
    without = run_files.read(run, "a")
    path.symlink_to(own)
    found = run_files.read(run, "a")
    assert any(f"{name} cannot be read" in line for line in found.missing)
    assert any("it is a symbolic link" in line for line in found.missing)
    assert dataclasses.replace(found, missing=()) == dataclasses.replace(without, missing=())


def test_a_linked_samples_folder_is_not_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "text_1.txt").write_text("the reader keeps it")
    (run / "samples").symlink_to(tmp_path / "own")
    assert "the reader keeps it" not in paged(run)


def test_long_json_is_not_parsed(run: Path) -> None:
    """3 bytes of JSON can take 64 bytes of memory."""
    (run / "bad_steps.jsonl").write_bytes(b'{"a":[' + b"[]," * (2**26 // 3) + b"0]}\n")
    found = run_files.read(run, "a")
    assert not found.bad_steps
    assert any("bad_steps.jsonl has more than" in line for line in found.missing)


def test_records_are_read_the_same_way_as_by_the_run(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "time": 1.0, "val/x": null, "nonfinite": {"val/x": "-inf"}}\n')
    assert run_files.read(run, "a").records == list(json_lines.read(run / "metrics.jsonl"))
