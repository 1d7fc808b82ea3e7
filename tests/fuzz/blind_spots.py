"""Inputs that random changes of valid files do not reach: small, valid in form, costly to read.

Every function takes a random generator and the valid input, which it changes in place.
"""

import json
import os
import random
import struct
from pathlib import Path

_LONG = 100_000  # characters
_UNITS = ("a", "a.", ":", "a:", "://", "a://b:", "[", "/", "a=b&", "{", "{0..1}", "(a+)+", "\u00e9")
_STARTS = ("", "https://", "https://h?", "s3://b/", "file:/", "../")


def pipes(rng: random.Random, top: Path) -> None:
    """Adds pipes that never deliver anything to a data folder."""
    for ending in rng.sample(("txt", "jsonl", "parquet", "mp4", "tar", "mkv"), 3):
        os.mkfifo(top / f"pipe.{ending}")
    (top / "deep").mkdir()
    os.mkfifo(top / "deep" / "a.mp4")


def long_string(rng: random.Random, path: Path) -> None:
    """Adds a string of 100 KB to a list or JSON lines."""
    unit = rng.choice(_UNITS)
    text = rng.choice(_STARTS) + unit * (_LONG // len(unit)) + rng.choice(("", ":/", "@", ".mp4"))
    if path.suffix == ".jsonl":
        content = json.dumps({rng.choice(("text", "path", text)): text})
    else:
        content = json.dumps([text]) if path.suffix == ".json" else text
    path.write_text(content + "\n" + path.read_text() * (path.suffix != ".json"))


def large_numbers(rng: random.Random, path: Path) -> None:
    """Puts invalid sizes into the metadata of a video's latents."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    name = rng.choice(("frames", "height", "width", "padding_bottom", "padding_right", "fps"))
    header["__metadata__"][name] = rng.choice(("9" * 400, "9" * 4300, "9" * 10_000, str(2**31)))
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + data[8 + size :])
