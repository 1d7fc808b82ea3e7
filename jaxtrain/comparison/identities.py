"""What a folder of runs knows of the identities of their sides, a file for each.

Comparisons that share the folder share it: what one has measured of a side, another finds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.storage import atomic

FOLDER = "identities"
_CONFIG = "the config"


class Identities:
    """The records of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def examined(self, identity: str, parts: Mapping[str, str], code: str) -> None:
        """Records that source files with this digest give programs of this identity."""
        known = self._read(identity)
        codes = [*known.get("codes", ()), code]
        self._write(identity, known | {"parts": dict(parts), "codes": list(dict.fromkeys(codes))})

    def measured(self, program: str, step_s: float) -> None:
        """Records how long a step of this program takes. It is never measured again."""
        self._write(program, {"step_s": step_s})

    def codes(self, identity: str) -> frozenset[str]:
        """Returns the digests of source files that are known to give this identity."""
        return frozenset(self._read(identity).get("codes", ()))

    def step_s(self, program: str) -> float | None:
        """Returns how long a step of this program takes; None if it was not measured."""
        return self._read(program).get("step_s")

    def changed(self, identity: str, parts: Mapping[str, str]) -> list[str]:
        """Returns what has changed since the newest other identity of the same config.

        Empty if there is none.
        """
        before = []
        for path in self.folder.glob("*.json"):
            known = self._read(path.stem)
            if path.stem != identity and known.get("parts", {}).get(_CONFIG) == parts[_CONFIG]:
                before.append((path.stat().st_mtime, known["parts"]))
        if not before:
            return []
        newest = max(before, key=lambda record: record[0])[1]
        return [name for name in parts if parts[name] != newest.get(name)]

    def _read(self, identity: str) -> dict[str, Any]:
        path = self.folder / f"{identity}.json"
        return atomic.read_json(path) if path.exists() else {}

    def _write(self, identity: str, content: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic.write_json(self.folder / f"{identity}.json", content)
