"""Installed packages, their versions, and what others require of them; imports none of them."""

import dataclasses
import importlib.metadata
import re
from collections.abc import Callable

Version = tuple[int, ...]

_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*(?:;.*)?$")
_CLAUSE = re.compile(r"^(~=|==|!=|<=|>=|<|>)\s*([0-9][0-9.]*?)(\.\*)?$")


@dataclasses.dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        version: as its metadata says.
        requires: its ``Requires-Dist`` lines.
    """

    version: str
    requires: tuple[str, ...] = ()

    def pins(self, prefix: str) -> dict[str, str]:
        """What it requires of packages whose names start so: name -> clauses, as ">=9.8,<10"."""
        matches = (_REQUIREMENT.match(line) for line in self.requires)
        found = ((match[1].lower().replace("_", "-"), match[2]) for match in matches if match)
        return {name: clauses.strip() for name, clauses in found if name.startswith(prefix)}


Find = Callable[[str], Package | None]


def installed(name: str) -> Package | None:
    """A package of this environment; None where it is not installed."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Package(found.version, tuple(found.requires or ()))


def version(text: str) -> Version:
    """The numbers of a version, "12.9.79" or "2.13.0+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0]))


def at_least(found: str, least: str) -> bool:
    """Whether one version is not older than another."""
    return _padded(found, least)[0] >= _padded(found, least)[1]


def satisfies(found: str, clauses: str) -> bool:
    """Whether a version satisfies all of some comma-separated clauses; those of no known form do.

    Args:
        found: "9.10.2.21".
        clauses: ">=9.8,<10.0".
    """
    return all(_holds(found, clause.strip()) for clause in clauses.split(",") if clause.strip())


def _holds(found: str, clause: str) -> bool:
    match = _CLAUSE.match(clause)
    if match is None:
        return True
    operator, wanted, wildcard = match[1], match[2], match[3] is not None
    here, there = _padded(found, wanted)
    if wildcard or operator == "~=":
        prefix = version(wanted) if wildcard else version(wanted)[:-1]
        same = version(found)[: len(prefix)] == prefix
        return not same if operator == "!=" else same and (wildcard or here >= there)
    return {
        "==": here == there,
        "!=": here != there,
        "<=": here <= there,
        ">=": here >= there,
        "<": here < there,
        ">": here > there,
    }[operator]


def _padded(first: str, second: str) -> tuple[Version, Version]:
    """Both with as many numbers: 9.8 is 9.8.0."""
    one, other = version(first), version(second)
    length = max(len(one), len(other))
    return one + (0,) * (length - len(one)), other + (0,) * (length - len(other))
