"""The quarantine, also on a disk that is full or unavailable, and its limit."""

import dataclasses
import json
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.data import quarantine as module
from jaxtrain.data.quarantine import BrokenFileLimit, Quarantine
from jaxtrain.data.source import Sources
from jaxtrain.errors import BadExample

UNREAD: Any = None


def test_an_unwritable_quarantine_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Quarantine.open(tmp_path / "gone", 0)
    gone.add(BadExample("file-1", "broken"), during="training")
    assert re.search(r'cannot write .* \(No such file.*"path": "file-1"', capsys.readouterr().err)
    assert gone.recorded() == set()


def test_lines_of_others_are_ignored(tmp_path: Path) -> None:
    lines = (b"[", b"\xff", b"[]", b"{}", b'{"path": 7}', b"9")
    (tmp_path / "quarantine.jsonl").write_bytes(b"\n".join([*lines, b""]))
    assert Quarantine(tmp_path / "quarantine.jsonl").recorded() == {"7"}


def test_a_truncated_line_does_not_damage_the_next_one(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    quarantine.add(BadExample("file-1", "broken"), during="training")
    with quarantine.path.open("a") as file:
        file.write('{"path": "fi')
    assert quarantine.recorded() == {"file-1"}
    quarantine.add(BadExample("file-3", "broken"), during="training")
    assert quarantine.recorded() == {"file-1", "file-3"}


def test_an_input_has_one_line_however_often_and_by_whom_it_is_found(tmp_path: Path) -> None:
    """In workers, which are copies of the main process's, and in threads of validation."""
    quarantine = Quarantine.open(tmp_path, 0)
    workers = [pickle.loads(pickle.dumps(quarantine)) for _ in range(3)]
    barrier = threading.Barrier(9)

    def work(worker: Quarantine) -> None:
        barrier.wait()
        for hit in range(60):
            worker.add(BadExample(f"file-{hit % 7}", "broken"), during="training", position=hit)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = quarantine.path.read_text().splitlines()
    assert sorted(json.loads(line)["path"] for line in lines) == [f"file-{n}" for n in range(7)]
    assert quarantine.recorded() == {f"file-{n}" for n in range(7)}
    again = Quarantine.open(tmp_path, 0)  # a resume: the file may be fixed meanwhile, or not
    again.add(BadExample("file-3", "broken"), during="training")
    assert again.recorded() == {"file-3"}
    assert len(quarantine.path.read_text().splitlines()) == 8


def test_the_limit_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 4 s, of every 5 s, with 500,000 lines, all of which were parsed again."""
    (tmp_path / "quarantine.jsonl").write_text('{"path": "earlier"}\n' * 50)
    quarantine = Quarantine.open(tmp_path, 0)
    parsed = list[bytes]()
    real = module._path_of
    monkeypatch.setattr(module, "_path_of", lambda line: parsed.append(line) or real(line))
    now = 0.0
    sources = Sources(train=UNREAD, val=UNREAD, files=100, bad=(), summary="")
    limit = BrokenFileLimit(sources, quarantine, 0.9, lambda: now)
    for number in range(5):
        quarantine.add(BadExample(f"file-{number}", "broken"), during="training")
        now += 60
        assert limit.stop_reason() is None
        assert quarantine.recorded() == {f"file-{n}" for n in range(number + 1)}
    assert len([line for line in parsed if line]) == 5
    quarantine.path.unlink()  # it is the user's to delete
    quarantine.add(BadExample("file-9", "broken"), during="training")
    assert quarantine.path.read_text().count("file-9") == 1
    assert "file-9" in quarantine.recorded()


@pytest.mark.parametrize(("share", "stops"), [(0.1, True), (0.2, False)])
def test_too_many_broken_files_stop_a_run(share: float, stops: bool, tmp_path: Path) -> None:
    Quarantine.open(tmp_path, 0).add(BadExample("file-7", "broken"), during="training")
    quarantine = Quarantine.open(tmp_path, 0)  # by another run in the same directory
    found = BadExample("file-0", "broken")
    sources = Sources(train=UNREAD, val=UNREAD, files=10, bad=(found,), summary="")
    quarantine.add_all(sources.bad, during="index")
    quarantine.add(BadExample("file-1", "broken"), during="training", position=4)
    quarantine.add(BadExample("file-1", "broken"), during="training", position=9)
    now = 0.0
    said: list[str] = []
    limit = BrokenFileLimit(sources, quarantine, share, lambda: now, said.append)
    assert bool(limit.stop_reason()) is stops
    assert not stops or "2 of 10" in str(limit.stop_reason())
    # Another process of the run finds more, and its last line is still being written.
    Quarantine.open(tmp_path, 1).add(BadExample("file-2", "broken"), during="validation")
    with (tmp_path / "quarantine.1.jsonl").open("a") as file:
        file.write('{"path": "fi')
    assert "3 of 10" not in str(limit.stop_reason())  # the quarantine is not reread yet
    now = 60.0
    assert "3 of 10" in str(limit.stop_reason())
    # Files broken from the start are not reported again.
    assert [line.split(";")[0] for line in said] == ["broken input: file-1", "broken input: file-2"]


def test_an_unreadable_quarantine_is_not_an_error(tmp_path: Path) -> None:
    class Away(Quarantine):
        def recorded(self) -> set[str]:
            raise OSError(116, "Stale file handle")

    sources = Sources(train=UNREAD, val=UNREAD, files=4, bad=(), summary="")
    assert BrokenFileLimit(sources, Away(tmp_path / "q.jsonl"), 0.1).stop_reason() is None


def test_damaged_pieces_are_a_fraction_of_all_pieces(tmp_path: Path) -> None:
    """Four films of 1,000 pieces each are not half broken if two of the pieces are."""
    quarantine = Quarantine.open(tmp_path, 0)
    for film in ("a", "b"):
        path = f"x.tar/{film}.mp4/00001.mp4"
        quarantine.add(BadExample(path, "frame 3 is corrupt"), during="training")
    sources = Sources(train=UNREAD, val=UNREAD, files=4, pieces=4000, bad=(), summary="")
    assert BrokenFileLimit(sources, quarantine, 0.1).stop_reason() is None
    few = dataclasses.replace(sources, pieces=19)
    reason = BrokenFileLimit(few, quarantine, 0.1).stop_reason()
    assert reason is not None
    assert reason.startswith("2 of 19 pieces of videos are broken (10.5%)")
    bad = dataclasses.replace(sources, bad=(BadExample("c.mp4", "no video"),))
    reason = BrokenFileLimit(bad, quarantine, 0.1).stop_reason()
    assert reason is not None
    assert reason.startswith("1 of 4 input files are broken (25.0%)")
