"""Tests the manifest: its entries, and the detection of any damage or forgery."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxtrain.checkpoint import manifest
from jaxtrain.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Creates a checkpoint folder for step 12 with a manifest."""
    return make(tmp_path / "12", 12)


def make(folder: Path, step: int, seed: int = 0) -> Path:
    rng = random.Random(seed)
    for name, size in (("a", 1000), ("deep/er/b", 70_000), ("empty", 0)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(size))
    manifest.write(folder, step)
    return folder


def test_lists_every_file_with_its_size(folder: Path) -> None:
    found = manifest.read(folder)
    assert found.step == 12
    assert {name: size for name, (size, _) in found.files.items()} == {
        "a": 1000,
        "deep/er/b": 70_000,
        "empty": 0,
    }
    assert manifest.look(folder) == manifest.verify(folder) == ""


def test_unlisted_files_are_not_damage(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / ".manifest.json.left").write_text("by a killed process")
    assert manifest.verify(folder) == ""
    manifest.write(folder, 12)
    assert set(manifest.read(folder).files) == {"a", "deep/er/b", "empty", "notes.txt"}


@pytest.mark.parametrize("size", [0, 1, 32, 33, 70])
def test_every_byte_of_a_file_with_several_pieces_is_verified(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(manifest, "PIECE_BYTES", 32)
    monkeypatch.setattr(manifest, "_BUFFER_BYTES", 10)
    content = random.Random(size).randbytes(size)
    (folder / "a").write_bytes(content)
    manifest.write(folder, 12)
    assert len(manifest.read(folder).files["a"][1]) == -(-size // 32)
    assert manifest.verify(folder) == ""
    for place in sorted({0, 9, 10, 31, 32, 63, 64, size - 1} & set(range(size))):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (folder / "a").write_bytes(changed)
        assert manifest.look(folder) == ""  # reads no content
        assert manifest.verify(folder) == "a was changed after it was saved: its checksum is wrong"


def resign(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Forges a manifest with a valid checksum."""
    path = folder / manifest.NAME
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    path.write_text(json.dumps(content | {"sha256": manifest.checksum(content)}))


def test_a_changed_manifest_is_detected(folder: Path, tmp_path: Path) -> None:
    path = folder / manifest.NAME
    text = path.read_text()

    def verdict(changed: str | bytes) -> str:
        path.write_bytes(changed.encode() if isinstance(changed, str) else changed)
        looked = manifest.look(folder)
        assert looked == manifest.verify(folder)
        return looked

    mismatch = "manifest.json is damaged: its content does not match its own checksum"
    assert verdict(text.replace("1000", "1001")) == mismatch
    assert verdict(text.replace('"step": 12', '"step": 13')) == mismatch
    assert verdict(text.replace('"empty"', '"empti"')) == mismatch
    assert verdict("{}") == mismatch
    assert verdict("[]") == verdict("null") == "manifest.json is damaged: it is not a JSON object"
    for end in (0, 1, len(text) // 2, len(text) - 3):
        assert verdict(text[:end]) == "manifest.json is damaged: it is not JSON"
    assert verdict(b"\xff\xfe" + text.encode()) == "manifest.json is damaged: it is not JSON"
    other = make(tmp_path / "13", 13, seed=1)
    assert (
        verdict((other / manifest.NAME).read_text())
        == "manifest.json is for step 13, but the folder is for step 12"
    )


def test_a_forged_manifest_with_a_valid_checksum_is_detected(folder: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", 12, seed=1)  # of the same step of another run
    shutil.copy(other / manifest.NAME, folder)
    assert "checksum is wrong" in manifest.verify(folder)
    resign(folder, lambda content: content.update(step=13))
    assert manifest.look(folder) == "manifest.json is for step 13, but the folder is for step 12"


def test_a_copy_under_another_name_is_intact(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "mine")
    assert manifest.verify(tmp_path / "mine") == ""


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "a").rename(folder / "aside")
    assert manifest.look(folder) == manifest.verify(folder) == "a is missing"
    (folder / "a").mkdir()
    assert manifest.verify(folder) == "a is missing"
    (folder / "a").rmdir()
    (folder / "aside").rename(folder / "a")
    (folder / manifest.NAME).unlink()
    assert "manifest.json is missing" in manifest.verify(folder)
    assert "manifest.json is missing" in manifest.verify(folder / "nowhere")


@pytest.mark.parametrize("number", [5, errno.ESTALE, errno.EACCES, errno.EMFILE, 110])
@pytest.mark.parametrize("victim", ["a", manifest.NAME])
@pytest.mark.parametrize("method", ["open", "stat"])
def test_a_temporary_read_error_is_not_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, victim: str, method: str
) -> None:
    owner = os if (method, victim) == ("open", manifest.NAME) else Path
    real = getattr(owner, method)

    def refuse(path: Path, *arguments: object, **more: object) -> object:
        if path == folder / victim:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(owner, method, refuse)
    if (method, victim) == ("stat", manifest.NAME):
        assert manifest.verify(folder) == ""  # it is only read
        return
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        manifest.verify(folder)
    assert caught.value.filename == str(folder / victim)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": []}, "its format is not a number"),
        ({"format": {"a": 1}}, "its format is not a number"),
        ({"format": "1"}, "its format is not a number"),
        ({"format": True}, "its format is not a number"),
        ({"format": None}, "its format is not a number"),
        ({"step": "12"}, "its step, time, or list of files is missing"),
        ({"step": -1}, "its step, time, or list of files is missing"),
        ({"step": 10**400}, "its step, time, or list of files is missing"),
        ({"saved": 7}, "its step, time, or list of files is missing"),
        ({"files": ["a"]}, "its step, time, or list of files is missing"),
        ({"files": None}, "its step, time, or list of files is missing"),
        ({"files": {"a": []}}, "its entry for 'a' is not a size with checksums"),
        ({"files": {"a": {"bytes": 1}}}, "its entry for 'a' is not a size with checksums"),
        ({"files": {"a": {"bytes": -1, "sha256": []}}}, "its entry for 'a' is not a size"),
        ({"files": {"a": {"bytes": 1.0, "sha256": ["x"]}}}, "its entry for 'a' is not a size"),
        ({"files": {"a": {"bytes": 1, "sha256": [1]}}}, "its entry for 'a' is not a size"),
        ({"files": {"a": {"bytes": 2**60, "sha256": ["x"]}}}, "its entry for 'a' is not a size"),
        *(
            ({"files": {name: {"bytes": 0, "sha256": []}}}, "which is outside this folder")
            for name in (
                "../a",
                "/etc/hostname",
                "deep/../../a",
                "",
                ".",
                "a\0b",
                "deep//a",
                "a/",
                "a\\b",
                "\x1b[31m",
            )
        ),
    ],
    ids=str,
)
def test_an_invalid_manifest_is_damage(folder: Path, change: dict[str, object], why: str) -> None:
    resign(folder, lambda content: content.update(change))
    assert why in manifest.verify(folder)
    assert why in manifest.look(folder)


@pytest.mark.parametrize("name", ["format", "step", "saved", "files"])
def test_a_manifest_with_a_missing_entry_is_damage(folder: Path, name: str) -> None:
    resign(folder, lambda content: content.pop(name))
    assert manifest.verify(folder).startswith("manifest.json is damaged: its ")


def test_huge_sizes_allocate_nothing(folder: Path) -> None:
    (folder / "a").write_bytes(b"")
    huge = {"a": {"bytes": 2**40, "sha256": ["x"] * 2**14}}
    resign(folder, lambda content: content.update(files=huge))
    assert manifest.verify(folder) == f"a has 0 bytes, but {2**40} were saved"


def test_a_deeply_nested_manifest_or_a_folder_in_its_place_is_damage(folder: Path) -> None:
    path = folder / manifest.NAME
    path.write_text("[" * 10**6)
    assert manifest.verify(folder) == "manifest.json is damaged: its JSON is nested too deeply"
    path.unlink()
    os.mkfifo(path)
    assert manifest.verify(folder) == "manifest.json is damaged: it is not a regular file"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert manifest.verify(folder) == "manifest.json is damaged: it is not a regular file"


def test_links_and_pipes_in_a_checkpoint_are_rejected_but_not_damage(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert manifest.verify(tmp_path / "link") == ""  # the folder itself may be a link

    def refused(words: str) -> None:
        with pytest.raises(InputError, match=rf"{words}: copy the checkpoint without links \(cp"):
            manifest.verify(folder)

    (folder / "a").rename(tmp_path / "a")
    (folder / "a").symlink_to(tmp_path / "a")
    assert manifest.look(folder) == "a is a link"
    refused("a is a link")
    (folder / "a").unlink()
    os.mkfifo(folder / "a")
    assert manifest.look(folder) == "a is a pipe or a device"
    refused("a is a pipe or a device")
    (folder / "a").unlink()
    (tmp_path / "a").rename(folder / "a")
    (folder / "deep").rename(tmp_path / "deep")
    (folder / "deep").symlink_to(tmp_path / "deep")
    refused("deep is a link")
    (folder / "deep").unlink()
    (tmp_path / "deep").rename(folder / "deep")
    os.mkfifo(folder / "deep" / "unlisted")  # Orbax would open it
    assert manifest.look(folder) == ""
    refused("deep/unlisted is a pipe or a device")


def test_the_format_of_another_version_is_not_damage(folder: Path) -> None:
    resign(folder, lambda content: content.update(format=2))
    with pytest.raises(InputError, match=r"has format 2, but this version reads format 1: use the"):
        manifest.verify(folder)
    assert manifest.look(folder) == "manifest.json has format 2, but this version reads format 1"


def test_a_failed_write_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / manifest.NAME).unlink()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(os.listdir(folder))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        manifest.write(folder, 12)
    assert sorted(os.listdir(folder)) == before
