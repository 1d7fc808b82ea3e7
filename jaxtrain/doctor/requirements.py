"""Installed packages, their versions, and what others require of them; imports none of them."""

import dataclasses
import importlib.metadata
from collections.abc import Callable

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


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
        pins = {}
        for line in self.requires:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            name = canonicalize_name(requirement.name)
            if name.startswith(prefix):
                pins[str(name)] = str(requirement.specifier)
        return pins


Find = Callable[[str], Package | None]


def installed(name: str) -> Package | None:
    """A package of this environment; None where it is not installed."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Package(found.version, tuple(found.requires or ()))


def at_least(found: str, least: str) -> bool:
    """Whether one version is not older than another; one that is not written as such is not."""
    try:
        return Version(found) >= Version(least)
    except InvalidVersion:
        return False


def satisfies(found: str, clauses: str) -> bool:
    """Whether a version satisfies all of some comma-separated clauses; those of no known form do.

    Args:
        found: "9.10.2.21".
        clauses: ">=9.8,<10.0".
    """
    try:
        return SpecifierSet(clauses).contains(Version(found), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True
