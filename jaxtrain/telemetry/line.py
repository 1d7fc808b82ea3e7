"""A line of fields, such as that of a step: a console shows what fits."""

import dataclasses
from typing import NamedTuple


class Field(NamedTuple):
    """A field of a line.

    Attributes:
        rank: where the line does not fit, the field with the highest rank is omitted first; 0 is
            never omitted.
        widest: columns to reserve, so that a value that grows does not make fields come and go.
    """

    text: str
    rank: int = 0
    widest: int = 0

    @property
    def columns(self) -> int:
        """Returns the columns that are reserved for it."""
        return max(len(self.text), self.widest)


@dataclasses.dataclass(frozen=True)
class Line:
    """Fields in the order in which they are shown."""

    fields: tuple[Field, ...]
    separator: str = " | "

    def __str__(self) -> str:
        """The complete line, as log.txt has it."""
        return self.separator.join(field.text for field in self.fields)

    def fitted(self, columns: int) -> "Line":
        """Omits the least important fields until the others fit, as far as they may be omitted."""
        kept = list(self.fields)
        between = len(self.separator)
        while sum(field.columns + between for field in kept) - between > columns:
            least_important = max(kept, key=lambda field: field.rank)
            if not least_important.rank:
                break
            kept.remove(least_important)
        return Line(tuple(kept), self.separator)

    def wrapped(self, columns: int) -> list[str]:
        """Returns the line as one or several lines, which break only between fields."""
        lines: list[str] = []
        for field in self.fields:
            longer = f"{lines[-1]}{self.separator}{field.text}" if lines else field.text
            if lines and len(longer) > columns:
                lines[-1] += self.separator.rstrip()
                lines.append(f"  {field.text}")
            else:
                lines[-1:] = [longer]
        return lines
