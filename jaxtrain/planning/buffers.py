"""The compiler's dump of its buffer assignment: the largest temporaries, and who made them."""

import dataclasses
import re
from pathlib import Path

from jaxtrain.xla.hlo import Stacks

_TEMPORARIES = re.compile(r"^allocation \d+: .*\bpreallocated-temp", re.MULTILINE)
_VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{\S*\})? @\S+> \(size=(\d+),offset=(\d+)\): (\S+)", re.MULTILINE
)
_INSTRUCTION = re.compile(
    r'^\s+(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)".*?stack_frame_id=(\d+)', re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Temporary:
    """A place in the memory for temporaries.

    Attributes:
        size: bytes.
        shape: element type and shape of what fills it, as "bf16[96,480,720,64]".
        made_by: lines that make what is kept there, in turn, and in which pass; a model's line
            where one is known.
        shared_by: how many values are kept there, one after the other.
    """

    size: int
    shape: str
    made_by: tuple[str, ...]
    shared_by: int


def flags(folder: Path) -> str:
    """What XLA_FLAGS has to hold, so that :func:`largest` finds the dump in ``folder``."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_train_step"


def largest(folder: Path, program: str, count: int) -> list[Temporary]:
    """The largest places for temporaries, largest first.

    Args:
        folder: of the dump.
        program: ``compiled.as_text()``.
        count: how many to give.
    """
    dumps = sorted(folder.glob("*buffer-assignment.txt"))
    return parse(dumps[-1].read_text(), program)[:count] if dumps else []


def parse(dump: str, program: str) -> list[Temporary]:
    """All places for temporaries, largest first; see :func:`largest`."""
    source = Stacks(program).source
    makers = {match[1]: (int(match[3]), match[2]) for match in _INSTRUCTION.finditer(program)}
    places: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for began in _TEMPORARIES.finditer(dump):
        end = dump.find("\nallocation ", began.end())
        for name, size, offset, shape in _VALUE.findall(dump[began.end() : end]):
            bare = re.sub(r"\{.*$", "", shape)
            places.setdefault((int(size), int(offset)), []).append((name, bare))
    found = []
    for (size, _), values in sorted(places.items(), key=lambda place: -place[0][0]):
        lines = (source(*makers[name]) for name, _ in values if name in makers)
        made_by = tuple(dict.fromkeys(line for line in lines if line is not None))
        found.append(Temporary(size, values[0][1], made_by, len(values)))
    return found
