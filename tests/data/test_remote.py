"""Addresses: fetched once, whole, through fsspec; its memory:// stands for the clouds."""

import builtins
import tarfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import sample_videos as sample

from jaxtrain.data import remote, video, video_files
from jaxtrain.errors import InputError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    """memory://bucket with two videos, a tar and a list."""
    memory = fsspec.filesystem("memory")
    made = [sample.write(tmp_path / "made" / f"{n}.mp4", 20 + n) for n in range(3)]
    with tarfile.open(tmp_path / "made/s.tar", "w") as tar:
        tar.add(made[2], "inner.mp4")
    for name in ("0.mp4", "sub/1.mp4"):
        memory.pipe(f"/bucket/{name}", (tmp_path / "made" / name[-5:]).read_bytes())
    memory.pipe("/bucket/s.tar", (tmp_path / "made/s.tar").read_bytes())
    memory.pipe("/bucket/list.txt", b"0.mp4\nmemory://bucket/sub/1.mp4\ns.tar\n")
    memory.pipe("/bucket/readme.md", b"")
    yield memory
    memory.rm("/bucket", recursive=True)


def _find(path: str, cache: Path) -> tuple[list[video_files.Found], list[str]]:
    said: list[str] = []
    return video_files.find(path, "--data.path", cache, said.append), said


NAMES = ["bucket/0.mp4", "bucket/s.tar/inner.mp4", "bucket/sub/1.mp4"]


def test_folders_lists_and_files_are_fetched_once(store: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found, said = _find("memory://bucket", cache)
    assert [one.name for one in found] == NAMES
    assert said == [f"fetching 3 of 3 files into {cache / 'remote'}, once"]
    assert Path(found[0].path).read_bytes() == (tmp_path / "made/0.mp4").read_bytes()
    store.rm("/bucket/0.mp4")
    store.pipe("/bucket/0.mp4", b"other")
    again, said = _find("memory://bucket", cache)
    assert (again, said) == (found, [])
    listed, _ = _find("memory://bucket/list.txt", cache)
    assert sorted(one.name for one in listed) == NAMES
    own = tmp_path / "own.txt"
    own.write_text("memory://bucket/sub/1.mp4\nmade/2.mp4\n")
    mixed, _ = _find(str(own), cache)
    assert [one.name for one in mixed] == ["bucket/sub/1.mp4", "made/2.mp4"]
    assert not list(cache.rglob(".*"))


def test_they_are_data_like_any_other(store: Any, tmp_path: Path) -> None:
    model = types.SimpleNamespace(frames=6, height=32, width=48)
    config = video.Config(
        path="memory://bucket/list.txt", batch_size=1, cache_dir=str(tmp_path / "cache")
    )
    sources = config.open(model, seed=0, say=lambda line: None)
    assert (sources.files, sources.bad) == (3, ())


def test_a_file_that_comes_short_is_refused(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(store).info
    monkeypatch.setattr(
        type(store), "info", lambda self, path, **more: {**real(self, path), "size": 10**9}
    )
    with pytest.raises(InputError, match=r"bucket/0\.mp4: [\d,]+ of 1,000,000,000 bytes came"):
        _find("memory://bucket/0.mp4", tmp_path)
    assert not list(tmp_path.rglob("remote/*/*/*"))


def test_wrong_addresses_are_one_line(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, words in (
        ("memory://bucket/gone.mp4", "gone.mp4 cannot be fetched: FileNotFoundError"),
        ("memory://nothing", "names no video file"),
        ("nosuch://a/b.mp4", "use a path, https://, s3:// or gs://"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            _find(address, tmp_path)
        assert "\n" not in str(caught.value)

    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "fsspec":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"s3://b/a.mp4 needs .*pip install -e '\.\[cloud\]'"):
        _find("s3://b/a.mp4", tmp_path)


def test_what_an_address_is() -> None:
    assert remote.is_remote("https://a/b.mp4?key=1")
    assert not remote.is_remote("/a/b.mp4")
    assert not remote.is_remote("a:/b.mp4")
    assert remote.name_of("https://a.org/x/b.mp4?key=1") == "a.org/x/b.mp4"
