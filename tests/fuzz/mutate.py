"""Mutations of bytes and JSON, determined by the random generator that is passed in.

Hypothesis does not fit here: it draws and shrinks its examples in the tested process, and its seeds
do not reproduce the same examples in another version, as the list of failed seeds requires. Here an
example is a complete file or folder, and the tested unit is a process.
"""

import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

_INTEGERS = (0, 1, 2, 7, 8, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31)
_INTEGERS += (2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_LONGEST = 2**22  # bytes of a mutated file
_MOST_STEPS = 4


class Raw(str):
    """Text that is written to a JSON file verbatim."""


def raw_bytes(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """Changes bytes at a few positions.

    Args:
        other: contents of a file to splice with.
    """
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, _MOST_STEPS, 16))):
        _change_bytes(rng, content, other or data)
    return bytes(content[:_LONGEST])


def _change_bytes(rng: random.Random, content: bytearray, other: bytes) -> None:
    size = len(content)
    # Headers are at the beginning, or in some formats at the end.
    near = rng.choice((size, size, min(size, 64), min(size, 1024)))
    at = rng.randrange(near + 1)
    if rng.random() < 0.15:
        at = size - at
    span = rng.choice((1, 1, 2, 4, 8, 64, 1024))
    kind = rng.choice(
        (
            *("flip", "flip", "set", "integer", "integer", "insert", "delete"),
            *("truncate", "copy", "splice"),
        )
    )
    if kind == "flip" and at < size:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "set" and at < size:
        content[at] = rng.choice((0, 1, 9, 10, 13, 27, 32, 34, 47, 91, 92, 123, 127, 128, 255))
    elif kind == "integer":
        packed = struct.pack("<Q", rng.choice(_INTEGERS))[: rng.choice((1, 2, 4, 8))]
        content[at : at + len(packed)] = packed if rng.random() < 0.5 else packed[::-1]
    elif kind == "insert":
        content[at:at] = rng.choice((rng.randbytes(span), b"\0" * span, b"[" * span, b"\x1b[2J"))
    elif kind == "delete":
        del content[at : at + span]
    elif kind == "truncate":
        del content[at:]
    elif kind == "copy":
        content[at:at] = bytes(content[at : at + span]) * rng.choice((1, 1, 16))
    elif kind == "splice" and other:
        start = rng.randrange(len(other))
        content[at : at + (span if rng.random() < 0.5 else size)] = other[start : start + span * 8]


