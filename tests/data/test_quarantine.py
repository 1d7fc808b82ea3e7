"""The quarantine on a disk that is full or unavailable."""

import re
from pathlib import Path

import pytest

from jaxtrain.data.quarantine import Quarantine
from jaxtrain.errors import BadExample


def test_an_unwritable_quarantine_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Quarantine.open(tmp_path / "gone", 0)
    gone.add(BadExample("file-1", "broken"), found="training")
    assert re.search(r'cannot write .* \(No such file.*"path": "file-1"', capsys.readouterr().err)
    assert gone.found() == frozenset()
    assert gone.size() == 0


def test_lines_of_others_are_ignored(tmp_path: Path) -> None:
    lines = (b"[", b"\xff", b"[]", b"{}", b'{"path": 7}', b"9")
    (tmp_path / "quarantine.jsonl").write_bytes(b"\n".join([*lines, b""]))
    assert Quarantine(tmp_path / "quarantine.jsonl").found() == {"7"}


def test_a_truncated_line_does_not_damage_the_next_one(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    quarantine.add(BadExample("file-1", "broken"), found="training")
    with quarantine.path.open("a") as file:
        file.write('{"path": "fi')
    assert quarantine.found() == {"file-1"}
    quarantine.add(BadExample("file-3", "broken"), found="training")
    assert quarantine.found() == {"file-1", "file-3"}
