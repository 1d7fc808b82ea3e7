"""Checks a PyTorch file before PyTorch reads it.

``torch.load(weights_only=True)`` runs nothing that a file holds, and still a file of a kilobyte can
take any amount of memory or time: ``bytearray(2**40)`` is allowed, so is ``_codecs.encode`` of its
own result, and a tuple of a tuple of itself is hashed for ever as a key. Here the pickles inside
are walked first, and nothing but arrays in plain containers is let through.
"""

import io
import pickletools
import re
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

LARGEST_PICKLE = 2**21
"""Bytes of all pickles of a file. An array takes about 130 of them, so this is 16,000 arrays; and
what an opcode of one byte makes takes up to 72 bytes of memory."""
_DEEPEST = 100  # containers within containers; a hash recurses without a limit
_PROTOCOL = 2  # all that torch.save writes, and all that weights_only reads
_LEGACY_PICKLES = 5  # magic number, protocol version, system, content, keys of storages

_ORDERED = "collections OrderedDict"
_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
_CALLED = {f"torch._utils {name}" for name in _REBUILD}
_CALLED |= {_ORDERED, "torch device"}
_NAMED = re.compile(
    r"torch(\.cuda)? [A-Z][A-Za-z0-9]*Storage|torch\.storage UntypedStorage"
    r"|torch (u?int|b?float|float8_e|complex)[a-z0-9_]+|torch bool"
)

_ZIP = b"PK\x03\x04"
_END, _END_64, _LOCATOR_64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_END_BYTES, _END_64_BYTES, _LOCATOR_64_BYTES = 22, 56, 20
_PICKLE = "data.pkl"


def check(path: Path) -> None:
    """Refuses what is not a file of arrays, or would grow as it is read.

    Raises:
        ValueError: says what is wrong. Other exceptions come of damaged files.
    """
    with open(path, "rb") as file:
        packed = file.read(len(_ZIP)) == _ZIP
        file.seek(0)
        if packed:  # PyTorch decides by the same bytes
            _check_zip(file, path.stat().st_size)
            return
        _check_no_tar(file)
        head = io.BytesIO(file.read(LARGEST_PICKLE))
        try:
            for _ in range(_LEGACY_PICKLES):
                _check_pickle(head)
        except ValueError as error:
            if head.tell() < LARGEST_PICKLE:
                raise
            raise ValueError(
                f"its pickles have more than {LARGEST_PICKLE:,} bytes: save the state dict alone"
            ) from error


def _check_no_tar(file: BinaryIO) -> None:
    """Refuses PyTorch's format of before 2017; PyTorch reads a tar's header, of any size, first."""
    header = file.read(tarfile.BLOCKSIZE)
    file.seek(0)
    try:
        tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")
    except tarfile.TarError:
        return
    raise ValueError("it is a tar, which PyTorch wrote before 2017: save it again")


