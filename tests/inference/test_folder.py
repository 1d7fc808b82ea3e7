"""Folders: what is done is not done again, and what failed is listed."""

import errno
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_videos
import small_autoencoder
from cluster_here import ClusterHere

from jaxtrain.data import engine
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.inference import folder
from jaxtrain.storage import shared_folder

TEXT = frozenset((".txt",))


def texts(place: Path, count: int = 5) -> Path:
    for number in range(count):
        inside = place / "in" / ("a" if number % 2 else "b")
        inside.mkdir(parents=True, exist_ok=True)
        (inside / f"{number}.txt").write_text(str(number))
    return place / "in"


class Upper:
    """Writes "<content>!", and records what it was called with."""

    def __init__(self, *broken: str) -> None:
        self.seen: list[str] = []
        self.workers: set[int] = set()
        self.broken = broken

    def __call__(
        self, worker: int, source: Path, target: Path, check: Callable[[], None]
    ) -> dict[str, Any]:
        check()
        self.seen.append(source.name)
        self.workers.add(worker)
        if source.name in self.broken:
            raise InputError(f"{source} is broken")
        target.write_text(f"{source.read_text()}!")
        return {"length": 2}


def process(
    place: Path,
    work: folder.Work,
    workers: int = 2,
    share: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> folder.Outcome:
    todo = folder.jobs(place / "in", place / "out", TEXT, ".up", print)
    return folder.run(
        todo,
        place / "out",
        settings or {"mode": 1},
        work,
        workers=workers,
        say=say,
        share=share,
    )


def manifest(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "out/manifest.jsonl").read_text().splitlines()]


def test_each_file_is_processed_once_and_listed(tmp_path: Path) -> None:
    texts(tmp_path)
    work = Upper()
    assert process(tmp_path, work) == folder.Outcome(5, 0, {})
    assert sorted(work.seen) == [f"{number}.txt" for number in range(5)]
    assert work.workers <= {0, 1}
    settings, *records = manifest(tmp_path)
    assert settings == {"settings": {"mode": 1}}
    assert [one["source"] for one in records] == [
        "a/1.txt",
        "a/3.txt",
        *(f"b/{n}.txt" for n in (0, 2, 4)),
    ]
    assert records[0]["target"] == "a/1.up"
    assert (records[0]["length"], records[0]["bytes"]) == (2, 2)
    assert (tmp_path / "out/a/1.up").read_text() == "1!"
    again = Upper()
    assert process(tmp_path, again) == folder.Outcome(0, 5, {})
    assert again.seen == []
    assert manifest(tmp_path) == [settings, *records]


def test_changed_missing_and_failed_files_are_processed_again(tmp_path: Path) -> None:
    texts(tmp_path)
    found = process(tmp_path, Upper("2.txt"))
    assert (found.done, found.failed) == (4, {"b/2.txt": f"{tmp_path}/in/b/2.txt is broken"})
    assert {"source": "b/2.txt", "error": f"{tmp_path}/in/b/2.txt is broken"} in manifest(tmp_path)
    (tmp_path / "in/a/1.txt").write_text("longer")
    (tmp_path / "out/a/3.up").unlink()
    (tmp_path / "out/b/0.up").write_text("torn by something else")
    work = Upper()
    assert process(tmp_path, work) == folder.Outcome(4, 1, {})
    assert sorted(work.seen) == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert not [one for one in manifest(tmp_path) if "error" in one]


def test_other_settings_and_a_damaged_manifest_are_refused(tmp_path: Path) -> None:
    texts(tmp_path)
    process(tmp_path, Upper())
    with pytest.raises(InputError, match=r"other settings \(mode 1, not 2\): use the same"):
        process(tmp_path, Upper(), mode=2)
    path = tmp_path / "out/manifest.jsonl"
    path.write_text(path.read_text() + '{"source": "b/9')  # killed while writing
    assert process(tmp_path, Upper()).skipped == 5
    for damage in ("nonsense", '{"settings": 5}', "[]", "7"):
        path.write_text(f"{damage}\n")
        with pytest.raises(InputError, match=r"manifest\.jsonl is damaged"):
            process(tmp_path, Upper())


def test_a_file_that_changes_or_disappears_meanwhile_is_a_failure(tmp_path: Path) -> None:
    source = texts(tmp_path)

    class Changing(Upper):
        def __call__(self, worker: int, path: Path, *others: Any) -> dict[str, Any]:
            found = super().__call__(worker, path, *others)
            if path.name == "1.txt":
                path.write_text("another text")
            if path.name == "2.txt":
                path.unlink()
            return found

    found = process(tmp_path, Changing())
    changed, gone = source / "a/1.txt", source / "b/2.txt"
    assert (found.done, found.failed) == (
        3,
        {
            "a/1.txt": f"{changed} changed while it was read: run the command again",
            "b/2.txt": f"{gone} cannot be read: No such file or directory",
        },
    )
    work = Upper()
    assert process(tmp_path, work).done == 1
    assert work.seen == ["1.txt"]


