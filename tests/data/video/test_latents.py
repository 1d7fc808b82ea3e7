"""A teacher's latents are computed for the windows of training, and found or reported missing."""

import contextlib
import dataclasses
import errno
import functools
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_videos as sample
from cluster_here import ClusterHere
from obstore.store import MemoryStore

from jaxtrain.data import cache, video
from jaxtrain.data.video import latents
from jaxtrain.errors import BadExample, InputError, RunAgain
from jaxtrain.storage import bucket_output, disks, lease
from jaxtrain.storage.bucket import Bucket, Unavailable

SHAPE = (2, 8, 12, 3)
MODEL = types.SimpleNamespace(
    frames=6, height=sample.HEIGHT, width=sample.WIDTH, teacher=None, latent_shape=SHAPE
)
TAUGHT = types.SimpleNamespace(**{**vars(MODEL), "teacher": types.SimpleNamespace(prepared=True)})


class Means:
    """A teacher whose latents identify the clip: means over squares and frames."""

    name = "means-0123"
    about = "means"

    def __init__(self) -> None:
        self.clips = 0
        self.batches: list[int] = []

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        assert video_BTHW3.dtype == np.float32
        assert 0 <= video_BTHW3.min() <= video_BTHW3.max() <= 1
        b, t, h, w, _ = video_BTHW3.shape
        self.batches.append(b)
        return video_BTHW3.reshape(b, 2, t // 2, h // 8, 8, w // 8, 8, 3).mean((2, 4, 6))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents") / "videos"
    for number in range(4):
        sample.write(folder / f"{number}.mp4", 15 + number, g="8")
    return folder


def _open(path: Path, root: Path, model: Any = MODEL, **settings: Any) -> Any:
    given = {"path": str(path), "batch_size": 2, "cache_dir": str(root), "windows": "fixed"}
    return video.Config(**{**given, **settings}).open(model, seed=0, say=lambda line: None)


def _prepare(sources: Any, root: Path, teacher: Any = None, **more: Any) -> latents.Made:
    settings: dict[str, Any] = {"batch_size": 4, "threads": 2, "say": lambda line: None, **more}
    teacher = teacher or Means()
    target = latents.store(cache.root(str(root)), MODEL, teacher.name)
    return latents.prepare((sources.train, sources.val), teacher, target, **settings)


def test_each_fixed_window_comes_once_and_is_not_augmented(data: Path, tmp_path: Path) -> None:
    sources = _open(data, tmp_path)
    seen = []
    for split in (sources.train, sources.val):
        for index in range(len(split)):
            one, other = (split.example(index, np.random.default_rng(n)) for n in (1, 2))
            np.testing.assert_array_equal(one["video"], other["video"])
            np.testing.assert_array_equal(one["augment"], np.array([1, 1, 1, 0, 0], np.float32))
            seen.append([sample.number_of(picture) for picture in one["video"]])
    lengths = [15, 16, 17, 18]
    first = [6 * n for frames in lengths for n in range(frames // 6)]
    assert sorted(seen) == sorted([list(range(n, n + 6)) for n in first])
    assert sources.train.fingerprint != _open(data, tmp_path, windows="random").train.fingerprint


def test_latents_come_with_their_clips(data: Path, tmp_path: Path) -> None:
    plain = _open(data, tmp_path)
    teacher = Means()
    made = _prepare(plain, tmp_path, teacher)
    assert (made.videos, made.fresh, made.windows, made.bad) == (4, 4, 9, ())
    assert teacher.batches == [4, 4, 4]
    sources = _open(data, tmp_path, TAUGHT)
    for split in (sources.train, sources.val):
        for index in range(len(split)):
            example = split.example(index, np.random.default_rng(0))
            wanted = Means().encode(example["video"][None].astype(np.float32) / 255)[0]
            assert (example["latents"].dtype, example["latents"].shape) == (np.float32, SHAPE)
            np.testing.assert_allclose(example["latents"], wanted, atol=1e-3)
    assert sources.train.fingerprint != plain.train.fingerprint
    named = _open(data, tmp_path, TAUGHT, teacher="means-0123")
    assert named.train.fingerprint == sources.train.fingerprint


def test_a_start_opens_no_file_with_latents(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open a million files on a network disk takes minutes."""
    _prepare(_open(data, tmp_path), tmp_path)
    monkeypatch.setattr(latents.np, "load", None)
    sources = _open(data, tmp_path, TAUGHT)
    assert _prepare(sources, tmp_path).fresh == 0
    file = sources.train.latents.file(sources.train.entries[0])
    file.write_bytes(file.read_bytes()[:-1])  # truncated
    with pytest.raises(InputError, match=r"means-0123 are missing for 1 of 4 videos"):
        _open(data, tmp_path, TAUGHT)


def test_a_second_run_computes_only_missing_latents(data: Path, tmp_path: Path) -> None:
    sources = _open(data, tmp_path)

    class Dies(Means):
        def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
            if len(self.batches) == 2:
                raise KeyboardInterrupt
            return super().encode(video_BTHW3)

    with pytest.raises(KeyboardInterrupt):
        _prepare(sources, tmp_path, Dies(), batch_size=2)
    with pytest.raises(InputError, match=r"means-0123 are missing for \d of 4 videos"):
        _open(data, tmp_path, TAUGHT)
    made = _prepare(sources, tmp_path)
    assert 0 < made.fresh < 4
    assert _prepare(sources, tmp_path).fresh == 0
    train = _open(data, tmp_path, TAUGHT).train
    file = train.latents.file(train.entries[0])
    file.write_bytes(file.read_bytes()[:-1])  # truncated
    with pytest.raises(BadExample, match=r"its latents cannot be read"):
        train.example(0, np.random.default_rng(0))
    assert _prepare(sources, tmp_path).fresh == 1


CLAIMER = """
import sys
import time
from pathlib import Path
from jaxtrain.storage import lock
with lock.claimed(Path(sys.argv[1]), sys.argv[2]):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def test_commands_share_the_videos(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    """Another one claims a video and is killed, while this one waits for that video."""
    sources = _open(data, tmp_path)
    _prepare(sources, tmp_path)
    store = latents.store(cache.root(str(tmp_path)), MODEL, Means.name)
    entries = [entry for split in (sources.train, sources.val) for entry in split.entries]
    expected = [store.file(entry).read_bytes() for entry in entries]
    for entry in entries:
        store.file(entry).unlink()
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMER, store.folder / ".claims", store.file(entries[2]).name],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        there: list[list[bool]] = []

        def sleep(seconds: float) -> None:
            there.append([store.file(entry).exists() for entry in entries])
            other.kill()
            other.wait()

        monkeypatch.setattr(latents.time, "sleep", sleep)
        said: list[str] = []
        made = _prepare(sources, tmp_path, share="1", say=said.append)
    waits = "waiting for 1 video that other commands are encoding, such as "
    assert [line for line in said if "waiting" in line] == [waits + entries[2].path]
    assert there == [[True, True, False, True]]
    assert (made.videos, made.fresh, made.windows) == (4, 4, 9)
    assert [store.file(entry).read_bytes() for entry in entries] == expected


def test_a_claim_ends_with_its_video(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one that is held makes the next one slower, by the number of videos."""
    held: list[str] = []
    most: list[int] = []
    real = latents.LatentStore.claimed

    @contextlib.contextmanager
    def claimed(store: latents.LatentStore, name: str) -> Iterator[bool | None]:
        with real(store, name) as mine:
            held.append(name)
            most.append(len(held))
            yield mine
            held.remove(name)

    monkeypatch.setattr(latents.LatentStore, "claimed", claimed)
    made = _prepare(_open(data, tmp_path), tmp_path, share="1", batch_size=1, threads=1)
    assert (made.fresh, held) == (4, [])
    assert max(most) == 2


def test_what_killed_commands_left_is_removed(data: Path, tmp_path: Path, checkout: Path) -> None:
    """Except what a live command that shares the work may be writing."""
    sources = _open(data, tmp_path)
    store = latents.store(cache.root(str(tmp_path)), MODEL, Means.name)
    first, second = (store.file(entry) for entry in sources.train.entries[:2])
    about, theirs, ours = (
        file.with_name(f".{file.name}.abcd1234{file.suffix}")
        for file in (store.folder / latents.ABOUT, first, second)
    )
    lefts = (about, theirs, ours)

    def leave() -> None:
        for left in lefts:
            left.parent.mkdir(parents=True, exist_ok=True)
            left.write_text("half")

    leave()
    _prepare(sources, tmp_path)
    assert not any(left.exists() for left in lefts)
    leave()
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMER, store.folder / ".claims", first.name],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        _prepare(sources, tmp_path, share="1")
        assert [left.exists() for left in lefts] == [False, True, False]
    _prepare(sources, tmp_path, share="1")
    assert not theirs.exists()
    leave()
    _prepare_on(sources, tmp_path, ClusterHere())
    assert not any(left.exists() for left in lefts)


def test_only_the_command_describes_the_teacher(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once, although several workers of a cluster encode."""
    working, written = [False], []
    begin, describe = latents._begin, latents.LatentStore.describe

    def begun(*arguments: Any) -> Any:
        process = begin(*arguments)

        def one(group: Any) -> Any:
            working[0] = True
            try:
                return process(group)
            finally:
                working[0] = False

        return one

    def described(store: latents.LatentStore, about: str) -> None:
        written.append(working[0])
        describe(store, about)

    monkeypatch.setattr(latents, "_begin", begun)
    monkeypatch.setattr(latents.LatentStore, "describe", described)
    _prepare_on(_open(data, tmp_path), tmp_path, ClusterHere())
    assert written == [False]


def test_a_lost_description_is_written_again(data: Path, tmp_path: Path) -> None:
    sources = _open(data, tmp_path)
    _prepare(sources, tmp_path)
    (about,) = tmp_path.rglob(latents.ABOUT)
    content = about.read_bytes()
    for damage in (about.unlink, functools.partial(about.write_text, "{")):
        for again in (_prepare, functools.partial(_prepare_on, cluster=ClusterHere())):
            damage()
            assert again(sources, tmp_path).fresh == 0
            assert about.read_bytes() == content


def test_one_command_at_a_time_writes_a_teachers_latents(data: Path, tmp_path: Path) -> None:
    """Unless all share the work."""
    sources = _open(data, tmp_path)
    folder = latents.store(cache.root(str(tmp_path)), MODEL, Means.name).folder
    folder.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder, "shared"],
        env=os.environ | {"PYTHONPATH": str(Path(latents.__file__).parents[3])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunAgain, match=r"using .*means-0123 \(process .* with --share"):
            _prepare(sources, tmp_path)
        assert _prepare(sources, tmp_path, share="1").fresh == 4


HOLDER = """
import sys
from pathlib import Path
from jaxtrain.storage import lock
lock.hold(Path(sys.argv[1]), print, shared=sys.argv[2] == "shared")
print("held", flush=True)
sys.stdin.read()
"""


def _prepare_on(sources: Any, root: Path, cluster: Any, **more: Any) -> latents.Made:
    target = latents.store(cache.root(str(root)), MODEL, Means.name)
    settings: dict[str, Any] = {"batch_size": 1, "threads": None, "say": lambda line: None, **more}
    return latents.prepare_on_cluster(
        cluster, (sources.train, sources.val), Means, Means.about, target, **settings
    )


def test_a_cluster_computes_the_same_latents(data: Path, tmp_path: Path) -> None:
    alone, root = tmp_path / "alone", tmp_path / "cluster"
    _prepare(_open(data, alone), alone)
    sources = _open(data, root)
    cluster = ClusterHere()
    made = _prepare_on(sources, root, cluster)
    assert (made.videos, made.fresh, made.windows, made.bad) == (4, 4, 9, ())
    assert list(map(len, cluster.items)) == [2, 2]  # of four windows or more
    assert _files(root) == _files(alone)
    assert _prepare_on(sources, root, cluster).fresh == 0
    (root / "latents/6x64x96/means-0123/.token").write_text("of another folder")
    latents.store(root, MODEL, Means.name).file(sources.train.entries[0]).unlink()
    assert _prepare_on(sources, root, cluster).fresh == 1


def _files(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.glob("latents/**/*")
        if path.is_file() and path.name not in (".token", ".claims", ".lock")
    }


def test_a_video_that_kills_its_worker_costs_only_itself(data: Path, tmp_path: Path) -> None:
    sources = _open(data, tmp_path)
    killer = sources.train.entries[1]
    made = _prepare_on(
        sources, tmp_path, ClusterHere(lambda group: killer in [entry for _, entry in group])
    )
    assert (made.fresh, made.windows, made.without) == (3, 7, 1)
    assert [(bad.path, bad.reason) for bad in made.bad] == [(killer.path, latents.engine.KILLS)]
    assert _prepare_on(sources, tmp_path, ClusterHere()).fresh == 1


def test_a_video_that_is_gone_costs_only_itself(tmp_path: Path) -> None:
    for number in range(3):
        sample.write(tmp_path / f"videos/{number}.mp4", 12)
    sources = _open(tmp_path / "videos", tmp_path / "cache")
    (tmp_path / "videos/1.mp4").rename(tmp_path / "kept.mp4")
    made = _prepare_on(sources, tmp_path / "cache", ClusterHere())
    assert made.fresh == 2
    assert [Path(bad.path).name for bad in made.bad] == ["1.mp4"]
    (tmp_path / "kept.mp4").rename(tmp_path / "videos/1.mp4")
    assert _prepare_on(sources, tmp_path / "cache", ClusterHere()).fresh == 1


def test_windows_that_cannot_be_decoded_have_no_latents(data: Path, tmp_path: Path) -> None:
    for number in range(3):
        sample.write(tmp_path / "videos" / f"{number}.mp4", sample.busy(24, number), g="24")
    broken = sample.garble(tmp_path / "videos/1.mp4", at=0.85)
    sources = _open(tmp_path / "videos", tmp_path / "cache", max_bad_share=0.5)
    made = _prepare(sources, tmp_path / "cache")
    [bad] = made.bad
    assert (bad.path, bad.of) == (str(broken), 4)
    assert 1 <= bad.windows <= 3, "some end before the damage; how many depends on the encoder"
    assert (made.fresh, made.windows, made.without) == (3, 12 - bad.windows, 0)
    again: list[str] = []
    assert _prepare(sources, tmp_path / "cache", say=again.append) == (3, 0, 0, (bad,))
    assert again[0] == "3 of 3 videos already have latents"
    taught = _open(tmp_path / "videos", tmp_path / "cache", TAUGHT)
    every = [(s, n) for s in (taught.train, taught.val) for n in range(len(s))]
    refused = []
    for split, index in every:
        try:
            split.example(index, np.random.default_rng(0))
        except BadExample as error:
            refused.append(error.path)
    assert refused == [str(broken)] * bad.windows
    store = latents.store(tmp_path / "cache", MODEL, Means.name)
    entry = next(e for s, _ in every for e in s.entries if e.path == str(broken))
    with pytest.raises(BadExample, match="has no latents"):
        store.load(entry, 3)


def test_a_video_with_new_latents_for_all_windows_lacks_none(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = _open(data, tmp_path)
    real = type(sources.train).pixels
    broken = sources.train.entries[0]

    def fail(clips: Any, entry: Any, window: int) -> np.ndarray:
        if entry == broken and window == 0:
            raise BadExample(entry.path, "decoding fails")
        return real(clips, entry, window)

    monkeypatch.setattr(type(sources.train), "pixels", fail)
    made = _prepare(sources, tmp_path)
    of = sources.train.windows(broken)
    assert [str(bad) for bad in made.bad] == [
        f"no latents for 1 of {of} clips of {broken.path}: decoding fails"
    ]
    assert (made.fresh, made.windows, made.without) == (4, 8, 0)
    assert _prepare(sources, tmp_path).bad == made.bad
    monkeypatch.undo()
    latents.store(cache.root(str(tmp_path)), MODEL, Means.name).file(broken).unlink()
    again = _prepare(sources, tmp_path)
    assert (again.fresh, again.bad) == (1, ())
    assert _prepare(sources, tmp_path).bad == ()


def test_a_disk_that_fails_is_waited_for(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = _open(data, tmp_path)
    real = type(sources.train).pixels
    away = sources.train.entries[0]
    failures = 2

    def fail(clips: Any, entry: Any, window: int) -> np.ndarray:
        nonlocal failures
        if entry == away and failures:
            failures -= 1
            raise disks.unreadable(entry.path, OSError(errno.EIO, os.strerror(errno.EIO)))
        return real(clips, entry, window)

    monkeypatch.setattr(type(sources.train), "pixels", fail)
    with monkeypatch.context() as patched:
        patched.setattr(disks, "OUTAGE_S", 0.0)
        with pytest.raises(RunAgain, match=r"read \(Input/output error\): bring the disk"):
            _prepare(sources, tmp_path)
    made = _prepare(sources, tmp_path)
    assert (failures, made.videos, made.bad) == (0, 4, ())
    assert _prepare(sources, tmp_path).fresh == 0


def test_missing_latents_give_an_error_with_the_command(data: Path, tmp_path: Path) -> None:
    command = r"compute them with `.* prepare latents`, .* --teacher SPEC"
    with pytest.raises(InputError, match=rf"no teacher's latents for clips of 6x64x96.*{command}"):
        _open(data, tmp_path, TAUGHT)
    sources = _open(data, tmp_path)
    _prepare(sources, tmp_path)
    with pytest.raises(InputError, match=rf"no latents of teacher other.*means-0123 at.*{command}"):
        _open(data, tmp_path, TAUGHT, teacher="other")
    larger = types.SimpleNamespace(**{**vars(TAUGHT), "height": 128})
    with pytest.raises(InputError, match=rf"128x96 in.*means-0123 at 6x64x96\): {command}"):
        _open(data, tmp_path, larger)
    other = types.SimpleNamespace(**{**vars(TAUGHT), "latent_shape": (2, 8, 12, 4)})
    with pytest.raises(InputError, match=r"\(2, 8, 12, 3\).*but the model's have \(2, 8, 12, 4\)"):
        _open(data, tmp_path, other)
    second = Means()
    second.name = "second-1"
    _prepare(sources, tmp_path, second)
    with pytest.raises(InputError, match=r"2 teachers.*--data.teacher \(means-0123, second-1\)"):
        _open(data, tmp_path, TAUGHT)
    _open(data, tmp_path, TAUGHT, teacher="second-1")
    with pytest.raises(InputError, match=r"--data.windows fixed, or --model.teacher None"):
        _open(data, tmp_path, TAUGHT, windows="random")
    with pytest.raises(InputError, match=r"data.teacher=x has no effect"):
        _open(data, tmp_path, teacher="x")
    with pytest.raises(InputError, match=r"data.clips_per_video=2"):
        _open(data, tmp_path, clips_per_video=2)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: x[..., :2], r"shape \(2, 8, 12, 2\).*model's have \(2, 8, 12, 3\)"),
        (lambda x: x * np.nan, "NaN/Inf"),
        (lambda x: x + 1e6, "above 65504"),
    ],
)
def test_a_teacher_with_wrong_latents_is_rejected(
    data: Path, tmp_path: Path, wrong: Any, words: str
) -> None:
    class Wrong(Means):
        def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
            return wrong(super().encode(video_BTHW3))

    sources = _open(data, tmp_path)
    with pytest.raises(InputError, match=words):
        _prepare(sources, tmp_path, Wrong())
    with pytest.raises(InputError, match=r"no teacher's latents"):
        _open(data, tmp_path, TAUGHT)


@pytest.mark.parametrize("text", ["{", "[]", '{"shape": 5}', "{}"])
def test_a_damaged_description_is_an_error(data: Path, tmp_path: Path, text: str) -> None:
    _prepare(_open(data, tmp_path), tmp_path)
    (about,) = tmp_path.rglob(latents.ABOUT)
    about.write_text(text)
    with pytest.raises(InputError, match=r"about.json is damaged \(.*\): delete it"):
        _open(data, tmp_path, TAUGHT)


def test_latents_belong_to_the_video_not_to_its_path(data: Path, tmp_path: Path) -> None:
    sources = _open(data, tmp_path)
    _prepare(sources, tmp_path)
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in data.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    assert _prepare(_open(moved, tmp_path), tmp_path).fresh == 0
    sample.write(moved / "0.mp4", 14)  # another video under the old name
    entry = dataclasses.replace(sources.train.entries[0], size=1)
    store = latents.store(tmp_path, MODEL, Means.name)
    assert not store.has(entry, 2)
    assert _prepare(_open(moved, tmp_path), tmp_path).fresh == 1


def _sizes(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}


URL = "s3://bucket/cache"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A cache in a bucket; ``$JAXTRAIN_CACHE`` names the machine."""
    made = Bucket(URL, MemoryStore())
    monkeypatch.setattr(bucket_output, "opened", lambda url: made)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "first"))
    return made


def _in(bucket: Bucket) -> dict[str, bytes]:
    found = {name: bucket.get(name) for name in bucket.sizes()}
    return {name: one.data for name, one in found.items() if one is not None}


def _prepare_to(sources: Any, teacher: Any = None, **more: Any) -> latents.Made:
    target = latents.store(cache.root(URL), MODEL, Means.name, cache.bucket_of(URL))
    settings: dict[str, Any] = {"batch_size": 4, "threads": 2, "say": lambda line: None, **more}
    return latents.prepare((sources.train, sources.val), teacher or Means(), target, **settings)


def test_latents_in_a_bucket_are_fetched_by_training_on_another_machine(
    data: Path, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "alone"
    _prepare(_open(data, alone), alone)
    sources = _open(data, URL)
    with pytest.raises(InputError, match="no teacher's latents for clips of 6x64x96"):
        _open(data, URL, TAUGHT)
    assert _prepare_to(sources).fresh == 4
    assert _in(bucket) == _files(alone)
    assert not list((tmp_path / "first").rglob("*.npy"))
    assert _prepare_to(sources).fresh == 0

    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    assert _prepare_to(_open(data, URL)).fresh == 0
    taught = _open(data, URL, TAUGHT)
    (copy,) = (tmp_path / "second/copies").iterdir()
    assert _files(copy) == _files(alone)
    wanted = _open(data, alone, TAUGHT).train
    for index in range(len(wanted)):
        example, other = (
            one.example(index, np.random.default_rng(0)) for one in (taught.train, wanted)
        )
        np.testing.assert_array_equal(example["latents"], other["latents"])

    file = copy / next(name for name in _files(alone) if name.endswith(".npy"))
    bucket.delete([file.relative_to(copy).as_posix()])
    assert _open(data, URL, TAUGHT).train.latents.has(*_first(taught))  # the copy is enough
    file.unlink()
    with pytest.raises(InputError, match="are missing for 1 of 4 videos"):
        _open(data, URL, TAUGHT)
    assert _prepare_to(sources).fresh == 1
    bucket.delete(["latents/6x64x96/means-0123/about.json"])
    assert not file.exists()
    with pytest.raises(InputError, match="no teacher's latents"):
        _open(data, URL, TAUGHT)
    assert _prepare_to(sources).fresh == 0
    _open(data, URL, TAUGHT)

    def away(self: Bucket, *_: Any, **__: Any) -> None:
        raise Unavailable(f"{self.url}: cannot be reached")

    # With a complete copy, the bucket is not needed.
    monkeypatch.setattr(Bucket, "versions", away)
    monkeypatch.setattr(Bucket, "download", away)
    monkeypatch.setattr(Bucket, "about", away)
    assert _open(data, URL, TAUGHT).train.latents.has(*_first(taught))
    file.unlink()
    with pytest.raises(Unavailable):
        _open(data, URL, TAUGHT)


def test_latents_that_do_not_fit_are_not_fetched(
    data: Path, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prepare_to(_open(data, URL))
    need = sum(len(content) for name, content in _in(bucket).items() if name.endswith(".npy"))
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    monkeypatch.setattr(disks, "free_bytes", lambda folder: need - 1)
    words = rf"needs {need:,} bytes, but only {need - 1:,} are free in {tmp_path}/second/.*: free"
    with pytest.raises(RunAgain, match=words):
        _open(data, URL, TAUGHT)
    assert not list((tmp_path / "second").rglob("*.npy"))
    monkeypatch.setattr(disks, "free_bytes", lambda folder: need)
    _open(data, URL, TAUGHT)


def test_a_description_that_is_deleted_before_its_fetch_is_absent(
    data: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, an empty file took its place: "about.json is damaged"."""
    _prepare_to(_open(data, URL))
    listed = bucket.sizes

    def deleted(folder: str = "") -> dict[str, int]:
        found = listed(folder)
        bucket.delete([name for name in found if name.endswith(latents.ABOUT)])
        return found

    monkeypatch.setattr(bucket, "sizes", deleted)
    with pytest.raises(InputError, match="no teacher's latents for clips of 6x64x96"):
        _open(data, URL, TAUGHT)
    assert not list(cache.root(URL).rglob(latents.ABOUT))


def _first(sources: Any) -> Any:
    entry = sources.train.entries[0]
    return entry, sources.train.windows(entry)


def test_damaged_latents_in_a_bucket_are_made_again(
    data: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = _open(data, URL)
    _prepare_to(sources)
    before = _in(bucket)
    name = next(name for name in before if name.endswith(".npy"))
    bucket.put(name, b"truncated")
    with monkeypatch.context() as patched:

        def refused(self: Bucket, name: str, data: bytes) -> None:
            raise Unavailable(f"{self.url}: cannot write {name} (QuotaExceeded)")

        patched.setattr(Bucket, "put", refused)
        with pytest.raises(RunAgain, match=r"cannot write latents/6x64x96/means-0123/"):
            _prepare_to(sources)
    assert _prepare_to(sources).fresh == 1
    assert _in(bucket) == before
    assert _prepare_to(sources).fresh == 0


def test_windows_without_latents_in_a_bucket_are_reported_again(
    tmp_path: Path, bucket: Bucket
) -> None:
    for number in range(3):
        sample.write(tmp_path / "videos" / f"{number}.mp4", sample.busy(24, number), g="24")
    broken = tmp_path / "videos/1.mp4"
    intact = broken.read_bytes()
    sample.garble(broken, at=0.85)
    sources = _open(tmp_path / "videos", URL, max_bad_share=0.5)
    made = _prepare_to(sources)
    assert [bad.path for bad in made.bad] == [str(broken)]
    assert _prepare_to(sources) == (3, 0, 0, made.bad)
    entry = next(
        one
        for split in (sources.train, sources.val)
        for one in split.entries
        if one.path == str(broken)
    )
    name = latents.store(tmp_path, MODEL, Means.name).file(entry).name
    bucket.delete([one for one in bucket.sizes() if one.endswith(name)])
    broken.write_bytes(intact)
    assert _prepare_to(sources) == (3, 1, 4, ())
    assert _prepare_to(sources) == (3, 0, 0, ())


def test_commands_share_latents_in_a_bucket(data: Path, tmp_path: Path, bucket: Bucket) -> None:
    """Another one encodes all videos after this one has listed the bucket."""
    sources = _open(data, URL)

    class Late(Means):
        def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
            if not self.batches:
                _prepare_to(sources, share="2")
            return super().encode(video_BTHW3)

    late = Late()
    assert _prepare_to(sources, late, share="1", batch_size=1, threads=1).videos == 4
    assert len(late.batches) < 9  # the videos that were decoded ahead, not all of them
    alone = tmp_path / "alone"
    _prepare(_open(data, alone), alone)
    assert _in(bucket) == _files(alone)


def _lose_lease() -> None:
    held = bucket_output._leases[URL][1]
    assert held is not None
    held._lost = "another command has taken over"


@pytest.mark.parametrize("share", [None, "1"])
def test_no_latents_are_written_without_the_lease(
    data: Path, bucket: Bucket, share: str | None
) -> None:
    sources = _open(data, URL)

    class Losing(Means):
        def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
            _lose_lease()
            return super().encode(video_BTHW3)

    with (
        bucket_output.admitted(URL, print, shared=share is not None),
        pytest.raises(lease.Lost, match="another command has taken over"),
    ):
        _prepare_to(sources, Losing(), share=share)
    assert not [name for name in bucket.sizes() if name.startswith("latents")]


def test_a_cluster_stops_without_the_lease(data: Path, bucket: Bucket) -> None:
    """Its workers have none."""
    sources = _open(data, URL)
    target = latents.store(cache.root(URL), MODEL, Means.name, cache.bucket_of(URL))
    cluster: Any = ClusterHere()
    real, results = cluster.with_models, []

    def lose(*arguments: Any, **more: Any) -> Any:
        working = real(*arguments, **more)
        while True:
            held = bucket_output._leases.pop(URL)  # workers are other processes
            result = next(working, None)
            bucket_output._leases[URL] = held
            if result is None:
                return
            results.append(result)
            if len(results) == 2:
                _lose_lease()
            yield result

    cluster.with_models = lose
    splits = (sources.train, sources.val)
    settings: Any = {"batch_size": 1, "threads": None}
    with bucket_output.admitted(URL, print), pytest.raises(lease.Lost):
        latents.prepare_on_cluster(
            cluster, splits, Means, Means.about, target, say=lambda line: None, **settings
        )
    assert len(results) == 2


def test_a_cluster_needs_no_shared_cache_for_a_bucket(
    data: Path, tmp_path: Path, bucket: Bucket
) -> None:
    sources = _open(data, URL)
    target = latents.store(cache.root(URL), MODEL, Means.name, cache.bucket_of(URL))
    settings: Any = {"batch_size": 1, "threads": None, "say": lambda line: None}
    cluster: Any = ClusterHere()
    made = latents.prepare_on_cluster(
        cluster, (sources.train, sources.val), Means, Means.about, target, **settings
    )
    assert (made.videos, made.fresh) == (4, 4)
    alone = tmp_path / "alone"
    _prepare(_open(data, alone), alone)
    assert _in(bucket) == _files(alone)