def _check_zip(file: BinaryIO, size: int) -> None:
    """Refuses an archive that PyTorch may see differently, or that grows: it compresses nothing."""
    _check_end(file, size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("its entries are compressed, which PyTorch never does")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("its entries are larger than the file")
        names = [entry.filename.casefold() for entry in entries]  # PyTorch takes A.pkl for a.pkl
        if len(set(names)) < len(names):
            raise ValueError("two of its entries have one name")
        pickles = [one for one in entries if one.filename.casefold().endswith(_PICKLE)]
        if len(pickles) != 1:
            raise ValueError(f"{len(pickles)} of its entries are a {_PICKLE}; there must be one")
        if pickles[0].file_size > LARGEST_PICKLE:
            raise ValueError(
                f"its {_PICKLE} has {pickles[0].file_size:,} bytes, and the limit is "
                f"{LARGEST_PICKLE:,}: save the state dict alone"
            )
        _check_pickle(io.BytesIO(archive.read(pickles[0])))


def _check_end(file: BinaryIO, size: int) -> None:
    """Refuses an archive whose directory two readers may look for in two places.

    It ends the file, but for its own records: that is how zipfile and PyTorch write it.
    """
    tail_bytes = min(size, _END_64_BYTES + _LOCATOR_64_BYTES + _END_BYTES)
    file.seek(size - tail_bytes)
    tail = file.read(tail_bytes)
    end = tail[-_END_BYTES:]
    at = size - _END_BYTES  # where the directory must end
    if len(end) < _END_BYTES or end[:4] != _END or end[-2:] != b"\0\0":
        raise ValueError("it is cut short, or something follows its directory: copy it again")
    directory, offset = struct.unpack("<II", end[12:20])
    locator = tail[-_END_BYTES - _LOCATOR_64_BYTES : -_END_BYTES]
    if locator[:4] == _LOCATOR_64:
        at = size - tail_bytes
        (place,) = struct.unpack("<Q", locator[8:16])
        if place != at or tail[:4] != _END_64 or len(tail) != tail_bytes:
            raise ValueError("its directory is damaged: copy it again")
        directory, offset = struct.unpack("<QQ", tail[40:56])
    if offset + directory != at:
        raise ValueError("its directory is damaged: copy it again")


class _Value(NamedTuple):
    """What stands on the stack of a pickle.

    Attributes:
        what: the name of what is called, a kind of container, "mark", or "" for what takes bounded
            memory however often it is referred to.
        depth: of containers.
    """

    what: str
    depth: int


_MARK, _SMALL, _EMPTY_TUPLE = _Value("mark", 0), _Value("", 0), _Value("()", 0)
_FLAT = _Value("flat", 1)  # a tuple of up to three small ones, such as the betas of an optimizer
_GETS, _PUTS = ("GET", "BINGET", "LONG_BINGET"), ("PUT", "BINPUT", "LONG_BINPUT")
_TUPLES = ("TUPLE1", "TUPLE2", "TUPLE3")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")
_NEVER = ("INST", "OBJ", "NEWOBJ", "DUP", "EXT1", "EXT2", "EXT4")


def _check_pickle(file: BinaryIO) -> None:
    """Walks the pickle at the file's place, as far as its end, without making anything of it.

    No container is referred to twice, so what is in them is a tree, no larger than the pickle; and
    what a function is called with is not an array, whose rows it might unpack.
    """
    stack: list[_Value] = []
    memo: dict[object, _Value] = {}
    try:
        for opcode, argument, _ in pickletools.genops(file):
            _follow(opcode, argument, stack, memo)
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError("its pickle is damaged") from error


def _follow(
    opcode: pickletools.OpcodeInfo,
    argument: object,
    stack: list[_Value],
    memo: dict[object, _Value],
) -> None:
    if opcode.proto > _PROTOCOL or opcode.name in _NEVER:
        raise ValueError(f"its pickle has the opcode {opcode.name}, which torch.save never writes")
    if opcode.name == "MARK":
        stack.append(_MARK)
    elif opcode.name in _PUTS:
        memo[argument] = stack[-1]
    elif opcode.name in _GETS:
        found = memo[argument]
        if found.what not in (*_CALLED, "", "flat", "()"):
            raise ValueError("it refers to a list or dict twice: save the state dict alone")
        stack.append(found)
    elif opcode.name == "GLOBAL":
        stack.append(_named(str(argument)))
    else:
        taken = list(_popped(stack, opcode))
        if opcode.stack_after:
            stack.append(_made(opcode.name, taken))
            if stack[-1].depth > _DEEPEST:
                raise ValueError(f"its containers are more than {_DEEPEST} levels deep")


def _named(name: str) -> _Value:
    if name in _CALLED:
        return _Value(name, 0)
    if not _NAMED.fullmatch(name):
        shown = name.replace(" ", ".")[:100]
        raise ValueError(
            f"it holds {shown!a}, which is not a dense array: save a dict of arrays of float32, "
            "bfloat16 or float16"
        )
    return _SMALL


def _popped(stack: list[_Value], opcode: pickletools.OpcodeInfo) -> Iterator[_Value]:
    """What the opcode takes from the stack, topmost first."""
    wanted = opcode.stack_before
    if pickletools.markobject in wanted:
        while (one := stack.pop()) is not _MARK:
            yield one
        wanted = wanted[: wanted.index(pickletools.markobject)]
    for _ in wanted:
        yield stack.pop()


def _made(name: str, taken: list[_Value]) -> _Value:
    """What an opcode puts on the stack."""
    depth = 1 + max((one.depth for one in taken), default=0)
    kinds = {one.what for one in taken}
    if name in _FILLS:
        return _filled(name, taken[-1], {one.what for one in taken[:-1]}, depth)
    if name == "REDUCE":
        return _called(taken[1].what, taken[0].what, depth)
    if name in ("EMPTY_DICT", "DICT", "LIST") or (name == "TUPLE" and taken):
        return _Value("container", depth)
    if name == "EMPTY_LIST":
        return _Value("empty list", depth)
    if name in ("EMPTY_TUPLE", "TUPLE"):
        return _EMPTY_TUPLE
    if name == "TUPLE1" and kinds <= {"list of lists", "empty list"}:
        return _Value("list as argument", depth)
    if name in _TUPLES:
        return _FLAT if kinds == {""} else _Value("container", depth)
    return _SMALL  # a number, a text, or a storage


def _filled(name: str, filled: _Value, kinds: set[str], depth: int) -> _Value:
    """A container with more in it."""
    what = filled.what
    if name == "BUILD" and what != "ordered":
        raise ValueError("it sets the attributes of something that has none")
    if name in ("APPEND", "APPENDS"):
        lists = kinds <= {"list", "list of lists", "empty list"}
        keeps = lists and what in ("empty list", "list of lists")
        what = "list of lists" if keeps else "list"
    return _Value(what, max(filled.depth, depth))


def _called(function: str, arguments: str, depth: int) -> _Value:
    """What a function makes.

    Python 2 made an OrderedDict of a list of lists, Python 3 makes it of nothing.
    """
    if function not in _CALLED:
        raise ValueError("it calls what is not a function")
    if function != _ORDERED:
        return _SMALL
    if arguments not in ("()", "list as argument"):
        raise ValueError("it makes a dict of something that is not a list of pairs")
    return _Value("ordered", depth)
