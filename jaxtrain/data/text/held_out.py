"""The documents that validate, by their hashes: an equal document is not trained on.

A file has the sorted hashes of all documents for validation, 8 bytes each, so that it can be mapped
into memory. With 10^8 such documents, one of 10^9 others is skipped by chance with 0.5%.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxtrain.data import cache
from jaxtrain.storage.atomic import appearing


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The hashes of documents.

    Attributes:
        path: of the file.
    """

    path: Path

    def store(self, documents: Iterable[str]) -> None:
        """Writes the hashes of documents, unless the file exists.

        Raises:
            InputError: the disk is read-only.
            RunAgain: the disk is full.
        """
        if not self.path.exists():
            hashes = np.unique(np.fromiter(map(_hash, documents), np.uint64))
            with cache.explained(self.path.parent), appearing(self.path) as work:
                np.save(work, hashes)

    def __contains__(self, document: str) -> bool:
        """Returns whether an equal document validates."""
        wanted = _hash(document)
        place = int(np.searchsorted(self._hashes, np.uint64(wanted)))
        return place < len(self._hashes) and int(self._hashes[place]) == wanted

    @functools.cached_property
    def _hashes(self) -> np.ndarray:
        hashes: np.ndarray = np.load(self.path, mmap_mode="r")
        return hashes

    def __reduce__(self) -> tuple[type["HeldOut"], tuple[Path]]:
        """Pickles the path, without the hashes."""
        return HeldOut, (self.path,)


def _hash(document: str) -> int:
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")
