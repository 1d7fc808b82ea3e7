"""Mutations of specific formats, whose checksums and lengths stay valid most of the time."""

import io
import json
import os
import pickle
import random
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz import mutate

# Names that an untrusted folder may contain, as bytes because not all are UTF-8.
STRANGE_NAMES = (
    *(b"a\x1b[2J\x1b]0;t\x07b", "\u202egpj.exe".encode(), b"a\xff\xfeb"),
    *(b"-rf", b"--help", b"12:30", b" ", b"a\nb", b"a\rb", b"%s%n"),
    *(b"file:x", b"concat:x", b"x" * 200, "\u00e9".encode() * 60),
    *(b"$(id)", b"<b>", b"*", b"a'\"b", b"[ab]", b"{1..3}", b"~"),
    "\x9b31m".encode(),
)


_RUN = {"args": ["sh", "-c", "touch ran"], "timeout": 5}
# A file must never choose a function to call, neither at the top nor as a field of a model.
_CALLS: tuple[dict[str, Any], ...] = (
    {"class": "subprocess.run", **_RUN},
    {
        "class": "jaxtrain.models.gpt.Config",
        "muon": {"class": "subprocess.run", **_RUN},
    },
    {"class": "gpt", "depth": {"class": "jaxtrain.config.named", "name": "in/a.py"}},
    {"class": "jaxtrain.config.named", "name_or_path": "in/a.py"},
    {"class": "jaxtrain.storage.cache.root", "cache_dir": "made"},
    {"class": "os.system", "command": "touch ran"},
)


def safetensors(rng: random.Random, data: bytes) -> bytes:
    """Changes the JSON of the header; its length stays valid most of the time."""
    if rng.random() < 0.35 or len(data) < 8:
        return mutate.raw_bytes(rng, data)
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.05:  # a header that names a function to call
        call = rng.choice(_CALLS)
        about = {"jaxtrain_model": json.dumps(call), "format": "pt"}
        header = json.dumps(json.loads(header) | {"__metadata__": about}).encode()
    elif rng.random() < 0.5 and b"jaxtrain_model" in header:
        header = _changed_member(rng, header, "__metadata__")
    else:
        header = mutate.json_text(rng, header)
    length = len(header)
    if rng.random() < 0.08:
        length = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**62, 2**64 - 1))
    return struct.pack("<Q", length) + header + (b"" if rng.random() < 0.05 else rest)


def _changed_member(rng: random.Random, data: bytes, name: str) -> bytes:
    value = json.loads(data)
    found = mutate.json_text(rng, json.dumps(value.pop(name)).encode())
    rest = json.dumps(value)[1:-1].encode()
    return b'{"%s": %s, %s}' % (name.encode(), found, rest)


