"""Checks a PyTorch file before PyTorch reads it.

``torch.load(weights_only=True)`` runs no code from a file, but a file of a kilobyte can still take
any amount of memory or time: ``bytearray(2**40)`` is allowed, so is ``_codecs.encode`` of its own
result, and hashing a tuple of a tuple of itself never ends. So this module walks the pickles first,
and accepts only arrays in plain containers.
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
"""Maximum bytes of all pickles in a file. An array takes about 130, so this allows 16,000 arrays.
An opcode of one byte creates up to 72 bytes in memory."""
_DEEPEST = 100  # nested containers; hashing recurses without a limit
_PROTOCOL = 2  # the one that torch.save writes and weights_only reads
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
    """Rejects files that contain anything but arrays, or that expand when read.

    Raises:
        ValueError: the file is rejected; the message gives the reason. Damaged files may raise
            other exceptions.
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
    """Rejects PyTorch's format from before 2017, as a tar header may have any size."""
    header = file.read(tarfile.BLOCKSIZE)
    file.seek(0)
    try:
        tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")
    except tarfile.TarError:
        return
    raise ValueError("it is in the tar format from before 2017: save it again with a newer PyTorch")


def _check_zip(file: BinaryIO, size: int) -> None:
    """Rejects archives that PyTorch may parse differently, and compressed entries."""
    _check_end(file, size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("its entries are compressed, which PyTorch never does")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("its entries are larger than the file")
        names = [entry.filename.casefold() for entry in entries]  # PyTorch takes A.pkl for a.pkl
        if len(set(names)) < len(names):
            raise ValueError("two of its entries have the same name")
        pickles = [one for one in entries if one.filename.casefold().endswith(_PICKLE)]
        if len(pickles) != 1:
            raise ValueError(f"it has {len(pickles)} entries named {_PICKLE}; there must be one")
        if pickles[0].file_size > LARGEST_PICKLE:
            raise ValueError(
                f"its {_PICKLE} has {pickles[0].file_size:,} bytes, and the limit is "
                f"{LARGEST_PICKLE:,}: save the state dict alone"
            )
        _check_pickle(io.BytesIO(archive.read(pickles[0])))


def _check_end(file: BinaryIO, size: int) -> None:
    """Rejects archives whose directory different readers may find in different places.

    The directory must be at the end of the file, where zipfile and PyTorch write it.
    """
    tail_bytes = min(size, _END_64_BYTES + _LOCATOR_64_BYTES + _END_BYTES)
    file.seek(size - tail_bytes)
    tail = file.read(tail_bytes)
    end = tail[-_END_BYTES:]
    at = size - _END_BYTES  # where the directory must end
    if len(end) < _END_BYTES or end[:4] != _END or end[-2:] != b"\0\0":
        raise ValueError("it is truncated, or has data after its directory: copy it again")
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
    """A value on the stack of a pickle.

    Attributes:
        what: the name of a callable, a kind of container, "mark", or "" for values that take
        bounded
            memory however often they are referenced.
        depth: of nested containers.
    """

    what: str
    depth: int


_MARK, _SMALL, _EMPTY_TUPLE = _Value("mark", 0), _Value("", 0), _Value("()", 0)
_FLAT = _Value("flat", 1)  # a tuple of up to three small values, such as an optimizer's betas
_GETS, _PUTS = ("GET", "BINGET", "LONG_BINGET"), ("PUT", "BINPUT", "LONG_BINPUT")
_TUPLES = ("TUPLE1", "TUPLE2", "TUPLE3")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")
_NEVER = ("INST", "OBJ", "NEWOBJ", "DUP", "EXT1", "EXT2", "EXT4")


def _check_pickle(file: BinaryIO) -> None:
    """Walks the pickle at the file's position to its end, without creating any objects.

    No container may be referenced twice, so the content is a tree, no larger than the pickle. No
    function may be called with an array, whose rows it might unpack.
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
            raise ValueError("it references a list or dict twice: save the state dict alone")
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
            f"it contains {shown!a}, which is not a dense array: save a dict of float32, bfloat16, "
            "or float16 arrays"
        )
    return _SMALL


def _popped(stack: list[_Value], opcode: pickletools.OpcodeInfo) -> Iterator[_Value]:
    """Pops the operands of an opcode from the stack, topmost first."""
    wanted = opcode.stack_before
    if pickletools.markobject in wanted:
        while (one := stack.pop()) is not _MARK:
            yield one
        wanted = wanted[: wanted.index(pickletools.markobject)]
    for _ in wanted:
        yield stack.pop()


def _made(name: str, taken: list[_Value]) -> _Value:
    """Returns the value that an opcode pushes."""
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
    return _SMALL  # a number, a string, or a storage


def _filled(name: str, filled: _Value, kinds: set[str], depth: int) -> _Value:
    """Returns a container after values were added to it."""
    what = filled.what
    if name == "BUILD" and what != "ordered":
        raise ValueError("it sets the attributes of something that has none")
    if name in ("APPEND", "APPENDS"):
        lists = kinds <= {"list", "list of lists", "empty list"}
        keeps = lists and what in ("empty list", "list of lists")
        what = "list of lists" if keeps else "list"
    return _Value(what, max(filled.depth, depth))


def _called(function: str, arguments: str, depth: int) -> _Value:
    """Returns the result of a function call.

    Pickles from Python 2 create an OrderedDict from a list of lists, those from Python 3 from
    nothing.
    """
    if function not in _CALLED:
        raise ValueError("it calls something that is not an allowed function")
    if function != _ORDERED:
        return _SMALL
    if arguments not in ("()", "list as argument"):
        raise ValueError("it creates a dict from something other than a list of pairs")
    return _Value("ordered", depth)
