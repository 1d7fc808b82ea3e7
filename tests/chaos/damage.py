"""Damages checkpoint files: bit rot, an interrupted copy, an accidental deletion."""

import hashlib
import json
import random
from pathlib import Path

from chaos.watch import MANIFEST

DAMAGES = ("flip", "truncate", "delete", "unmark", "lie", "tear")


def damage(checkpoint: Path, kind: str, rng: random.Random) -> str:
    """Damages one checkpoint.

    Args:
        checkpoint: its folder, with a manifest.
        kind: ``flip`` a bit of a file; ``truncate`` or ``delete`` a file; ``unmark``: delete the
            manifest; ``lie``: put a wrong checksum or size in the manifest; ``tear``: cut the
            manifest in half.
        rng: chooses the file and the position.

    Returns:
        A description of the damage.
    """
    marker = checkpoint / MANIFEST
    if kind == "unmark":
        marker.unlink()
        return f"{checkpoint.name}: deleted {MANIFEST}"
    if kind == "lie":
        return f"{checkpoint.name}: {_lie(marker, rng)}"
    path = marker if kind == "tear" else rng.choice(_files(checkpoint))
    content = bytearray(path.read_bytes())
    name = path.relative_to(checkpoint)
    if kind == "delete" or not content:
        path.unlink()
        return f"{checkpoint.name}: deleted {name}"
    if kind == "flip":
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
        _rewrite(path, bytes(content))
        return f"{checkpoint.name}: flipped a bit of {name} at {at}"
    left = len(content) // 2 if kind == "tear" else rng.randrange(len(content))
    _rewrite(path, bytes(content[:left]))
    return f"{checkpoint.name}: cut {name} to {left} of {len(content)} bytes"


def _files(checkpoint: Path) -> list[Path]:
    """Returns all nonempty files except the manifest, so that each is equally likely."""
    return sorted(
        path
        for path in checkpoint.rglob("*")
        if path.is_file() and path.stat().st_size and path.name != MANIFEST
    )


def _lie(marker: Path, rng: random.Random) -> str:
    """Changes a size or checksum in the manifest; signs every second change."""
    content = json.loads(marker.read_text())
    name = rng.choice(sorted(content["files"]))
    entry = content["files"][name]
    if rng.random() < 0.5 or not entry["sha256"]:
        entry["bytes"] += rng.choice((-1, 1))
        change = f"{entry['bytes']} bytes for {name}"
    else:
        digest = entry["sha256"][0]
        entry["sha256"][0] = ("0" if digest[0] != "0" else "1") + digest[1:]
        change = f"a wrong checksum for {name}"
    signed = rng.random() < 0.5
    if signed:
        del content["sha256"]
        canonical = json.dumps(content, sort_keys=True).encode()
        content["sha256"] = hashlib.sha256(canonical).hexdigest()
    marker.write_text(json.dumps(content))
    return f"{MANIFEST} has {change}{', signed' if signed else ''}"


def _rewrite(path: Path, content: bytes) -> None:
    """Writes in place: a hard link to the file, such as in the best checkpoint, is damaged too."""
    with path.open("rb+") as file:
        file.write(content)
        file.truncate()
