"""``jaxtrain compare``: tells whether a change is better."""

import shlex
from pathlib import Path
from typing import Any

from jaxtrain import comparison, terminal
from jaxtrain.cli import command_line, commands
from jaxtrain.comparison import experiment
from jaxtrain.comparison.code import Code
from jaxtrain.comparison.side import Side
from jaxtrain.config import files
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic

# Flags without an effect on runs that exist.
_OF_TRAINING = (
    *("change", "change_code", "at", "fit_time", "pairs", "hours", "output_dir", "runs"),
    *("keep_checkpoints", "simulate_devices"),
)


def main(flags: commands.Compare) -> int:
    """Runs the command and returns its exit code, which says the verdict."""
    names = (flags.config, *flags.others)
    folders = [atomic.expanded(name) for name in names]
    # A folder may have the name of a shipped config, which is meant then.
    if all(folder.is_dir() for folder in folders) and not {*names} & {*files.names()}:
        answers = [_existing(flags, folders)]
        content: dict[str, Any] = {
            "metric": answers[0].metric,
            "better": answers[0].mode,
            "level": answers[0].level,
            "seconds": answers[0].seconds,
            "answers": [answer.to_dict() for answer in answers],
        }
    else:
        folder, answers = _trained(flags, names)
        content = atomic.read_json(folder / experiment.NAME)
    if flags.json is not None:
        atomic.write_json(flags.json, content)
    return min(experiment.VERDICTS[answer.verdict] for answer in answers)


def _existing(flags: commands.Compare, folders: list[Path]) -> experiment.Comparison:
    reason = "compare of runs that exist trains nothing"
    command_line.refuse(flags, _OF_TRAINING, reason)
    if flags.overrides:
        raise InputError(f"{' '.join(flags.overrides)}: {reason}; omit it")
    if len(folders) % 2:
        raise InputError(
            f"compare takes pairs of runs, but {len(folders)} folders are given: add the other run "
            f"of {folders[-1]}"
        )
    pairs = list(zip(folders[::2], folders[1::2], strict=True))
    answer = experiment.of_existing(pairs, flags.metric, flags.practical)
    terminal.out(experiment.summary(answer))
    for warning in answer.warnings:
        terminal.out(f"warning: {warning}")
    return answer


def _trained(
    flags: commands.Compare, names: tuple[str, ...]
) -> tuple[Path, list[experiment.Comparison]]:
    if len(names) > 2:
        raise InputError(
            f"compare takes two configs, not {len(names)}: {' '.join(names)}; or pairs of run "
            "directories that exist"
        )
    if len(names) == 1 and not flags.change and not flags.change_code:
        raise InputError(
            f'what is compared with {names[0]}? Add --change "--section.field VALUE", '
            "--change-code REV, or another config"
        )

    def side(name: str, change: list[str], revision: str = "") -> Side:
        arguments = [name, *flags.overrides, *change]
        description = shlex.join(arguments) + (f" (code of {revision})" if revision else "")
        return Side(
            name, tuple(arguments[1:]), description, Code.of(name, revision) if revision else None
        )

    changed = [side(names[-1], shlex.split(change)) for change in flags.change]
    changed += [side(names[-1], [], revision) for revision in flags.change_code]
    sides = [side(names[0], []), *(changed or [side(names[-1], [])])]
    question = experiment.Question(
        sides=tuple(sides),
        metric=flags.metric,
        practical=flags.practical,
        at=flags.at,
        fit_s=None if flags.fit_time is None else experiment.seconds(flags.fit_time),
        pairs=flags.pairs,
        hours=flags.hours,
        keep_checkpoints=flags.keep_checkpoints,
        simulate_devices=flags.simulate_devices,
    )
    folder = flags.output_dir or experiment.default_folder(question)
    with command_line.resumable("runs"):
        answers = comparison.compare(question, folder, flags.runs, terminal.out)
    return folder, list(answers)
