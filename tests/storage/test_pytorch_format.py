"""Tests checking PyTorch's files, without PyTorch."""

import io
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from jaxtrain.storage import pytorch_format

ORDERED = b"ccollections\nOrderedDict\n"
# Written by torch.save({"w": torch.zeros(3)}).
ARRAY = (
    b"ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storageq\x03ctorch\nFloatStorage\n"
    b"q\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x03tq\x07QK\x00K\x03\x85q\x08K\x01"
    b"\x85q\t\x89ccollections\nOrderedDict\nq\n)Rq\x0btq\x0cRq\r"
)
PLAIN = b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01" + ARRAY + b"s."
LEGACY = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\x00."
    + PLAIN
    + b"\x80\x02]q\x00X\x01\x00\x00\x000q\x01a."
    + struct.pack("<Q3f", 3, 0, 0, 0)
)


def text(content: str) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content.encode()


def archive(path: Path, stored: bytes, **more: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, content in {"a/data.pkl": stored, "a/data/0": bytes(12), **more}.items():
            made.writestr(name, content)
    return path


PYTHON_2 = b"\x80\x02" + ORDERED + b"](](" + text("w") + ARRAY + b"ee\x85R."
GOOD = {
    "an array": PLAIN,
    "a dict by Python 2": PYTHON_2,
    "attributes of a dict": b"\x80\x02" + ORDERED + b")R}" + text("_metadata") + b"}sb.",
    "betas that two groups share": b"\x80\x02](G" + bytes(8) + b"K\x01\x86q\x01h\x01h\x01e.",
    "a storage of cuda": b"\x80\x02ctorch.cuda\nHalfStorage\n.",
    "a type": b"\x80\x02ctorch\nbfloat16\n.",
    "a device": b"\x80\x02ctorch\ndevice\n" + text("cpu") + b"\x85R.",
}
BOMBS = {
    "memory by number": (
        b"cbuiltins\nbytearray\n\x8a\x08" + b"\0" * 5 + b"\1\0\0\x85R",
        "bytearray",
    ),
    "by its name of Python 2": (b"c__builtin__\nbytearray\nK\x03\x85R", "__builtin__.bytearray"),
    "bytes that double": (
        b"c_codecs\nencode\nK\x03\x85R",
        "'_codecs.encode', which is not a dense",
    ),
    "a program": (b"cos\nsystem\n" + text("touch ran") + b"\x85R", "'os.system'"),
    "a function of torch": (b"ctorch\nzeros\nK\x03\x85R", "torch.zeros"),
    "a storage that is made": (b"ctorch.storage\nUntypedStorage\nK\x03\x85R", "allowed function"),
    "a size that is copied": (b"ctorch\nSize\n)\x85R", "torch.Size"),
    "a dict of an array's rows": (ORDERED + ARRAY + b"\x85R", "other than a list of pairs"),
    "a dict of arrays": (ORDERED + b"](" + ARRAY + b"e\x85R", "other than a list of pairs"),
    "a dict that is copied": (
        ORDERED + b"q\1](](" + text("w") + b"K\1eeq\2\x85Rh\1h\2\x85R",
        "references a list or dict twice",
    ),
    "a key that doubles": (b"K\1K\1\x86" + b"q\1h\1\x86" * 60, "references a list or dict twice"),
    "a list of itself": (b"]q\0h\0a", "references a list or dict twice"),
    "a deep key": (b"K\1" + b"\x85" * 101, "more than 100 levels deep"),
    "a deep list": (b"]" * 102 + b"a" * 101, "more than 100 levels deep"),
    "attributes of an array": (ARRAY + b"}b", "attributes of something that has none"),
    "an object": (b"ctorch\nFloatStorage\n)\x81", "opcode NEWOBJ, which torch.save never writes"),
    "a later protocol": (b"\x8f", "opcode EMPTY_SET"),
    "a stack of nothing": (b"R", "its pickle is damaged"),
    "a name of bytes": (b"c\xff\nx\n", "its pickle is damaged"),
    "a memo of nothing": (b"h\x09", "its pickle is damaged"),
}


@pytest.mark.parametrize("name", GOOD)
def test_files_saved_by_pytorch_are_accepted(name: str, tmp_path: Path) -> None:
    pytorch_format.check(archive(tmp_path / "x.pth", GOOD[name]))


def test_the_older_format_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(LEGACY)
    pytorch_format.check(tmp_path / "x.pth")


@pytest.mark.parametrize("name", BOMBS)
def test_pickles_that_could_expand_are_rejected(name: str, tmp_path: Path) -> None:
    inside, said = BOMBS[name]
    path = archive(tmp_path / "x.pth", b"\x80\x02" + inside + b".")
    with pytest.raises(ValueError, match=said):
        pytorch_format.check(path)
    path.write_bytes(LEGACY.replace(PLAIN, b"\x80\x02" + inside + b"."))
    with pytest.raises(ValueError, match=said):
        pytorch_format.check(path)


def test_the_size_of_pickles_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_format, "LARGEST_PICKLE", 1000)
    large = b"\x80\x02](" + b"}" * 2000 + b"e."
    with pytest.raises(
        ValueError, match=r"data\.pkl has 2,006 bytes, and the limit is 1,000: save"
    ):
        pytorch_format.check(archive(tmp_path / "x.pth", large))
    (tmp_path / "x.pth").write_bytes(LEGACY.replace(PLAIN, large))
    with pytest.raises(ValueError, match="pickles have more than 1,000 bytes: save"):
        pytorch_format.check(tmp_path / "x.pth")


def test_ambiguous_archives_are_rejected(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pth", PLAIN)
    plain = path.read_bytes()
    for changed, said in (
        (plain + b"\0", "has data after its directory"),
        (plain[:-3], "truncated"),
        (plain[:-6] + b"\1\0\0\0\0\0", "its directory is damaged"),
        (b"PK\x03\x04", "truncated"),
        (b"PK\x03\x04" + LEGACY, "truncated"),
    ):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=said):
            pytorch_format.check(path)
    # Ends like an archive, but PyTorch reads it as a pickle, so it is checked as one.
    path.write_bytes(LEGACY.replace(PLAIN, b"\x80\x02cos\nsystem\n.") + plain)
    with pytest.raises(ValueError, match=r"os\.system"):
        pytorch_format.check(path)
    for more, said in (
        ({"a/DATA.PKL": PLAIN}, "two of its entries have the same name"),
        ({"b/data.pkl": PLAIN}, r"it has 2 entries named data\.pkl"),
    ):
        with pytest.raises(ValueError, match=said):
            pytorch_format.check(archive(path, PLAIN, **more))


def test_a_tar_is_rejected_before_its_header_is_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("storages")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**30
    with (tmp_path / "x.pth").open("wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(2**31)
    with pytest.raises(ValueError, match="tar format from before 2017: save it again"):
        pytorch_format.check(tmp_path / "x.pth")


def test_a_compressed_archive_is_rejected(tmp_path: Path) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a/data.pkl", PLAIN)
    (tmp_path / "x.pth").write_bytes(target.getvalue())
    with pytest.raises(ValueError, match="compressed, which PyTorch never does"):
        pytorch_format.check(tmp_path / "x.pth")
