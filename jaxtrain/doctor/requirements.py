"""Reads the versions and requirements of installed packages, without importing them."""

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
        version: the version in its metadata.
        requires: its ``Requires-Dist`` lines.
    """

    version: str
    requires: tuple[str, ...] = ()

    def pins(self, prefix: str) -> dict[str, str]:
        """Returns its requirements by name prefix: name -> clauses, such as ">=9.8,<10"."""
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
    """Finds a package of this environment; None if it is not installed."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Package(found.version, tuple(found.requires or ()))


def at_least(found: str, least: str) -> bool:
    """Returns whether a version is not older than another; False for an invalid version."""
    try:
        return Version(found) >= Version(least)
    except InvalidVersion:
        return False


def satisfies(found: str, clauses: str) -> bool:
    """Returns whether a version satisfies comma-separated clauses; True if they are invalid.

    Args:
        found: a version, such as "9.10.2.21".
        clauses: clauses, such as ">=9.8,<10.0".
    """
    try:
        return SpecifierSet(clauses).contains(Version(found), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True
