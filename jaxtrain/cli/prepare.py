"""``jaxtrain prepare``: work on the data that is done once, before training."""

import argparse
import os
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.config import invocation
from jaxtrain.errors import InputError

_USAGE = """\
jaxtrain prepare clips SOURCE OUT [flags]
       jaxtrain prepare tokens --config NAME [--section.field value ...]
       jaxtrain prepare latents --config NAME --teacher SPEC [flags] [--section.field value ...]
"""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        terminal.out(f"usage: {_USAGE}\n{__doc__}\n\nEach has a --help of its own.")
        return 0
    if arguments[0] == "clips":
        return _clips(arguments[1:])
    if arguments[0] == "latents":
        from jaxtrain.cli import prepare_latents

        return prepare_latents.main(arguments[1:])
    if arguments[0] == "tokens":
        from jaxtrain.cli import prepare_tokens

        return prepare_tokens.main(arguments[1:])
    raise InputError(
        f"prepare takes clips, tokens or latents, not {arguments[0]}; see prepare --help"
    )


def _clips(arguments: list[str]) -> int:
    from jaxtrain.data.video import pieces, prepare_clips

    default = pieces.Settings()
    parser = argparse.ArgumentParser(
        prog="jaxtrain prepare clips",
        description="Cut videos once into short pieces at training size, from which random clips "
        "are read several times as fast. A run that was stopped goes on with the same command.",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    # Not required here: argparse would print its usage and leave.
    add("source", metavar="SOURCE", nargs="?", help="what --data.path takes")
    add("out", metavar="OUT", nargs="?", type=Path, help="folder of the pieces, then --data.path")
    numbers = {
        "height": "of a training clip (pixels)",
        "width": "of a training clip (pixels)",
        "min-crop-scale": "the config's data.min_crop_scale: pieces leave room for its crops",
        "frames": "of a piece, at most",
        "min-frames": "of a piece; shorter ends are left out",
        "min-side": "videos whose shorter side is below are dropped (pixels)",
        "gop": "frames from one keyframe to the next",
        "crf": "quality of x264, 0 (lossless) to 51",
    }
    for name, what in numbers.items():
        value = getattr(default, name.replace("-", "_"))
        add(f"--{name}", type=type(value), default=value, metavar="N", help=f"{what} ({value})")
    add("--keep-cuts", action="store_true", help="let a piece go on over a hard cut")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--workers", type=int, default=cores, metavar="N", help=f"processes ({cores})")
    if not arguments or set(arguments) & {"--help", "-h"}:
        parser.print_help()
        return 0
    try:
        flags, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see {invocation.program()} prepare clips --help") from None
    if flags.out is None:
        raise InputError(
            f"prepare clips takes SOURCE and OUT; see {invocation.program()} prepare clips --help"
        )
    if rest:
        raise InputError(f"prepare clips does not take {' '.join(rest)}; see its --help")
    if flags.workers < 1:
        raise InputError(f"--workers {flags.workers}: use at least 1")
    settings = pieces.Settings(
        split_at_cuts=not flags.keep_cuts,
        **{name.replace("-", "_"): getattr(flags, name.replace("-", "_")) for name in numbers},
    )

    def say(message: str) -> None:
        terminal.say(message)

    report = prepare_clips.run(flags.source, flags.out, settings, workers=flags.workers, say=say)
    place = flags.out / prepare_clips.REPORT
    say(
        f"{_counted(report['pieces'], 'piece')}, {_counted(report['frames'], 'frame')}, "
        f"of {_counted(report['cut'], 'video')}; "
        f"{_counted(len(report['dropped']), 'video')} dropped, "
        f"{_counted(report['frames_left_out'], 'frame')} left out ({place} says why)"
    )
    if not report["pieces"]:
        raise InputError(
            f"none of {_counted(report['videos'], 'video')} gave a piece; {place} says why"
        )
    say(f"train with --data.path {flags.out}")
    return 0


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
