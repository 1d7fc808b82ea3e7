"""Videos in tars are found, read in place and cached; broken ones are reported."""

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from data.video import sample_videos as sample

from jaxtrain.data.video import files as video_files
from jaxtrain.data.video import tar_members
from jaxtrain.errors import InputError

BROKEN = b"no video at all" * 100


pytestmark = pytest.mark.usefixtures("one_shot")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with three videos each; the second also has a broken video and a text file."""
    top = tmp_path_factory.mktemp("shards")
    made = top / "made"
    (top / "data").mkdir()
    for number in range(2):
        with tarfile.open(top / "data" / f"s-{number:03}.tar", "w") as tar:
            for member in range(3):
                sample.write(made / f"{member}.mp4", 20 + number, g="8")
                tar.add(made / f"{member}.mp4", f"{member}.mp4")
            _add(tar, "0.json", b"{}")
            if number:
                _add(tar, "x/broken.mp4", BROKEN)
    return top / "data"


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _find(path: Path | str, cache: Path) -> list[video_files.VideoFile]:
    return video_files.find(str(path), "--data.path", cache, lambda line: None)


def test_members_are_read_in_place_like_files(shards: Path, tmp_path: Path) -> None:
    sources = sample.opened(shards, tmp_path)
    assert sources.files == 7
    assert [(bad.path, bad.reason[:14]) for bad in sources.bad] == [
        ("s-001.tar/x/broken.mp4", "cannot be read")
    ]
    whole = tmp_path / "unpacked"
    for name in ("s-000", "s-001"):
        with tarfile.open(shards / f"{name}.tar") as tar:
            tar.extractall(whole / f"{name}.tar", filter="data")
    (whole / "s-001.tar/x/broken.mp4").unlink()
    files = sample.opened(whole, tmp_path / "other")
    for split in ("train", "val"):
        ours, theirs = getattr(sources, split), getattr(files, split)
        assert [one.name for one in ours.videos] == [one.name for one in theirs.videos]
        assert all(one.name.startswith("s-00") for one in ours.videos)
        assert ours.fingerprint == theirs.fingerprint
        ours = pickle.loads(pickle.dumps(ours))
        for index in range(len(ours)):
            one = ours.example(index, np.random.default_rng(index))
            other = theirs.example(index, np.random.default_rng(index))
            np.testing.assert_array_equal(one["video"], other["video"])


def test_patterns_lists_and_single_tars(shards: Path, tmp_path: Path) -> None:
    everything = [one.name for one in _find(shards, tmp_path)]
    assert everything[:2] == ["s-000.tar/0.mp4", "s-000.tar/1.mp4"]
    assert len(everything) == 7
    listed = tmp_path / "l.txt"
    listed.write_text(f"{shards}/s-{{000..001}}.tar\n")
    for path in (f"{shards}/s-{{000..001}}.tar", str(listed)):
        found = _find(path, tmp_path)
        assert len(found) == 7
        assert {one.file for one in found} == {str(shards / f"s-00{n}.tar") for n in range(2)}
    assert len(_find(shards / "s-000.tar", tmp_path)) == 3
    assert [*tar_members.expand("a{8..11}b")] == ["a8b", "a9b", "a10b", "a11b"]
    assert [*tar_members.expand("{08..9}-{1..1}/c")] == ["08-1/c", "09-1/c"]
    assert [*tar_members.expand("{5..3}.tar")] == []
    assert not tar_members.is_pattern("{0..%s}.tar" % ("9" * 5000))


@pytest.mark.timeout(60)
def test_a_pipe_named_like_a_tar_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "a.tar")
    with pytest.raises(InputError, match=r"a\.tar cannot be read as a tar: it is not a regular"):
        video_files.find(str(tmp_path / "data"), "--data.path", tmp_path / "cache", print)


def test_errors_about_tars_give_the_reason(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.tar\.gz is a compressed tar.*plain \.tar"):
        _find(tmp_path / "x.tar.gz", tmp_path)
    (tmp_path / "not.tar").write_bytes(b"x" * 2000)
    with pytest.raises(InputError, match=r"not\.tar cannot be read as a tar"):
        _find(tmp_path / "not.tar", tmp_path)
    with pytest.raises(InputError, match=r"a-0\.tar cannot be read as a tar \(No such file"):
        _find(tmp_path / "a-{0..1}.tar", tmp_path)
    content = (shards / "s-000.tar").read_bytes()
    last = content.rindex(b"0.json") - 1  # of the last video, or its padding
    for length in (len(content) // 2, last, last - 600):
        (tmp_path / "cut.tar").write_bytes(content[:length])
        with pytest.raises(InputError, match=r"cut\.tar cannot be read as a tar: .*copy it"):
            _find(tmp_path / "cut.tar", tmp_path)
    with tarfile.open(tmp_path / "empty.tar", "w") as tar:
        _add(tar, "a.txt", b"a")
    with pytest.raises(InputError, match=r"no video files found"):
        _find(tmp_path / "empty.tar", tmp_path)


def test_a_sparse_member_is_one_line(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo("v.mp4")
        info.type = tarfile.GNUTYPE_SPARSE
        tar.addfile(info)
    with pytest.raises(InputError, match=r"a\.tar.*member v\.mp4 is sparse.*without --sparse"):
        tar_members.members(str(tmp_path / "a.tar"))
