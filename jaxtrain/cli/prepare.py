"""Prepares data before training: cuts videos, tokenizes text, computes latents."""

from jaxtrain import terminal
from jaxtrain.errors import InputError

_USAGE = """\
jaxtrain prepare clips SOURCE OUT [flags]
       jaxtrain prepare tokens --config NAME [--section.field VALUE ...]
       jaxtrain prepare latents --config NAME --teacher PATH [flags]
                                [--section.field VALUE ...]
"""
_CLIPS = """\
Cuts videos into short clips at training size. Reading random training clips from
these is several times as fast. To resume after a stop, repeat the command.
"""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        terminal.out(f"usage: {_USAGE}\n{__doc__}\n\nFor the flags of a command, add --help to it.")
        return 0
    if arguments[0] == "clips":
        return _clips(arguments[1:])
    if arguments[0] == "latents":
        from jaxtrain.cli import prepare_latents

        return prepare_latents.main(arguments[1:])
    if arguments[0] == "tokens":
        from jaxtrain.cli import prepare_tokens

        return prepare_tokens.main(arguments[1:])
    raise InputError(f"prepare: unknown action {arguments[0]}; use clips, tokens, or latents")


def _clips(arguments: list[str]) -> int:
    from jaxtrain.cli import command_line, job_flags
    from jaxtrain.data import jobs
    from jaxtrain.data.video import pieces, prepare_clips

    default = pieces.Settings()
    usage = "jaxtrain prepare clips SOURCE OUT [flags]"
    parser = command_line.bare_parser("prepare clips", usage, _CLIPS)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="the original videos, as --data.path accepts them")
    add(
        "out",
        metavar="OUT",
        help="folder of the prepared clips, to be used as --data.path; may be s3://BUCKET/PATH or "
        "gs://BUCKET/PATH",
    )
    numbers = {
        "height": "height of a training clip, pixels",
        "width": "width of a training clip, pixels",
        "min-crop-scale": "smallest data.min_crop_scale that the clips are large enough for",
        "frames": "maximum frames per prepared clip",
        "min-frames": "minimum frames per prepared clip; shorter pieces are dropped",
        "min-side": "minimum length of a video's shorter side, pixels; smaller videos are dropped",
        "gop": "frames between keyframes",
        "quantizer": "MPEG-4 quality, from 1 (best) to 31",
    }
    for name, what in numbers.items():
        value = getattr(default, name.replace("-", "_"))
        text = f"{what} (default: {value})"
        add(f"--{name}", type=type(value), default=value, metavar="N", help=text)
    add("--keep-cuts", action="store_true", help="do not split at hard cuts")
    job_flags.add(parser)
    flags = command_line.parse_all(parser, arguments)
    if flags is None:
        return 0
    engine, part = job_flags.engine(flags), job_flags.part(flags)
    given = {field: vars(flags)[field] for field in (name.replace("-", "_") for name in numbers)}
    settings = pieces.Settings(split_at_cuts=not flags.keep_cuts, **given)
    say = terminal.say
    with command_line.resumable("videos"):
        outcome = prepare_clips.run(
            flags.source, flags.out, settings, engine=engine, say=say, part=part
        )
    totals, videos = outcome.totals, outcome.made + outcome.skipped
    listed_in = f"{flags.out.rstrip('/')}/{jobs.REPORT}"
    say(
        f"{f'{part}: ' if part.count > 1 else ''}{_counted(totals.get('pieces', 0), 'clip')}, "
        f"{_counted(totals.get('frames', 0), 'frame')}, from {_counted(videos, 'video')}; excluded "
        f"{_counted(len(outcome.failed), 'video')} and "
        f"{_counted(totals.get('frames_left_out', 0), 'frame')}"
        + ("" if outcome.left else f" (see {listed_in})")
    )
    if outcome.left:
        return outcome.exit_code
    if not videos and part.count == 1:
        raise InputError(
            f"no clip could be cut from {_counted(len(outcome.failed), 'video')}; see {listed_in}"
        )
    say(f"train with --data.path {flags.out}")
    return outcome.exit_code


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
