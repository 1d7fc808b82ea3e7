"""One resumable map: outputs, records, sets, parts, engines, and kills."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launch.hosts import wait_for
from obstore.store import MemoryStore

from jaxtrain.errors import BadExample, InputError, RunAgain
from jaxtrain.jobs import engines, resumable
from jaxtrain.storage import bucket_folders
from jaxtrain.storage.bucket import Bucket

ONE = engines.Threads(1)
URL = "s3://bucket/out"


def copying(folder: Path, worker: engines.Worker) -> resumable.Make:
    """Copies texts in upper case; some misbehave. Counts its calls in ``folder``."""

    def make(item: resumable.Item, path: Path) -> dict[str, Any]:
        with open(folder / "calls", "a") as calls:
            calls.write(f"{item.name}\n")
        text = Path(item.source).read_text()
        if text == "die":
            os._exit(9)
        if text == "broken":
            raise BadExample(item.source, "is broken")
        if text == "away":
            raise BadExample(item.source, "may not be read") from PermissionError()
        if text == "later":
            raise resumable.Failed("not now")
        if text == "bug":
            raise ZeroDivisionError("a bug")
        if text == "wait":
            time.sleep(60)
        if text == "shape":
            raise InputError("the model has another shape")
        if text == "file":
            path.write_text("an output of one file")
            return {}
        path.mkdir()
        (path / "text").write_text(text.upper())
        (path / "deep").mkdir()
        (path / "deep/length").write_text(str(len(text)))
        return {"characters": len(text), "notes": [text]}

    return make


class Case:
    def __init__(self, top: Path) -> None:
        self.source, self.out, self.top = top / "in", top / "out", top
        self.source.mkdir()
        self.said: list[str] = []

    def write(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.source / name).write_text(text)

    def items(self) -> list[resumable.Item]:
        return [
            resumable.Item(
                path.name, resumable.identity(path), f"{path.name}.made", source=str(path)
            )
            for path in sorted(self.source.iterdir())
        ]

    def run(self, out: Path | str | None = None, **more: Any) -> resumable.Outcome:
        more = {"settings": {"size": 1}, "engine": ONE} | more
        begin = functools.partial(copying, self.top)
        return resumable.run(self.items(), begin, out or self.out, say=self.said.append, **more)

    def calls(self) -> list[str]:
        try:
            return sorted((self.top / "calls").read_text().split())
        except FileNotFoundError:
            return []
        finally:
            (self.top / "calls").unlink(missing_ok=True)

    def files(self) -> dict[str, str]:
        return {
            path.relative_to(self.out).as_posix(): path.read_text()
            for path in self.out.rglob("*")
            if path.is_file() and resumable.WORK not in path.parts
        }


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_each_input_has_an_output_a_record_and_a_place_in_the_report(case: Case) -> None:
    case.write(a="one", b="three")
    outcome = case.run()
    assert (outcome.made, outcome.skipped, outcome.failed) == (2, 0, {})
    assert outcome.totals == {"characters": 8}
    files = case.files()
    report = json.loads(files.pop("report.json"))
    assert files == {
        "a.made/text": "ONE",
        "a.made/deep/length": "3",
        "b.made/text": "THREE",
        "b.made/deep/length": "5",
    }
    assert report == {
        "settings": {"size": 1},
        "inputs": 2,
        "made": 2,
        "characters": 8,
        "failed": [],
        "notes": ["one", "three"],
        "not_in_list": [],
    }


def test_files_of_a_user_in_the_output_folder_are_never_replaced(case: Case) -> None:
    """Such as the videos that were encoded, if their latents are decoded beside them."""
    case.write(a="file", b="broken")
    mine = {"a.made": "mine", "b.made": "mine", "c.txt": "mine", ".hidden": "mine"}
    case.out.mkdir()
    for name, text in mine.items():
        (case.out / name).write_text(text)
    words = "did not write, such as a.made: use a new or an empty folder"
    for _ in range(2):
        with pytest.raises(InputError, match=words):
            case.run()
    assert case.files() == mine
    for name in ("a.made", "b.made", "c.txt"):
        (case.out / name).unlink()
    (case.out / "lost+found").mkdir()
    assert case.run().made == 1
    (case.out / ".jobs/set.json").unlink()  # its records still say whose files these are
    assert case.run().skipped == 1


def test_what_is_done_is_skipped_and_what_changed_is_made_again(case: Case) -> None:
    case.write(a="one", b="two", c="three", d="four")
    case.run()
    assert case.calls() == ["a", "b", "c", "d"]
    (case.source / "b").write_text("changed")
    (case.out / "c.made/text").write_text("cut off")
    (case.out / ".jobs/records").joinpath(*_record(case, "d")).unlink()
    outcome = case.run()
    assert (outcome.made, outcome.skipped, case.calls()) == (3, 1, ["b", "c", "d"])
    assert case.files()["b.made/text"] == "CHANGED"
    assert case.files()["c.made/text"] == "THREE"
    case.write(b="broken")
    assert case.run().failed == {"b": "is broken"}
    assert not (case.out / "b.made").exists()


def _record(case: Case, name: str) -> tuple[str, str]:
    (item,) = [item for item in case.items() if item.name == name]
    return item.digest[:2], f"{item.digest[2:]}.json"


def test_failures_cost_one_item_and_are_reported(case: Case) -> None:
    long = "n" * 251  # its output has five characters more, of which the system allows 255
    case.write(a="one", b="broken", c="later", d="bug", e="away", **{long: "one"})
    outcome = case.run()
    assert "File name too long" in outcome.failed[long]
    (case.source / long).unlink()
    outcome = case.run()
    failed = {"b": "is broken", "c": "not now", "d": "ZeroDivisionError: a bug"}
    failed["e"] = "may not be read"
    assert (outcome.skipped, outcome.failed, outcome.exit_code) == (1, failed, 1)
    report = json.loads((case.out / "report.json").read_text())
    assert {entry["name"]: entry["reason"] for entry in report["failed"]} == failed
    assert "failed: b: is broken" in case.said
    case.calls()
    # Only the broken one is known to fail again.
    assert case.run().failed == failed
    assert case.calls() == ["c", "d", "e"]
    case.write(b="fixed", c="sooner", d="right", e="here")
    assert case.run().failed == {}


def test_the_output_of_an_input_that_is_gone_is_kept(case: Case) -> None:
    case.write(a="one", b="two")
    case.run()
    items = [resumable.Item("a", (), "a.made", source=str(case.source / "a")), case.items()[1]]
    (case.source / "a").unlink()
    begin = functools.partial(copying, case.top)
    outcome = resumable.run(items, begin, case.out, {"size": 1}, engine=ONE, say=print)
    assert outcome.failed == {"a": "No such file or directory"}
    assert case.files()["a.made/text"] == "ONE"


def test_an_item_that_kills_its_worker_costs_only_itself(case: Case) -> None:
    case.write(a="one", b="die", c="two")
    outcome = case.run(engine=engines.Processes(2))
    assert (outcome.made, outcome.failed) == (2, {"b": resumable.KILLS})
    assert case.calls() == ["a", "b", "b", "c"]
    case.write(b="fine")
    assert case.run().made == 1


def test_of_an_input_that_kills_its_worker_no_older_output_is_kept(case: Case) -> None:
    case.write(a="one", b="fine")
    case.run()
    case.write(b="die")

    class Killed:
        def map(self, begin: Any, items: Any) -> Any:
            yield from ((item, None) for item in items)

    assert case.run(engine=Killed()).failed == {"b": resumable.KILLS}
    assert (case.out / "a.made").exists()
    assert not (case.out / "b.made").exists()


def test_notes_are_limited_as_failures_are(case: Case) -> None:
    case.write(**{f"n{number:02d}": f"note {number:02d}" for number in range(25)})
    case.run()
    assert sum(line.startswith("note ") for line in case.said) == 20
    assert sum(line.startswith("more lines of this kind") for line in case.said) == 1


def test_other_settings_are_refused(case: Case) -> None:
    case.write(a="one")
    case.run()
    with pytest.raises(InputError, match=r"other settings \(size 1, not 2\)"):
        case.run(settings={"size": 2})
    assert resumable.settings_of(case.out) == {"size": 1}


@pytest.mark.parametrize("content", ["{", '{"settings": 1, "items": 2}'])
def test_a_damaged_record_of_the_set_is_one_line(case: Case, content: str) -> None:
    case.write(a="one")
    case.run()
    path = case.out / resumable.WORK / "set.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"\.jobs/set\.json is damaged: delete that file"):
        case.run()
    path.unlink()
    assert case.run().made == 0
    resumable.check_complete(case.out)


def test_settings_of_a_command_that_made_nothing_are_replaced(case: Case) -> None:
    case.write(a="shape")
    with pytest.raises(InputError, match="another shape"):
        case.run()
    case.write(a="one")
    assert case.run(settings={"size": 2}).made == 1
    assert resumable.settings_of(case.out) == {"size": 2}


def test_an_output_folder_that_is_a_file_is_named(case: Case) -> None:
    case.write(a="one")
    case.out.write_text("a file")
    with pytest.raises(InputError, match=r"OUT .*/out is a file: choose a folder"):
        case.run()


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (("same", "same"), "would both be same: rename one"),
        (("x/y/z", "x"), "x/y/z of a would be inside that of b: rename one"),
    ],
)
def test_two_inputs_with_the_same_output_are_refused(
    case: Case, outputs: tuple[str, str], message: str
) -> None:
    items = [resumable.Item(name, (), output) for name, output in zip("ab", outputs, strict=True)]
    with pytest.raises(InputError, match=message):
        resumable.run(
            items, functools.partial(copying, case.top), case.out, {}, engine=ONE, say=print
        )


def test_outputs_of_removed_inputs_are_named(case: Case) -> None:
    case.write(a="one", b="two")
    case.run()
    (case.source / "a").unlink()
    case.run()
    assert json.loads((case.out / "report.json").read_text())["not_in_list"] == ["a.made"]
    assert any("no longer in the list, such as a.made" in line for line in case.said)


def test_readers_accept_only_a_complete_set(case: Case) -> None:
    resumable.check_complete(case.source)
    case.write(**{f"n{number}": "text" for number in range(8)})
    for index in (0, 2):
        outcome = case.run(part=resumable.Part(index, 3))
        assert outcome.left == 8 - 3 - (0 if index == 0 else 2)
        with pytest.raises(InputError, match="is incomplete"):
            resumable.check_complete(case.out)
    assert case.run(part=resumable.Part(1, 3)).left == 0
    resumable.check_complete(case.out)
    assert json.loads((case.out / "report.json").read_text())["made"] == 8
    assert case.calls() == [f"n{number}" for number in range(8)]
    case.write(n8="another")
    case.run(part=resumable.Part(0, 3))
    with pytest.raises(InputError, match="is incomplete"):
        resumable.check_complete(case.out)


def test_a_part_with_another_list_is_refused(case: Case) -> None:
    case.write(a="one", b="two", c="three")
    case.run(part=resumable.Part(0, 2))
    case.write(d="four")
    with pytest.raises(InputError, match="a list of 3 inputs, and this one has 4"):
        case.run(part=resumable.Part(1, 2))
    assert case.run().left == 0
    assert case.run(part=resumable.Part(1, 2)).made == 0


def test_a_full_disk_ends_the_command(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.write(a="one", b="two")

    def fail(path: Path) -> None:
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(resumable.atomic, "sync", fail)
    with pytest.raises(RunAgain, match="No space left on device"):
        case.run()
    monkeypatch.undo()
    assert case.run().made == 2
    assert list((case.out / ".jobs/half").iterdir()) == []


def test_an_input_that_changes_meanwhile_is_not_recorded_as_done(case: Case) -> None:
    case.write(a="one")
    items = case.items()
    case.write(a="another")
    begin = functools.partial(copying, case.top)
    outcome = resumable.run(items, begin, case.out, {}, engine=ONE, say=print)
    assert outcome.failed == {"a": "changed while it was processed"}
    assert case.run(settings={}).made == 1


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    store = Bucket(URL, MemoryStore())
    monkeypatch.setattr(bucket_folders, "opened", lambda url: store)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    return store


def test_a_bucket_has_the_same_outputs_as_a_folder(case: Case, bucket: Bucket) -> None:
    case.write(a="one", b="three", c="broken", d="file")
    case.run()
    folder = case.files()
    case.calls()
    assert case.run(URL).failed == {"c": "is broken"}
    names = [name for name in bucket.sizes() if not name.startswith(".jobs")]
    assert {name: _text(bucket, name) for name in names} == folder
    resumable.check_complete(URL)
    assert case.calls() == ["a", "b", "c", "d"]
    case.write(a="changed")
    bucket.delete(["b.made/deep/length"])
    bucket.put("a.made/left", b"of an earlier version")
    assert case.run(URL).made == 2
    assert case.calls() == ["a", "b"]
    assert _text(bucket, "a.made/text") == "CHANGED"
    assert "a.made/left" not in bucket.sizes()
    case.write(a="broken", d="broken")
    case.run(URL)
    assert not [name for name in bucket.sizes() if name.startswith(("a.made", "d.made"))]
    (case.source / "b").unlink()
    case.run(URL)
    assert json.loads(_text(bucket, "report.json"))["not_in_list"] == ["b.made"]


def test_objects_of_a_user_in_the_bucket_are_never_replaced(case: Case, bucket: Bucket) -> None:
    case.write(a="file")
    bucket.put("a.made", b"mine")
    with pytest.raises(
        InputError, match=r"s3://bucket/out has files .*, such as a\.made: use a new"
    ):
        case.run(URL)
    assert _text(bucket, "a.made") == "mine"
    bucket.delete(["a.made"])
    assert case.run(URL).made == 1


def _text(bucket: Bucket, name: str) -> str:
    content = bucket.get(name)
    assert content is not None
    return content.data.decode()


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from jobs import test_resumable
if __name__ == "__main__":
    case = test_resumable.Case.__new__(test_resumable.Case)
    case.top = Path({top!r})
    case.source, case.out, case.said = case.top / "in", case.top / "out", []
    case.run(engine=test_resumable.engines.Processes(2))
"""


