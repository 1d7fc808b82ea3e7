"""``jaxtrain prepare clips``: cuts videos into pieces at training size."""

import dataclasses

from jaxtrain import terminal
from jaxtrain.cli import command_line, commands, job_flags
from jaxtrain.data.video import pieces, prepare_clips
from jaxtrain.errors import InputError
from jaxtrain.formats import counted
from jaxtrain.jobs import resumable


def main(flags: commands.PrepareClips) -> int:
    """Runs the command and returns its exit code."""
    engine, part = job_flags.engine(flags), job_flags.part(flags)
    names = {field.name for field in dataclasses.fields(pieces.Settings)}
    values = {name: value for name, value in vars(flags).items() if name in names}
    settings = pieces.Settings(split_at_cuts=not flags.keep_cuts, **values)
    say = terminal.say
    with command_line.resumable("videos"):
        outcome = prepare_clips.run(
            flags.source, flags.out, settings, engine=engine, say=say, part=part
        )
    totals, videos = outcome.totals, outcome.made + outcome.skipped
    listed_in = f"{flags.out.rstrip('/')}/{resumable.REPORT}"
    say(
        f"{f'{part}: ' if part.count > 1 else ''}{counted(totals.get('pieces', 0), 'clip')}, "
        f"{counted(totals.get('frames', 0), 'frame')}, from {counted(videos, 'video')}; excluded "
        f"{counted(len(outcome.failed), 'video')} and "
        f"{counted(totals.get('frames_left_out', 0) + totals.get('frames_lost', 0), 'frame')}"
        + ("" if outcome.left else f" (see {listed_in})")
    )
    if outcome.left:
        return outcome.exit_code
    if not videos and part.count == 1:
        raise InputError(
            f"no clip could be cut from {counted(len(outcome.failed), 'video')}; see {listed_in}"
        )
    say(f"train with --data.path {flags.out}")
    return outcome.exit_code
