"""Reads page headers of a Parquet column, to know the unpacked sizes before decoding.

Sizes and encodings in a file's footer are not checked by anything. Each page has its own header,
which readers rely on: a page that does not unpack to the stated size is an error. Headers are in
Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md and
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # page types
DELTA_BYTE_ARRAY = 7
"""Encodes each value as its difference from the previous one."""
_HEADER_BYTES = 2**16  # more than any header; its statistics hold the first bytes of values
_DEEPEST = 8


class Page(NamedTuple):
    """The header of a page.

    Attributes:
        rows: number of values; 0 for a dictionary.
        size: unpacked size in bytes.
        packed: size in the file in bytes, including the header.
        encoding: Parquet's number for the encoding of the values.
        dictionary: whether the page is a dictionary.
    """

    rows: int
    size: int
    packed: int
    encoding: int
    dictionary: bool


def read(file: BinaryIO, start: int, length: int, values: int) -> list[Page]:
    """Reads the page headers of a column in a row group, and nothing else.

    Args:
        file: the Parquet file.
        start: offset of the first page.
        length: size of all pages in bytes.
        values: number of values in the column; pages after them are ignored.

    Raises:
        ValueError: a header is damaged.
    """
    if start < 4:  # the file's first page begins after the magic number
        raise ValueError(f"its pages begin at byte {start:,}, before the first possible page")
    pages = []
    at, seen = start, 0
    while at < start + length and seen < values:
        file.seek(at)
        header = _Compact(file.read(min(_HEADER_BYTES, start + length - at)))
        fields = header.struct(0)
        kind, size, packed = (_number(fields, number) for number in (1, 2, 3))
        packed += header.at
        if kind in (_DATA, _DATA_V2):
            about = fields.get(5 if kind == _DATA else 8)
            rows, encoding = _number(about, 1), _number(about, 2 if kind == _DATA else 4)
            pages.append(Page(rows, size, packed, encoding, dictionary=False))
            seen += rows
        elif kind == _DICTIONARY:
            pages.append(Page(0, size, packed, 0, dictionary=True))
        at += packed
    return pages


def most_rows(pages: Sequence[Page], most: int, limit: int) -> int:
    """Returns how many rows to decode together so that their pages stay within a limit.

    Two pages are always within it, because a page is unpacked completely anyway.

    Args:
        pages: the pages of a column.
        most: upper limit of rows.
        limit: upper limit of the unpacked bytes of three or more pages.

    Returns:
        ``most``, halved until the pages of any so many consecutive rows fit; at least 1.
    """
    data = [page for page in pages if not page.dictionary]
    rows = most
    while rows > 1 and not _fits(data, rows, limit):
        rows //= 2
    return rows


def _fits(pages: Sequence[Page], rows: int, limit: int) -> bool:
    """Returns whether any ``rows`` consecutive rows are in pages within the limit."""
    first = size = inside = 0  # size of pages first to last; rows of the pages between them
    for last, page in enumerate(pages):
        size += page.size
        while inside > rows - 2 and first < last:
            size -= pages[first].size
            first += 1
            inside -= pages[first].rows if first < last else 0
        if last - first > 1 and size > limit:
            return False
        inside += page.rows if last > first else 0
    return True


def _number(fields: Any, number: int) -> int:
    value = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"field {number} of a page header is missing or negative")
    return value


class _Compact:
    """Reads Thrift's compact protocol.

    Args:
        data: bytes that begin with a struct.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        """Returns the fields of a struct by number; skips strings and lists.

        Raises:
            ValueError: the struct is damaged or too long.
        """
        if depth > _DEEPEST:
            raise ValueError("a page header is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._zigzag()
            fields[number] = self._value(kind & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # a boolean: the kind is its value
            return kind == 1
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 12:
            return self.struct(depth + 1)
        if kind == 3:
            self._skip(1)
        elif kind == 7:
            self._skip(8)
        elif kind == 8:
            self._skip(self._varint())
        elif kind in (9, 10):
            head = self._byte()
            for _ in range(head >> 4 if head >> 4 < 15 else self._varint()):
                inner = head & 15
                if inner in (1, 2):
                    self._skip(1)
                else:
                    self._value(inner, depth + 1)
        else:
            raise ValueError(f"a page header has a field of the unknown kind {kind}")
        return None

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise ValueError("a page header is truncated or too long")

    def _byte(self) -> int:
        self._skip(1)
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a page header has a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
