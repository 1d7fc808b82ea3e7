"""The pages of a column of a Parquet file: how large they are once they are unpacked.

What a file's footer says of sizes and encodings is a claim that nothing checks. Each page has a
header of its own, and what it says is what a reader goes by: a page that unpacks to something else
is an error. Headers are in Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md and
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # kinds of pages
DELTA_BYTE_ARRAY = 7
"""The encoding of a value as its difference from the one before."""
_HEADER_BYTES = 2**16  # more than any; statistics in it hold the first bytes of values
_DEEPEST = 8


class Page(NamedTuple):
    """What the header of a page says.

    Attributes:
        rows: values in it; 0 for a dictionary.
        size: bytes of them, unpacked.
        packed: bytes of the page in the file, with its header.
        encoding: of the values, a number of Parquet's.
        dictionary: whether it is one.
    """

    rows: int
    size: int
    packed: int
    encoding: int
    dictionary: bool


def read(file: BinaryIO, start: int, length: int, values: int) -> list[Page]:
    """The headers of a column's pages in a row group; reads nothing else of the file.

    Args:
        file: the Parquet file.
        start: where the first page is.
        length: bytes of all pages.
        values: how many values are to be read; pages behind them count no longer.

    Raises:
        ValueError: a header is damaged.
    """
    if start < 4:  # where the first page of a file begins
        raise ValueError(f"its pages begin at byte {start:,}")
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
    """How many rows can be decoded together: all of them may be in as few pages as hold them.

    Two pages may always be decoded together, since each is unpacked as a whole anyway.

    Args:
        pages: of a column.
        most: rows, at most.
        limit: bytes of more than two pages.

    Returns:
        1 to ``most``: a power of two times smaller.
    """
    data = [page for page in pages if not page.dictionary]
    rows = most
    while rows > 1 and not _fits(data, rows, limit):
        rows //= 2
    return rows


def _fits(pages: Sequence[Page], rows: int, limit: int) -> bool:
    """Whether all pages that any so many consecutive rows touch are within the limit."""
    first = size = inside = 0  # pages first to last, and the rows of those between them
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
        raise ValueError(f"a page's header lacks field {number}, or it is below 0")
    return value


class _Compact:
    """A reader of Thrift's compact protocol.

    Args:
        data: that begins with a struct.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        """The fields of a struct by number; strings and lists are passed over.

        Raises:
            ValueError: it is damaged or too long.
        """
        if depth > _DEEPEST:
            raise ValueError("a page's header is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._zigzag()
            fields[number] = self._value(kind & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # a flag, which its kind holds
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
            raise ValueError(f"a page's header has a field of the unknown kind {kind}")
        return None

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise ValueError("a page's header is cut short, or too long")

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
                raise ValueError("a page's header has a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