def strange_value(rng: random.Random) -> Any:
    """Returns a JSON value that a reader may not expect."""
    number = rng.choice(
        (
            *(0, 1, -1, 2, 7, 1024, 65536, 2**31, -(2**31), 2**53 + 1, 2**63),
            *(-(2**63) - 1, 2**64, 0.5, -0.5, 1e-320, 1e300, -1e300, 2.0, 1e16),
            *map(Raw, ("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "-0", "0.0", "1E400")),
            *(Raw("1" + "0" * 400), Raw("9" * 5000)),
        )
    )
    text = rng.choice(
        (
            *("", " ", "a", "0", "1", "-1", "true", "null", "nan", "inf"),
            *("1e999", "float32", "F32", "../../etc/passwd", "/etc/passwd"),
            *("/dev/zero", "/dev/stdin", "~", "~root/x", "a/../b"),
            *("file:///etc/passwd", "http://127.0.0.1:9/x.mp4"),
            *("https://a:b@127.0.0.1/x", "s3://b/k", "C:\\x", "a\0b"),
            *("\x1b[2J\x1b]0;title\x07", "\u202egpj.exe", "\x9b31m", "a\nb\rc"),
            *("os.system", "jaxtrain.doctor.examination._remove"),
            *("jaxtrain.models.gpt.Config", "builtins.eval", "gpt", "llama"),
            *("mlm", "video_ae", "{x}", "%s%n", "$HOME", "`id`", "$(id)"),
            *("<script>", "\ud800", "\U0001f642", "é" * 300, "é" * 40_000),
            *("a" * 1_000_000, "(a+)+$", "[" * 100_000),
        )
    )
    deep = rng.choice((10, 200, 2000, 100_000))
    return rng.choice(
        (
            *(
                *(None, True, False, number, number, number, text, text, text, []),
                *({}, [None], {"": None}),
            ),
            *([number], [text], {text[:50]: number}, [[1, 2], [3]], ["x"] * 10_000, [number] * 70),
            {
                "class": "subprocess.run",
                "args": ["sh", "-c", "touch ran"],
                "timeout": 5,
            },
            {"class": rng.choice(("gpt", "llama", "mlm", "video_ae"))},
            Raw("[" * deep + "]" * deep),
            Raw('{"a":' * deep + "1" + "}" * deep),
        )
    )


def json_text(rng: random.Random, data: bytes) -> bytes:
    """Replaces, removes, repeats or moves a few nodes of JSON.

    Args:
        data: JSON; otherwise bytes are changed.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return raw_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, _MOST_STEPS))):
        value = _changed(rng, value)
    text = _dumped(value)
    if rng.random() < 0.05:
        text = rng.choice(
            ("\ufeff" + text, text + text, text + ",", f"[{text}", text[:-1], "//x\n" + text)
        )
    return text.encode("utf-8", "surrogatepass")


def json_lines(rng: random.Random, data: bytes) -> bytes:
    """Changes, repeats, swaps or removes a few lines of JSON."""
    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        kind = rng.choice(
            ("change", "change", "change", "change", "copy", "swap", "delete", "break")
        )
        if kind == "change":
            lines[at] = (
                json_text(rng, lines[at])
                if lines[at]
                else _dumped(strange_value(rng)).encode("utf-8", "surrogatepass")
            )
        elif kind == "copy":
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif kind == "swap":
            to = rng.randrange(len(lines))
            lines[at], lines[to] = lines[to], lines[at]
        elif kind == "delete" and len(lines) > 1:
            del lines[at]
        else:
            lines[at] = raw_bytes(rng, lines[at])
    return b"\n".join(lines)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object whose names may repeat."""


def _changed(rng: random.Random, value: Any) -> Any:
    """Returns the value with one node changed, at any depth."""
    if isinstance(value, dict):
        value = _Pairs(value.items())
    if isinstance(value, _Pairs | list) and value and rng.random() < 0.8:
        return _with_changed_member(rng, value)
    holds_json = isinstance(value, str) and not isinstance(value, Raw) and value[:1] in ("{", "[")
    if holds_json and rng.random() < 0.7:  # such as the model in the header of a weights file
        return json_text(rng, value.encode("utf-8", "surrogatepass")).decode(errors="replace")
    tweaked = _tweaked(rng, value)
    return strange_value(rng) if tweaked is None or rng.random() < 0.6 else tweaked


def _with_changed_member(rng: random.Random, value: Any) -> Any:
    copy = _Pairs(value) if isinstance(value, _Pairs) else list(value)
    named = isinstance(copy, _Pairs)
    at = rng.randrange(len(copy))
    kind = rng.choice((*["change"] * 8, "delete", "repeat", "rename", "add", "swap", "empty"))
    if kind == "delete":
        del copy[at]
    elif kind == "repeat":
        copy.insert(at, (copy[at][0], strange_value(rng)) if named else copy[at])
    elif kind == "rename" and named:
        name = rng.choice((_name(rng), copy[rng.randrange(len(copy))][0], copy[at][0] + "x"))
        copy[at] = (name, copy[at][1])
    elif kind == "add":
        more = strange_value(rng)
        copy.insert(at, (_name(rng), more) if named else more)
    elif kind == "swap":
        to = rng.randrange(len(copy))
        if named:
            (a, x), (b, y) = copy[at], copy[to]
            copy[at], copy[to] = (a, y), (b, x)
        else:
            copy[at], copy[to] = copy[to], copy[at]
    elif kind == "empty":
        copy.clear()
    elif named:
        copy[at] = (copy[at][0], _changed(rng, copy[at][1]))
    else:
        copy[at] = _changed(rng, copy[at])
    return copy


def _name(rng: random.Random) -> str:
    return rng.choice(
        ("", "class", "__class__", "__reduce__", "path", "a\x1b[2Jb", "../x", "k" * 9000, "\0")
    )


def _tweaked(rng: random.Random, value: Any) -> Any:
    """Returns a similar value; None if there is none."""
    if isinstance(value, bool) or value is None:
        return None if value is None else not value
    if isinstance(value, int) and abs(value) < 2**70:
        near = (value + 1, value - 1, -value, value * 2, value // 2, value * 1000, value * 10**6)
        return rng.choice((*near, float(value), str(value), [value]))
    if isinstance(value, float) and math.isfinite(value):
        return rng.choice((-value, value * 1e6, value * 1e-6, int(value), str(value)))
    if isinstance(value, str) and value and not isinstance(value, Raw):
        at = rng.randrange(len(value))
        return rng.choice(
            (
                value[:at] + rng.choice("\0\x1b\n\r\u202e\x07./:%é") + value[at:],
                *(value[:at], value * rng.choice((2, 100)), value.upper(), [value]),
                rng.choice("/.~-") + value,
            )
        )
    return None


def _dumped(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        value = _Pairs(value.items())
    if isinstance(value, _Pairs):
        return "{" + ", ".join(f"{json.dumps(name)}: {_dumped(one)}" for name, one in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_dumped, value)) + "]"
    return json.dumps(value)


Mutation = Callable[[random.Random, bytes], bytes]


def weighted(rng: random.Random, choices: Sequence[tuple[float, Any]]) -> Any:
    """Returns a random choice by weight."""
    return rng.choices([one for _, one in choices], [weight for weight, _ in choices])[0]