class _Touches:
    """Calls a function when unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = (call, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


def pth(rng: random.Random, data: bytes) -> bytes:
    """Changes the bytes or the pickle of a PyTorch file, or replaces its contents."""
    kind = mutate.weighted(rng, ((4, "bytes"), (3, "pickle"), (1, "call"), (3, "other")))
    if kind == "bytes":
        return mutate.raw_bytes(rng, data)
    if kind == "call":
        touch = rng.choice(
            (_Touches(os.system, "touch ran"), _Touches(eval, "1+1"), _Touches(open, "ran", "w"))
        )
        stored = pickle.dumps({"w": touch}, protocol=rng.choice((0, 2, 4)))
        return stored if rng.random() < 0.5 else _with_pickle(data, stored)
    if kind == "pickle":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            return _with_pickle(data, mutate.raw_bytes(rng, archive.read(name)))
    return _other_tensors(rng)


def _with_pickle(data: bytes, stored: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(target, "w") as made:
        for info in archive.infolist():
            made.writestr(
                info, stored if info.filename.endswith("data.pkl") else archive.read(info)
            )
    return target.getvalue()


def _other_tensors(rng: random.Random) -> bytes:
    import torch

    warnings.simplefilter("ignore")  # sparse tensors are in beta
    tensor = torch.arange(12.0).reshape(3, 4)
    makers: tuple[Callable[[], Any], ...] = (
        lambda: tensor.to_sparse(),
        lambda: tensor.to_sparse_csr(),
        lambda: torch.empty(3, 4, device="meta"),
        lambda: torch.quantize_per_tensor(tensor, 0.1, 3, torch.qint8),
        lambda: tensor.to(torch.complex64),
        lambda: tensor.to(
            rng.choice((torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int8))
        ),
        lambda: torch.zeros(1).as_strided((rng.choice((10, 10**6, 10**12)), 3), (0, 0)),
        lambda: tensor.t().conj(),
        lambda: torch.nn.Parameter(tensor),
        lambda: torch.tensor([]),
        lambda: torch.tensor(float("nan")),
        lambda: {"deep": {"deeper": tensor}},
        lambda: [tensor, tensor],
        lambda: rng.choice((None, 3, "text", b"bytes", (), {}, [], 1e300)),
        lambda: {"state_dict": {"encoder.0.weight": tensor}, "epoch": 3},
    )
    name = rng.choice(("encoder.0.weight", "decoder.1.bias", "", "a\x1b[2J", "x" * 5000, "../x"))
    content: Any = rng.choice(makers)()
    if rng.random() < 0.7:
        content = {rng.choice((name, name, 3, None, (1, 2))): content}
    target = io.BytesIO()
    torch.save(content, target)
    return target.getvalue()


_FIELDS = (
    *((0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (124, 12)),
    *((136, 12), (148, 8), (156, 1), (156, 1), (157, 100), (257, 6)),
    *((263, 2), (265, 32), (297, 32), (329, 8), (337, 8), (345, 155)),
)
_BLOCK = 512


def tar(rng: random.Random, data: bytes) -> bytes:
    """Changes fields of a header, with a valid checksum most of the time, or adds odd members."""
    kind = rng.random()
    if kind < 0.2:
        return mutate.raw_bytes(rng, data)
    if kind < 0.45:
        return _odd_members(rng) + (data if rng.random() < 0.7 else b"")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        places = [one.offset for one in archive.getmembers()]
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.choice(places)
        offset, size = rng.choice(_FIELDS)
        content[at + offset : at + offset + size] = _field(rng, size)
        if rng.random() < 0.85:
            _sign(content, at)
    return bytes(content)


def _field(rng: random.Random, size: int) -> bytes:
    octal = b"%0*o" % (
        size - 1,
        rng.choice((0, 1, 511, 512, 513, 2**20, 8 ** (size - 1) - 1)) % 8**size,
    )
    value = rng.choice(
        (
            octal[:size],
            octal[:size],
            b"\x80" + rng.randbytes(size - 1),
            b"\x80"
            + struct.pack(">Q", rng.choice((2**31, 2**50, 2**62, 2**63)))[-size + 1 :].rjust(
                size - 1, b"\0"
            ),
            b"\xff" * size,
            b"\0" * size,
            b"-1",
            bytes([rng.choice(b"01234567gxLKSMVDNA\0")]),
            rng.choice(
                (b"../../etc/x.mp4", b"/etc/x.mp4", b"\x1b[2J.mp4", b"\xff\xfe.mp4", b"a\nb.mp4")
            ),
            rng.randbytes(size),
        )
    )
    return value[:size].ljust(size, b"\0")


def _sign(content: bytearray, at: int) -> None:
    content[at + 148 : at + 156] = b" " * 8
    content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + _BLOCK])


def _odd_members(rng: random.Random) -> bytes:
    target = io.BytesIO()
    form = rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        names = (
            *("a.mp4", "../../x.mp4", "/etc/x.mp4", "a/" * 2000 + "x.mp4"),
            *("\x1b[2J.mp4", "a\nb.mp4"),
        )
        info = tarfile.TarInfo(rng.choice(names))
        content = rng.choice((b"", b"no video" * 100, rng.randbytes(3000)))
        info.size = len(content)
        info.type = rng.choice(
            (b"0", b"0", b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"V")
        )
        info.linkname = rng.choice(("", "a.mp4", "/etc/passwd", "../../etc/passwd"))
        key = rng.choice(
            (
                *("size", "path", "GNU.sparse.major", "GNU.sparse.map"),
                *("GNU.sparse.size", "mtime", "hdrcharset", "linkpath", "x"),
            )
        )
        value = rng.choice(
            ("", "1", "-1", "0,1", "1,2,3", "x", "9" * 30, "1e999", "BINARY", "a" * 70_000)
        )
        if form == tarfile.PAX_FORMAT and rng.random() < 0.7:
            info.pax_headers = {key: value}
            if key.startswith("GNU"):
                info.pax_headers |= {
                    "GNU.sparse.minor": rng.choice(("0", "1")),
                    "GNU.sparse.name": "a",
                }
        archive.addfile(info, io.BytesIO(content))
    content = bytearray(target.getvalue()[: -2 * _BLOCK].rstrip(b"\0"))
    return bytes(content.ljust(-(-len(content) // _BLOCK) * _BLOCK, b"\0"))


def parquet(rng: random.Random, data: bytes) -> bytes:
    """Changes bytes, more often those of the footer, or writes a table of other types."""
    if rng.random() < 0.65:
        if rng.random() < 0.5:
            return mutate.raw_bytes(rng, data)
        (size,) = struct.unpack("<I", data[-8:-4])
        footer = mutate.raw_bytes(rng, data[-8 - size : -8])
        return data[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1"
    import pyarrow as pa
    from pyarrow import parquet as files

    text = rng.choice(("word " * 50, "", "\x1b[2J", "\0" * 99, "é" * 99))
    columns: tuple[Callable[[], Any], ...] = (
        lambda: pa.array([text] * 20),
        lambda: pa.array([text, None] * 10),
        lambda: pa.array([text.encode(), b"\xff\xfe"] * 10),
        lambda: pa.array([1, None] * 10),
        lambda: pa.array([[text], []] * 10),
        lambda: pa.array([{"text": text}] * 20),
        lambda: pa.array([text] * 20).dictionary_encode(),
        lambda: pa.array([None] * 20),
        lambda: pa.array([text] * 20, pa.large_string()),
        lambda: pa.array([], pa.string()),
        lambda: pa.DictionaryArray.from_arrays(
            pa.array([0] * rng.choice((100, 2000))), pa.array(["a b " * rng.choice((1000, 2**20))])
        ),
        lambda: pa.array([True, None] * 10),
    )
    names = ("text", "text", "text", "content", "", "a\x1b[2J", "TEXT", "x" * 5000)
    fields = [(rng.choice(names), rng.choice(columns)()) for _ in range(rng.choice((1, 1, 2, 3)))]
    shortest = min(len(column) for _, column in fields)
    table = pa.Table.from_arrays([c[:shortest] for _, c in fields], names=[n for n, _ in fields])
    target = io.BytesIO()
    files.write_table(table, target)
    return target.getvalue()


def by_name(rng: random.Random, path: Path, data: bytes, other: bytes = b"") -> bytes:
    """Changes a file with the mutation for its name."""
    known: dict[str, mutate.Mutation] = {
        ".safetensors": safetensors,
        ".json": mutate.json_text,
        ".jsonl": mutate.json_lines,
        ".tar": tar,
        ".parquet": parquet,
        ".pth": pth,
    }
    is_json = path.suffix not in known and data[:1] in (b"{", b"[")
    mutation = mutate.json_text if is_json else known.get(path.suffix)
    if mutation is None or rng.random() < 0.2:
        return mutate.raw_bytes(rng, data, other)
    return mutation(rng, data)


def folder(rng: random.Random, top: Path, only: Callable[[Path], bool] = lambda path: True) -> None:
    """Changes, removes, replaces or renames files of a folder."""
    found = sorted(path for path in top.rglob("*") if path.is_file() and only(path))
    contents = {path: path.read_bytes() for path in found}
    for _ in range(rng.choice((1, 1, 1, 2))):
        path = rng.choice(found)
        kind = mutate.weighted(
            rng, ((16, "change"), (2, "remove"), (3, "replace"), (1, "rename"), (1, "add"))
        )
        if not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        other = contents[rng.choice(found)]
        if kind == "change":
            path.write_bytes(by_name(rng, path, data, other))
        elif kind == "rename":
            name = rng.choice(STRANGE_NAMES)
            os.rename(path, os.path.join(os.fsencode(path.parent), name))
        elif kind == "add":
            name = rng.choice(
                (*STRANGE_NAMES, b"4", b"config.json", b"model.safetensors.index.json")
            )
            with open(os.path.join(os.fsencode(path.parent), name), "wb") as file:
                file.write(data)
        else:
            path.unlink()
            if kind == "replace":
                _put_something_else(rng, path)


def _put_something_else(rng: random.Random, path: Path) -> None:
    kind = rng.choice(("link", "link", "pipe", "folder", "empty"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    else:
        target = rng.choice(
            ("/etc/passwd", "/dev/zero", "/dev/full", path.name, "/nowhere", "..", "/proc/self/mem")
        )
        path.symlink_to(target)