def test_progress_counts_the_files_that_are_left(tmp_path: Path) -> None:
    source = texts(tmp_path)
    process(tmp_path, Upper("2.txt"))
    expected: list[int] = []
    todo = folder.jobs(source, tmp_path / "out", TEXT, ".up", print)
    folder.run(
        todo,
        tmp_path / "out",
        {"mode": 1},
        Upper(),
        workers=1,
        say=print,
        each_file=expected.append,
    )
    assert expected == [1]


def shout(broken: str, cpus: int) -> Callable[[Path, Path], dict[str, Any]]:
    """Returns what processes a file in a worker of a cluster."""
    assert cpus == 2
    work = Upper(broken)
    return lambda source, target: work(0, source, target, lambda: None)


def on_cluster(
    place: Path, cluster: Any, *, mode: int = 1, broken: str = "", say: Any = print
) -> folder.Outcome:
    todo = folder.jobs(place / "in", place / "out", TEXT, ".up", print)
    return folder.run_on_cluster(
        cluster,
        todo,
        place / "out",
        {"mode": mode},
        functools.partial(shout, broken),
        at_once=3,
        say=say,
    )


def files(place: Path) -> dict[str, bytes]:
    return {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_a_cluster_writes_the_files_and_the_manifest_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    texts(tmp_path / "x")
    monkeypatch.chdir(tmp_path)  # workers are elsewhere: paths and messages are relative here
    here = Path("x")
    alone = process(here, Upper("2.txt"))
    expected = files(here / "out")
    shutil.rmtree(here / "out")
    cluster, said = ClusterHere(), list[str]()
    assert on_cluster(here, cluster, broken="2.txt", say=said.append) == alone
    assert alone.failed == {"b/2.txt": "x/in/b/2.txt is broken"}
    assert said == ["failed: x/in/b/2.txt is broken"]
    assert files(here / "out") == expected
    assert cluster.at_once == 3
    assert all(job.source.is_absolute() and job.target.is_absolute() for job in cluster.items)
    again = ClusterHere()
    assert on_cluster(here, again) == folder.Outcome(1, 4, {})
    assert [job.name for job in again.items] == ["b/2.txt"]
    assert on_cluster(here, None) == folder.Outcome(0, 5, {})
    with pytest.raises(InputError, match=r"other settings \(mode 1, not 2\)"):
        on_cluster(here, None, mode=2)


def test_a_file_that_kills_its_worker_or_is_gone_costs_only_itself(tmp_path: Path) -> None:
    source = texts(tmp_path)

    def kills(job: folder.Job) -> bool:
        (source / "b/4.txt").unlink(missing_ok=True)
        return job.name == "a/3.txt"

    found = on_cluster(tmp_path, ClusterHere(kills))
    assert (found.done, found.failed) == (
        3,
        {
            "a/3.txt": f"{source}/a/3.txt {engine.KILLS}",
            "b/4.txt": f"{source}/b/4.txt cannot be read: No such file or directory",
        },
    )


def test_what_lost_workers_left_is_removed(tmp_path: Path) -> None:
    texts(tmp_path)
    out = tmp_path / "out"
    ours = (".0.up.x_7abcde.up",)
    others = (".0.up.note.txt", ".b.up.x_7abcde.up", "0.up.x_7abcde.up", ".0.up.x.y7abcdef.up")

    def kills(job: folder.Job) -> bool:
        for name in (*ours, *others):
            (out / "b" / name).write_text("half")
        return False

    out.mkdir()
    manifest = out / f".{folder.MANIFEST}.abcd1234.jsonl"
    manifest.write_text("of a killed command")
    on_cluster(tmp_path, ClusterHere(kills))
    assert not manifest.exists()
    assert {path.name for path in (out / "b").iterdir()} == {*others, "0.up", "2.up", "4.up"}


def test_a_node_that_does_not_see_the_folders_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = texts(tmp_path)
    monkeypatch.setattr(
        shared_folder, "unseen", lambda path: shared_folder.Unseen(str(path), "node7")
    )
    with pytest.raises(
        InputError, match=rf"{source}/b/4\.txt does not exist on node7: use a folder"
    ):
        on_cluster(tmp_path, ClusterHere())
    other = shared_folder.Mark(tmp_path / "out/.manifest/token", "of another", "OUT out")
    monkeypatch.setattr(shared_folder, "mark", lambda file, name: other)
    with pytest.raises(InputError, match=r"OUT out on .* is not the folder of this command"):
        on_cluster(tmp_path, ClusterHere())


SHARER = """
import sys
from pathlib import Path
from jaxtrain.inference import folder

def work(worker, source, target, check):
    if source.name == "3.txt":
        target.with_name(f".{target.name}.half_1_2.up").write_text("half")
        print("holds 3", flush=True)
        sys.stdin.read()
    target.write_text(f"{source.read_text()}!")
    return {"length": 2}

place = Path(sys.argv[1])
todo = folder.jobs(place / "in", place / "out", frozenset((".txt",)), ".up", print)
folder.run(todo, place / "out", {"mode": 1}, work, workers=1, say=print, share="0")
"""


def test_commands_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    """One is killed while it processes a file; the other waits for that file, then processes it."""
    texts(tmp_path, 9)
    alone = process(tmp_path, Upper("7.txt"))
    assert len(alone.failed) == 1
    expected = (tmp_path / "out/manifest.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "out")
    with subprocess.Popen(
        [sys.executable, "-c", SHARER, tmp_path],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        while "holds 3" not in (line := other.stdout.readline()):
            assert line
        theirs = {path.stem for path in (tmp_path / "out").rglob("[0-9].up")}
        with pytest.raises(RunAgain, match="another command is using"):
            process(tmp_path, Upper())
        with pytest.raises(InputError, match=r"other settings \(mode 1, not 2\)"):
            process(tmp_path, Upper(), share="1", mode=2)
        waits: list[set[str]] = []

        def sleep(seconds: float) -> None:
            waits.append({path.stem for path in (tmp_path / "out").rglob("[0-9].up")})
            other.kill()
            other.wait()

        monkeypatch.setattr(folder.time, "sleep", sleep)
        mine = Upper("7.txt")
        helped: list[str] = []

        def one(worker: int, source: Path, target: Path, check: Callable[[], None]) -> Any:
            if not helped:  # a third command finishes another file meanwhile
                record = next(
                    line
                    for line in map(json.loads, expected.splitlines()[1:])
                    if "error" not in line
                    and line["source"][2] not in {*theirs, "3", source.name[0]}
                )
                helped.append(record["source"])
                (tmp_path / "out" / record["target"]).write_text(f"{record['source'][2]}!")
                lines = ({"settings": {"mode": 1}}, record)
                part = tmp_path / "out/.manifest/third.jsonl"
                part.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"sour')
            return mine(worker, source, target, check)

        said: list[str] = []
        found = process(tmp_path, one, 1, share="1", say=said.append, mode=1)
    (line,) = (line for line in said if "waiting" in line)
    assert line.startswith("waiting for 1 file that other commands are processing, such as ")
    assert line.endswith("/3.txt")
    assert waits == [{*"01234568"} - {"3"}]
    assert "3.txt" in mine.seen
    assert not theirs & {name[0] for name in mine.seen} - {"7"}
    assert helped[0][2:] not in mine.seen
    assert found.done == 8 - len(theirs - {"7"}) - 1
    assert (tmp_path / "out/manifest.jsonl").read_bytes() == expected
    assert not list((tmp_path / "out").rglob(".*.half_1_2.up"))
    # A later command alone also knows what those that shared have done.
    (tmp_path / "out/manifest.jsonl").unlink()
    assert process(tmp_path, Upper("7.txt")).skipped == 8
    assert not (tmp_path / "out/.manifest").exists()


def test_lines_of_commands_that_shared_may_be_older_or_newer(tmp_path: Path) -> None:
    texts(tmp_path, 2)
    process(tmp_path, Upper(), share="1")
    (tmp_path / "in/a/1.txt").write_text("changed")
    process(tmp_path, Upper(), share="1")  # its line is newer than that of the first
    for part in (tmp_path / "out/.manifest").glob("*.jsonl"):
        if "changed" not in part.read_text() and '"source_bytes": 7' in part.read_text():
            part.unlink()  # only the manifest has it
    again = Upper()
    assert process(tmp_path, again, share="1").skipped == 2
    lines = (tmp_path / "out/manifest.jsonl").read_text()
    (tmp_path / "in/b/0.txt").write_text("longer")
    process(tmp_path, again, share="1")
    assert again.seen == ["0.txt"]
    (tmp_path / "out/manifest.jsonl").write_text(lines)  # as if it had been killed
    assert process(tmp_path, again).skipped == 2
    assert again.seen == ["0.txt"]


def test_without_locks_a_file_that_another_command_writes_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts(tmp_path, 1)
    (tmp_path / "out/b").mkdir(parents=True)
    half = tmp_path / "out/b/.0.up.half_1_2.up"
    half.write_text("half")

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "lockf", refuse)
        assert process(tmp_path, Upper(), share="1").done == 1
    assert half.exists()
    (tmp_path / "out/b/0.up").unlink()
    assert process(tmp_path, Upper(), share="1").done == 1
    assert not half.exists()


def test_only_new_lines_of_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_MOST_MANIFEST", 30)  # less than the file in the end
    part = tmp_path / "part.jsonl"
    others = folder._Others(tmp_path, {"mode": 1})
    for number in range(3):
        with part.open("a") as file:
            file.write(json.dumps({"source": str(number)}) + '\n{"sour')
        others.read()
        assert list(others.records) == [*map(str, range(number + 1))]
        whole = part.read_bytes().removesuffix(b'{"sour')
        part.write_bytes(b"x" * (len(whole) - 1) + b"\n")  # cannot be parsed again
    assert part.stat().st_size > 30


def test_unusable_folders_are_refused(tmp_path: Path) -> None:
    source = texts(tmp_path)
    for out, message in (
        (source / "out", r"out is inside IN"),
        (source, r"in is IN .*in: choose a folder outside"),
        (source / "a/1.txt", r"is a file, but IN"),
        (tmp_path / "x.up", r"IN .*in is a folder, but OUT .*x\.up is named like a file"),
    ):
        with pytest.raises(InputError, match=message):
            folder.jobs(source, out, TEXT, ".up", print)
    with pytest.raises(InputError, match=r"has no files that end with \.mp4"):
        folder.jobs(source, tmp_path / "out", frozenset((".mp4",)), ".up", print)
    (source / "a/1.log").write_text("")
    with pytest.raises(InputError, match=r"1\.txt and .*1\.log would both become"):
        folder.jobs(source, tmp_path / "out", TEXT | {".log"}, ".up", print)


def test_another_error_stops_all_workers(tmp_path: Path) -> None:
    texts(tmp_path, 50)

    calls: list[Any] = []

    class Bad(Upper):
        def __call__(self, *arguments: Any) -> dict[str, Any]:
            calls.append(arguments)
            if self.seen:
                raise RuntimeError("bug")
            return super().__call__(*arguments)

    work = Bad()
    with pytest.raises(RuntimeError, match="bug"):
        process(tmp_path, work)
    assert len(calls) <= 3  # one that worked, and one or two that failed at the same time
    assert process(tmp_path, Upper()).done >= 48


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "jaxtrain", *map(str, arguments)]


@pytest.mark.long
def test_twenty_videos_on_four_devices_killed_and_resumed(tmp_path: Path, checkout: Path) -> None:
    weights = small_autoencoder.save(tmp_path / "w.safetensors")
    videos = tmp_path / "videos"
    videos.mkdir()
    for number in range(20):
        images = sample_videos.busy(9 + number % 3, height=16, width=24)
        sample_videos.write(videos / f"{number:02}.mp4", images)
    out, manifest = tmp_path / "out", tmp_path / "out/manifest.jsonl"
    typed = command("encode", weights, videos, out, "--workers", 4)
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(checkout)}
    with subprocess.Popen(typed, env=environment) as killed:
        began = time.monotonic()
        while time.monotonic() - began < 300:
            if manifest.exists() and len(manifest.read_text().splitlines()) > 4:
                break
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    before = len(manifest.read_text().splitlines()) - 1
    assert 4 <= before < 20, before
    again = subprocess.run(typed, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"{before} already done of 20 files on 4 devices" in again.stdout
    assert len(list(out.glob("*.safetensors"))) == 20
    assert not list(out.glob(".*.safetensors"))
    # One by one, on as many devices: XLA's sums on CPUs depend on its number of threads.
    script = (
        "import pathlib, sys; from jaxtrain import main\n"
        "weights, videos, to = map(pathlib.Path, sys.argv[1:])\n"
        "for one in sorted(videos.iterdir()):\n"
        "    target = to / f'{one.stem}.safetensors'\n"
        "    assert main.main(['encode', *map(str, (weights, one, target))]) == 0\n"
    )
    single = tmp_path / "single"
    single.mkdir()
    typed = [sys.executable, "-c", script, *map(str, (weights, videos, single))]
    subprocess.run(typed, env=environment, check=True)
    for path in sorted(single.iterdir()):
        assert (out / path.name).read_bytes() == path.read_bytes(), path
