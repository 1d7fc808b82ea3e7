"""Pointers to the files of a checkpoint: any damage is found, and only damage."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint import small_checkpoint

from jaxtrain.checkpoint import pointer
from jaxtrain.checkpoint.pointer import Damaged, Pointer
from jaxtrain.errors import InputError, RunAgain

FILES = {"a": b"a" * 1000, "deep/er/b": random.Random(0).randbytes(70_000), "empty": b""}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The pointer of a checkpoint of step 12."""
    return small_checkpoint.write(tmp_path, 12, files=FILES)


def test_lists_every_file_with_its_size(path: Path, tmp_path: Path) -> None:
    found = pointer.read(path)
    assert (found.step, found.data) == (12, small_checkpoint.files_folder(12))
    assert {name: size for name, (size, _) in found.files.items()} == {
        name: len(content) for name, content in FILES.items()
    }
    assert found.size() == 71_000
    assert pointer.verify(path) == found.missing(tmp_path) == ""
    assert Pointer.parse(found.to_json(), 12) == found


@pytest.mark.parametrize("size", [0, 33, 70])
def test_every_byte_of_a_file_with_several_pieces_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(pointer, "CHUNK_BYTES", 32)
    monkeypatch.setattr(pointer, "_BUFFER_BYTES", 10)
    content = random.Random(size).randbytes(size)
    path = small_checkpoint.write(tmp_path, 12, files={"a": content})
    assert len(pointer.read(path).files["a"][1]) == -(-size // 32)
    assert pointer.verify(path) == ""
    for place in sorted({0, 9, 10, 31, 32, 63, 64, size - 1} & set(range(size))):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (small_checkpoint.data_of(path) / "a").write_bytes(changed)
        assert pointer.is_complete(path)  # which reads no content
        assert pointer.verify(path) == "a was changed after it was saved: its checksum is wrong"


def test_a_changed_pointer_is_damage(path: Path, tmp_path: Path) -> None:
    text = path.read_text()

    def verdict(changed: str | bytes) -> str:
        path.write_bytes(changed.encode() if isinstance(changed, str) else changed)
        assert not pointer.is_complete(path)
        return pointer.verify(path)

    mismatch = "its pointer is damaged: its content does not match its checksum"
    assert verdict(text.replace("1000", "1001")) == mismatch
    assert verdict(text.replace('"step": 12', '"step": 13')) == mismatch
    assert verdict(text.replace('"empty"', '"empti"')) == mismatch
    for broken in ("{}", "[]", "null", b"\xff\xfe" + text.encode(), "[" * 10**5):
        assert verdict(broken).startswith("its pointer is damaged: ")
    for end in (0, 1, len(text) // 2, len(text) - 3):
        assert verdict(text[:end]).startswith("its pointer is damaged: ")
    other = small_checkpoint.write(tmp_path, 13, files=FILES)
    assert verdict(other.read_bytes()) == "its pointer is for step 13"


def test_missing_files_are_named(path: Path) -> None:
    folder = small_checkpoint.data_of(path)
    (folder / "a").rename(folder / "aside")
    assert pointer.verify(path) == "a is missing"
    (folder / "a").write_bytes(b"short")
    assert pointer.verify(path) == "a has 5 bytes, but 1000 were saved"
    shutil.rmtree(folder)
    assert "is missing" in pointer.verify(path)
    with pytest.raises(InputError, match=r"12\.json is not a complete checkpoint: a is missing"):
        pointer.read_meta(path)
    path.unlink()
    assert pointer.verify(path) == "there is no such checkpoint"


@pytest.mark.parametrize(
    ("method", "number"),
    [("open", errno.EIO), ("stat", errno.ESTALE), ("read_bytes", errno.EACCES)],
)
def test_a_temporary_read_error_is_not_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, method: str
) -> None:
    victim = path if method == "read_bytes" else small_checkpoint.data_of(path) / "a"
    real = getattr(Path, method)

    def refuse(file: Path, *arguments: object, **more: object) -> object:
        if file == victim:
            raise OSError(number, os.strerror(number), str(file))
        return real(file, *arguments, **more)

    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        pointer.verify(path)
    assert caught.value.filename == str(victim)
    if method != "open":
        with pytest.raises((InputError, RunAgain), match=os.strerror(number)):
            pointer.read_meta(path)


def test_another_version_is_not_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pointer.read(path)
    monkeypatch.setattr(pointer, "FORMAT", 99)
    path.write_bytes(content.to_json())
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"12\.json: it has the format of another version"):
        pointer.verify(path)


@pytest.mark.parametrize(
    "typed", [lambda path: path, lambda path: path.with_suffix("")], ids=["json", "step"]
)
def test_a_checkpoint_is_typed_with_or_without_its_ending(
    path: Path, typed: Callable[[Path], Path]
) -> None:
    assert pointer.find(typed(path)) == path
    assert pointer.run_of(path) == path.parent.parent
    aside = path.parent.parent / "aside/12-0123456789ab.json"
    aside.parent.mkdir()
    path.rename(aside)
    assert pointer.find(typed(path)) is None
    assert pointer.find(typed(aside)) == aside
    assert pointer.run_of(aside) == path.parent.parent
    assert pointer.verify(aside) == ""


def test_other_files_are_not_checkpoints(tmp_path: Path) -> None:
    for name in (
        *("12.json", "checkpoints/012.json", "checkpoints/x.json", "checkpoints/1.txt"),
        *("aside/12.json", "aside/12-xyz.json", "checkpoints/12-0123456789ab.json"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
        assert pointer.find(tmp_path / name) is None
    assert pointer.steps(tmp_path / "checkpoints") == []


def test_the_folder_of_a_damaged_pointer_is_still_known(path: Path) -> None:
    content = path.read_bytes()
    files = small_checkpoint.files_folder(12)
    assert pointer.data_of(content[: len(content) // 2]) in ("", files)
    assert pointer.data_of(content.replace(b'"step": 12', b'"step": 7')) == files
    assert pointer.data_of(content.replace(b"files/12-", b"../../12-")) == ""
    longer = f"{files}0"  # the 65,536th save of one start
    assert pointer.data_of(content.replace(files.encode(), longer.encode())) == longer
    with pytest.raises(Damaged):
        Pointer.parse(b"", 12)
