"""Parses the compiler's buffer assignment dump: the largest temporaries and what creates them."""

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
    """A slot in the memory for temporaries.

    Attributes:
        size: bytes.
        shape: element type and shape of the first value in it, such as "bf16[96,480,720,64]".
        made_by: source lines that create its values, in order, with the pass; a line of the model
            where one is known.
        shared_by: number of values that use the slot, one after another.
    """

    size: int
    shape: str
    made_by: tuple[str, ...]
    shared_by: int


def flags(folder: Path) -> str:
    """Returns the XLA_FLAGS that write the dump for :func:`largest` into ``folder``."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_train_step"


def largest(folder: Path, program: str, count: int) -> list[Temporary]:
    """Returns the largest slots for temporaries, largest first.

    Args:
        folder: contains the dump.
        program: ``compiled.as_text()``.
        count: number of slots to return.
    """
    dumps = sorted(folder.glob("*buffer-assignment.txt"))
    return parse(dumps[-1].read_text(), program)[:count] if dumps else []


def parse(dump: str, program: str) -> list[Temporary]:
    """Returns all slots for temporaries, largest first; see :func:`largest`."""
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
