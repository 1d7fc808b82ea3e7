"""Kinds of cases: the valid input, how it is changed, and the command that reads it.

Kind and seed determine everything. ``doctor`` and fresh training runs are excluded: they take tens
of seconds, and read data like ``prepare`` and ``evaluate``.
"""

import dataclasses
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from fuzz import formats, mutate
from fuzz.sandbox import INPUT, OUTPUT

_IN, _OUT = f"{INPUT}/", f"{OUTPUT}/"
_SMALL_TEXT = ("--model.vocab_size", "300", "--model.sequence_length", "32")
_CLIPS = ("--height", "16", "--width", "16", "--frames", "4", "--min-frames", "2")
_CLIPS += ("--min-side", "8")
_FEW = ("--tokens", "4")
_SIZE = ("--frames", "4", "--height", "16", "--width", "16", "--clips", "2")
_TEXT_TO_FILL = "paris is the [MASK] of france"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        words: arguments; ``{}`` stands for the input.
    """

    words: tuple[str, ...]
    weight: float = 1.0
    allowed: tuple[int, ...] = (0, 2)

    def arguments(self, name: str) -> list[str]:
        """Returns the command line for the path of an input."""
        return [word.replace("{}", name) for word in self.words]


@dataclasses.dataclass(frozen=True)
class Seed:
    """A valid input.

    Attributes:
        files: files of the corpus to copy; the first is changed.
        change: what to change: "file", any file of a "folder", or files of this name in a folder.
    """

    files: tuple[str, ...]
    commands: tuple[Command, ...]
    change: str = "file"
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """Cases of one kind.

    Attributes:
        bounded: whether memory and time are limited. A small file of Parquet may unpack to many
            gigabytes: the guide says to set a memory limit.
    """

    seeds: tuple[Seed, ...]
    weight: float
    bounded: bool = True


@dataclasses.dataclass(frozen=True)
class Case:
    """A case with its input."""

    arguments: list[str]
    command: Command


def _safetensors() -> tuple[Seed, ...]:
    video = ("video.mp4",)
    video_models = tuple(
        Seed(
            (name, *video, "latents.safetensors"),
            (
                Command(("import", "{}", _OUT + "a.safetensors"), 5),
                Command(("export", "{}", _OUT + "a.safetensors"), 3),
                Command(("encode", "{}", _IN + "video.mp4", _OUT + "l.safetensors"), 1),
                Command(("decode", "{}", _IN + "latents.safetensors", _OUT + "v.mp4"), 1),
                Command(("reconstruct", "{}", _IN + "video.mp4", _OUT + "v.mp4"), 0.5),
                Command(("evaluate", "{}", "--data", _IN + "video.mp4", *_SIZE), 0.5),
            ),
            weight=weight,
        )
        for name, weight in (("video_ae.safetensors", 3), ("published.safetensors", 1))
    )
    latents = Seed(
        ("latents.safetensors", "video_ae.safetensors"),
        (Command(("decode", _IN + "video_ae.safetensors", "{}", _OUT + "v.mp4")),),
        weight=1.5,
    )
    texts = tuple(
        Seed(
            (f"{name}.safetensors",),
            (
                Command(("export", "{}", _OUT + "a.safetensors"), 3),
                Command(("export", "{}", _OUT + "hf", "--format", "hf")),
                Command(("import", "{}", _OUT + "a.safetensors")),
            ),
            weight=0.7,
        )
        for name in ("mlm", "gpt", "llama")
    )
    return (*video_models, latents, *texts)


def _pth() -> tuple[Seed, ...]:
    commands = (
        Command(("import", "{}", _OUT + "a.safetensors"), 3),
        Command(("export", "{}", _OUT + "a.pth")),
        Command(("encode", "{}", _IN + "video.mp4", _OUT + "l.safetensors"), 0.3),
    )
    return (Seed(("published.pth", "video.mp4"), commands),)


def _text_models() -> tuple[Seed, ...]:
    """Returns transformers folders of language models, with commands that use them."""

    def of(name: str, use: Command, *, weight: float) -> Seed:
        more = (
            Command(("export", "{}", _OUT + "a.safetensors"), 3),
            Command(("export", "{}", _OUT + "hf", "--format", "hf"), 3),
            Command(("evaluate", "{}", "--data", _IN + "prompt.txt", "--max-tokens", "8"), 0.5),
        )
        more += (Command(("import", "{}", _OUT + "hf"), 3),)
        return Seed((f"hf-{name}", "prompt.txt"), (use, *more), "folder", weight=weight)

    fill = Command(("fill", "{}", _TEXT_TO_FILL), 1.5)
    generate = Command(("generate", "{}", "once upon", *_FEW), 1)
    return (
        of("mlm", fill, weight=1.3),
        of("gpt", generate, weight=1.0),
        of("llama", generate, weight=1.0),
    )


def _only(seeds: Sequence[Seed], name: str) -> tuple[Seed, ...]:
    """Returns the same inputs, of which only files with this name are changed."""
    return tuple(dataclasses.replace(seed, change=name) for seed in seeds)


def _videos(*names: str, tar: bool = False) -> tuple[Seed, ...]:
    model = "video_ae.safetensors"
    source = _IN + model
    single = (
        Command(("encode", source, "{}", _OUT + "l.safetensors"), 4),
        Command(("reconstruct", source, "{}", _OUT + "v.mp4"), 2),
    )
    commands = (
        Command(("prepare", "clips", "{}", _OUT + "clips", *_CLIPS, "--workers", "1"), 1),
        Command(("evaluate", source, "--data", "{}", *_SIZE), 3),
    )
    seeds = tuple(Seed((name, model), commands if tar else (*single, *commands)) for name in names)
    return seeds if tar else (*seeds, Seed(("videos", model), commands, "folder"))


def _lists() -> tuple[Seed, ...]:
    videos, model = ("video.mp4", "video.mkv"), "video_ae.safetensors"
    command = Command(("evaluate", _IN + model, "--data", "{}", *_SIZE))
    clips = ("prepare", "clips", "{}", _OUT + "clips", *_CLIPS, "--workers", "1")
    return tuple(
        Seed((f"list.{ending}", *videos, model), (command, Command(clips, 0.3)))
        for ending in ("jsonl", "csv", "txt")
    )


def _texts(*names: str) -> tuple[Seed, ...]:
    def tokens(config: str) -> Command:
        flags = ("--config", config, "--data.path", "{}", *_SMALL_TEXT)
        return Command(("prepare", "tokens", *flags))

    scored = Command(("evaluate", _IN + "hf-gpt", "--data", "{}", "--max-tokens", "8"), 0.3)
    both = (tokens("demo_mlm"), tokens("demo_gpt"))
    return tuple(
        Seed((name, "hf-gpt"), (*both, scored) if name.endswith(".txt") else both) for name in names
    )


def _folder_of_texts() -> tuple[Seed, ...]:
    flags = ("--data.path", "{}", *_SMALL_TEXT, "--data.max_bad_share", "0.7")
    commands = tuple(
        Command(("prepare", "tokens", "--config", config, *flags))
        for config in ("demo_mlm", "demo_gpt")
    )
    return (Seed(("texts",), commands, "folder"),)


def _tokenizers() -> tuple[Seed, ...]:
    flags = ("--data.path", _IN + "text.txt", "--data.tokenizer", "{}", *_SMALL_TEXT)
    command = Command(("prepare", "tokens", "--config", "demo_gpt", *flags))
    given = Seed(("tokenizer.json", "text.txt"), (command,), weight=2)
    return (given, *_only(_text_models(), "tokenizer.json"))


KINDS: dict[str, Kind] = {
    "safetensors": Kind(_safetensors(), 18),
    "pth": Kind(_pth(), 6, bounded=False),
    "hf": Kind(_text_models(), 8),
    "config": Kind(_only(_text_models(), "config.json"), 6),
    "tokenizer": Kind(_tokenizers(), 7),
    "txt": Kind(_texts("text.txt"), 2),
    "texts": Kind(_folder_of_texts(), 3),
    "jsonl": Kind(_texts("text.jsonl"), 4),
    "parquet": Kind(_texts("text.parquet"), 5, bounded=False),
    "tar": Kind(_videos("videos.tar", tar=True), 5),
    "video": Kind(_videos("video.mp4", "sound.mp4", "video.mkv", "video.webm"), 9),
    "list": Kind(_lists(), 3),
}


def make(kind: str, seed: int, valid: Path, folder: Path) -> Case:
    """Creates the input of a case.

    Args:
        folder: empty folder for the input, next to the one for output.
    """
    rng = random.Random(f"{kind}:{seed}")
    chosen: Seed = mutate.weighted(rng, [(one.weight, one) for one in KINDS[kind].seeds])
    command: Command = mutate.weighted(rng, [(one.weight, one) for one in chosen.commands])
    path = place(chosen, valid, folder)
    if chosen.change == "file":
        data = path.read_bytes()
        other = (valid / rng.choice(("video.mkv", "text.txt", "latents.safetensors"))).read_bytes()
        path.write_bytes(formats.by_name(rng, path, data, other))
        if rng.random() < 0.06:
            path = _renamed(rng, path)
    elif chosen.change == "folder":
        formats.folder(rng, path)
    else:
        formats.folder(rng, path, lambda file: file.name == chosen.change)
    return Case(command.arguments(relative(path, folder)), command)


def relative(path: Path, folder: Path) -> str:
    """Returns a path relative to the case's folder, for command lines."""
    inside = os.path.relpath(os.fsencode(path), os.fsencode(folder))
    return os.fsdecode(os.path.normpath(os.path.join(os.fsencode(INPUT), inside)))


def place(seed: Seed, valid: Path, folder: Path) -> Path:
    """Copies a valid input; returns the path to change."""
    for name in seed.files:
        source = valid / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copyfile(source, folder / name)
    return folder / seed.files[0]


def _renamed(rng: random.Random, path: Path) -> Path:
    """Gives a file a strange name with the same suffix; returns the new path."""
    name = rng.choice(formats.STRANGE_NAMES) + os.fsencode(path.suffix)
    target = os.path.join(os.fsencode(path.parent), name)
    os.rename(path, target)
    return Path(os.fsdecode(target))


def unchanged(accept: Callable[[str], bool] = lambda kind: True) -> list[tuple[str, Seed, Command]]:
    """Returns every valid input with every command that reads it, once."""
    found: dict[tuple[str, Command], tuple[str, Seed, Command]] = {}
    for kind, one in KINDS.items():
        for seed in one.seeds:
            for command in seed.commands:
                if accept(kind):
                    found.setdefault((seed.files[0], command), (kind, seed, command))
    return list(found.values())
