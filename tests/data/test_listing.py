"""Which files of a folder are data."""

from pathlib import Path

import pytest
from checkpoint import small_checkpoint

from jaxtrain.data import listing
from jaxtrain.data.text import documents
from jaxtrain.data.video import files
from jaxtrain.errors import InputError
from jaxtrain.storage import run_marker


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A folder with a text, two run directories, and a cache."""
    small_checkpoint.mark(tmp_path / "data/run1")
    small_checkpoint.mark(tmp_path / "data/more/run2")
    (tmp_path / "data/cache/deep").mkdir(parents=True)
    run_marker.mark_cache(tmp_path / "data/cache")
    for name in (
        "a.txt",
        "run1/log.txt",
        "more/b.txt",
        "more/run2/samples/1.txt",
        "cache/deep/t.txt",
    ):
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path / "data"


def test_run_directories_and_caches_are_not_data(top: Path) -> None:
    said: list[str] = []
    assert list(listing.files(top, said.append)) == [top / "a.txt", top / "more/b.txt"]
    assert said == [f"skipped 2 run directories and a cache below {top}, such as {top / 'cache'}"]
    assert top / "cache/deep/t.txt" in list(listing.files(top / "cache", said.append))


def test_a_pattern_skips_them_too(top: Path) -> None:
    said: list[str] = []
    paths = [path for path, _ in documents._walked(f"{top}/**/*.txt", "--data.path", said.append)]
    assert sorted(paths) == [top / "a.txt", top / "more/b.txt"]
    assert len(said) == 1


@pytest.mark.parametrize("below", ["", "samples"])
def test_data_in_a_run_directory_are_refused(top: Path, below: str) -> None:
    folder = top / "more/run2" / below
    with pytest.raises(InputError, match=rf"--data.path {folder} is (in the|a) run directory"):
        list(documents._walked(str(folder), "--data.path", print))
    with pytest.raises(InputError, match=rf"--data.path {folder} is (in the|a) run directory"):
        files._on_disk(str(folder), "--data.path", print)


def test_only_a_new_cache_is_marked(tmp_path: Path) -> None:
    from jaxtrain.storage import cache

    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        cache.root(str(tmp_path / name))
    assert not run_marker.is_cache(tmp_path / "mine")
    assert run_marker.is_cache(tmp_path / "new")