def test_a_killed_command_resumes_and_leaves_nothing(case: Case, tmp_path: Path) -> None:
    case.write(**{f"n{number}": "text" for number in range(6)}, w="wait")
    script = tmp_path / "script.py"
    tests = Path(__file__).parents[1]
    script.write_text(SCRIPT.format(paths=[str(tests), str(tests.parent)], top=str(tmp_path)))
    process = subprocess.Popen([sys.executable, script])
    records = case.out / ".jobs/records"
    wait_for(lambda: len(list(records.glob("*/[!.]*"))) == 6, "the others", seconds=60)
    wait_for(lambda: list((case.out / ".jobs/half").iterdir()), "the last one", seconds=60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list((case.out / ".jobs/half").iterdir())
    case.calls()
    case.write(w="done")
    assert case.run().made == 1
    assert case.calls() == ["w"]
    assert list((case.out / ".jobs/half").iterdir()) == []


def test_a_half_written_record_is_removed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is where half-made outputs are, and not beside the records, which readers list."""
    case.write(a="one")
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if "records" in Path(target).parts:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(resumable.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        case.run()
    monkeypatch.undo()
    assert [
        path for path in case.out.rglob("*") if path.is_file() and "records" in path.parts
    ] == []
    left = case.out / ".jobs/half/0-of-1-0123456789abcdef"
    left.write_text("{")
    assert case.run().made == 1
    assert list(left.parent.iterdir()) == []


def test_a_worker_that_sees_another_folder_ends_the_command(case: Case) -> None:
    """As on nodes that do not share OUT: under its path they see a folder of their own."""
    case.write(a="one")
    place = resumable._place(case.out)
    begin = functools.partial(resumable._begin, functools.partial(copying, case.top), place)
    with place.opened(print):
        mark = place.mark()
        assert mark is not None
        assert list(ONE.map(functools.partial(begin, mark), case.items()))
        mark.rmdir()
        with pytest.raises(InputError, match="is not the folder of this command: use a folder"):
            list(ONE.map(functools.partial(begin, mark), case.items()))


def test_two_commands_take_turns(case: Case) -> None:
    """The second one waits, and then has nothing to do."""
    case.write(**{f"n{number}": "text" for number in range(3)})
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda _: case.run(), range(2)))
    assert sorted(outcome.made for outcome in outcomes) == [0, 3]
    assert case.calls() == ["n0", "n1", "n2"]


def test_an_item_that_is_stopped_has_no_record(tmp_path: Path) -> None:
    """Otherwise the next part would report it as failed, and complete the set without it."""
    items = [resumable.Item(name, (), name) for name in "ab"]
    started = threading.Event()

    def begin(worker: engines.Worker) -> resumable.Make:
        def make(item: resumable.Item, path: Path) -> resumable.Record:
            if item.name == "a":
                started.wait()
                raise InputError("the model is broken")
            started.set()
            while True:
                worker.check()
                time.sleep(0.01)

        return make

    out = tmp_path / "out"
    with pytest.raises(InputError, match="the model is broken"):
        resumable.run(items, begin, out, {}, engine=engines.Threads(2), say=print)
    assert not list((out / resumable.WORK / "records").rglob("*.json"))
