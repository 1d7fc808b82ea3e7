"""Damages checkpoint files: bit rot, an interrupted copy, an accidental deletion."""

import hashlib
import json
import random
from pathlib import Path

DAMAGES = ("flip", "truncate", "delete", "empty", "lie", "tear")


def damage(pointer: Path, kind: str, rng: random.Random) -> str:
    """Damages one checkpoint.

    Args:
        kind: ``flip`` a bit of a file; ``truncate`` or ``delete`` a file; ``empty`` the pointer;
            ``lie``: put a wrong checksum or size in it; ``tear``: cut it in half.
    """
    if kind == "lie":
        return f"{pointer.name}: {_lie(pointer, rng)}"
    folder = pointer.parent.parent / json.loads(pointer.read_text())["data"]
    path = pointer if kind in ("tear", "empty") else rng.choice(_files(folder))
    content = bytearray(path.read_bytes())
    if kind == "delete" or not content:
        path.unlink()
        return f"{pointer.name}: deleted {path.name}"
    if kind == "flip":
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        return f"{pointer.name}: flipped a bit of {path.name} at {at}"
    left = {"tear": len(content) // 2, "empty": 0}.get(kind, rng.randrange(len(content)))
    path.write_bytes(content[:left])
    return f"{pointer.name}: cut {path.name} to {left} of {len(content)} bytes"


def _files(folder: Path) -> list[Path]:
    """Returns all nonempty files of a checkpoint, so that each is equally likely."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def _lie(pointer: Path, rng: random.Random) -> str:
    """Changes a size or checksum in a pointer; signs every second change."""
    content = json.loads(pointer.read_text())
    name = rng.choice(sorted(content["files"]))
    size, digests = content["files"][name]
    if rng.random() < 0.5 or not digests:
        size += rng.choice((-1, 1))
        change = f"{size} bytes for {name}"
    else:
        digests[0] = ("0" if digests[0][0] != "0" else "1") + digests[0][1:]
        change = f"a wrong checksum for {name}"
    content["files"][name] = [size, digests]
    signed = rng.random() < 0.5
    if signed:
        del content["sha256"]
        canonical = json.dumps(content, sort_keys=True).encode()
        content["sha256"] = hashlib.sha256(canonical).hexdigest()
    pointer.write_text(json.dumps(content))
    return f"it has {change}{', signed' if signed else ''}"
