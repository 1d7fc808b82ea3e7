"""Files of a user, many of which have names that look like those of a run."""

import random
from collections.abc import Iterator

COUNT = 200
_DIGITS = "0123456789abcdef"
_FOLDERS = (
    *("", "data", "samples", "checkpoints", "checkpoints/files", "best", "aside", "trackers"),
    *("superseded/checkpoints", "damaged/best", "suspect", "tensorboard", "my notes"),
)


def files(seed: int) -> dict[str, bytes]:
    """Returns the content of each file by its name; no name is a folder of another."""
    rng, made, folders = random.Random(seed), dict[str, bytes](), set[str]()
    for name in _names(rng):
        above = {name[:at] for at, letter in enumerate(name) if letter == "/"}
        if name not in folders and not above & made.keys():
            made[name] = rng.randbytes(rng.randrange(60))
            folders |= above
        if len(made) == COUNT:
            break
    return made


def _names(rng: random.Random) -> Iterator[str]:
    while True:
        step, token = rng.randrange(3000), "".join(rng.choices(_DIGITS, k=rng.choice((8, 12, 16))))
        names = (
            *(f"2024-01-{step % 28 + 1:02}/holiday.mp4", f"{step:04}-panda/a.txt", f"{step}p/x"),
            *(f"{step}-{token}/state/_METADATA", f"{step}-{token}x/a", f"0{step}.json"),
            *(f"frame_{step:04}.PNG", f"holiday-{step}.mp4", f"notes-{step}.json", "8.json.bak"),
            *(f"log.{token}.txt", f"metrics.{step}.csv", f".notes.{step}", f"-{step}.json"),
            *(f"progress.{token}.json", f"start.{step}.json", f"config-{step}.json", token),
            *(f"{token}.jsonl", f"{step}.json5", f"{step}-{token}.txt.old"),
        )
        yield "/".join(filter(None, (rng.choice(_FOLDERS), rng.choice(names))))
