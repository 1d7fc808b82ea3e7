"""What a run prints at its end: what it reached, where its files are, what to type next."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxtrain import config
from jaxtrain.config import invocation
from jaxtrain.training.preflight import Flags
from jaxtrain.training.save_policy import RunMeta, patience_over
from jaxtrain.training.stopping import REASONS

# What the last lines of a run compare with its beginning.
IN_SUMMARY = (
    *("train/accuracy", "train/loss", "train/psnr"),
    *("val/accuracy", "val/loss", "val/bits_per_byte", "val/pseudo_perplexity"),
    *("val/psnr", "val/ssim"),
)
# Flags of one run that the next one need not repeat.
_OF_THIS_RUN = ("--output-dir", "--resume", "--profile", "--debug")


def ending(run: config.Run, done: int, total: int, decision: int, stopped_early: bool) -> str:
    """Why a run has ended, and how many of its steps are done.

    Args:
        run: the config.
        done: completed steps.
        total: steps of the complete run.
        decision: of :class:`jaxtrain.training.stopping.Stopping`.
        stopped_early: whether validations brought nothing better for too long.
    """
    if decision:
        return f"{REASONS[decision]}; {done} of {total} updates are done and saved"
    if stopped_early and done < total:
        return (
            f"stopped early: {run.loop.early_stop_patience} validations without a better "
            f"{run.checkpoint.best_metric}; {done} of {total} updates are done and saved"
        )
    return f"done: {done} of {total} updates"


def nothing_to_do(run: config.Run, done: int, total: int, meta: RunMeta) -> str | None:
    """Why there is nothing left to train; None if there is.

    Args:
        run: the config.
        done: completed steps.
        total: steps of the complete run.
        meta: of the checkpoint.
    """
    if done >= total and not meta.evaluation_due:
        return f"nothing to do: {done} updates are done, the run has {total}"
    if patience_over(run.loop, meta):
        return (
            f"nothing to do: early stopping ended this run after {done} updates; "
            f"raise --loop.early_stop_patience (now {run.loop.early_stop_patience}) to go on"
        )
    return None


def typed(run: config.Run, flags: Flags) -> Sequence[str]:
    """The command line; from Python one that gives the same run, or empty where there is none."""
    if flags.arguments:
        return flags.arguments
    words = config.as_typed(run)
    if words and flags.simulate_devices:
        return (*words, "--simulate-devices", str(flags.simulate_devices))
    return words


def print_summary(
    run: config.Run,
    program: str,
    arguments: Sequence[str],
    directory: Path,
    *,
    first: Mapping[str, float],
    last: Mapping[str, float],
    samples: Sequence[Path],
    since: int,
    stopped_early: bool,
    processes: int,
    say: Callable[[str], None],
) -> None:
    """Prints what a complete run reached, where its files are, and how to continue.

    Args:
        run: the config.
        program: what was typed before the arguments.
        arguments: of the command line.
        directory: of the run.
        first: each metric's first value.
        last: each metric's last value.
        samples: files that validations made.
        since: completed updates when this start began, of which ``first`` is the first.
        stopped_early: whether it ended because validations brought nothing better.
        processes: of the run; each wants the command line.
        say: takes a line.
    """
    for name in IN_SUMMARY:
        if name in last:
            same = first[name] == last[name]
            before = "" if same else f"{first[name]:.4g} -> "
            when = f" (first and last since update {since})" if since and not same else ""
            say(f"{name}: {before}{last[name]:.4g}{when}")
    if samples:
        last_step = samples[-1].stem.rpartition("_")[2]
        newest = [str(path) for path in samples if path.stem.endswith(f"_{last_step}")]
        say(f"samples: {', '.join(newest)}")
    say(f"checkpoints: {directory / 'checkpoints'}")
    logs = shlex.quote(str(directory / "tensorboard"))
    say(f"curves (after pip install tensorboard): tensorboard --logdir {logs}")
    if hasattr(run.model, "usage"):
        say(f"use it: {program} {run.model.usage.format(run=shlex.quote(str(directory)))}")
    longer = _more_patience(run.loop) if stopped_early else _twice_as_long(run.loop)
    each = in_each(processes)
    say(f"train on{each}: {resume_command(program, arguments, directory, longer)}")
    if run.data.path is None and arguments:
        own = _again(program, arguments, {"--data.path": "DIR"})
        say(f"train on your own data{each}: {own}")


def write_report(directory: Path, say: Callable[[str], None]) -> None:
    """Writes ``report.html`` of a run that has ended, and prints where it is.

    If it cannot be written, that is a warning, and changes nothing else.

    Args:
        directory: of the run.
        say: takes a line.
    """
    try:
        from jaxtrain.reporting import page, run_files

        if (directory / run_files.METRICS).is_file():
            page.write([directory], directory / page.NAME, own=True)
            say(f"report: {directory / page.NAME}")
    except Exception as wrong:
        why = (isinstance(wrong, OSError) and wrong.strerror) or f"{type(wrong).__name__}: {wrong}"
        say(
            f"warning: {directory}/report.html was not written ({why}): "
            f"`{invocation.program()} report {shlex.quote(str(directory))}` tries again"
        )


def in_each(processes: int) -> str:
    """Said before the colon of a command line: where it is to be typed."""
    return "" if processes == 1 else f" (in each of {processes} processes, or with the launcher)"


def resume_command(
    program: str, arguments: Sequence[str], directory: Path, longer: dict[str, str] | None = None
) -> str:
    """The command line that resumes a run, or, where there is none, how to resume it in words.

    Args:
        program: what was typed before the arguments.
        arguments: of the command line; empty for a run that no command line gives.
        directory: of the run.
        longer: overrides that take the place of what was typed.
    """
    if not arguments:
        more = "".join(f" and {name[2:]}={value}" for name, value in (longer or {}).items())
        return (
            "this run was built in Python; the same program resumes it with "
            f'output_dir={str(directory)!r}, resume="latest"{more}'
        )
    again = {"--output-dir": str(directory), "--resume": "latest"}
    return _again(program, arguments, again | (longer or {}))


def fit_command(program: str, arguments: Sequence[str]) -> str:
    """The command line that looks for changes with which a run fits its GPUs; may be empty.

    Args:
        program: what was typed before the arguments.
        arguments: of the command line; empty for a run that no command line gives.
    """
    if not arguments:
        return ""
    return f"{_again(f'{program} plan', arguments, {'--simulate-devices': None})} --fit"


def _again(program: str, arguments: Sequence[str], changes: Mapping[str, str | None]) -> str:
    """The command line again, each flag once, without those of this run alone; None is without."""
    settings: dict[str, list[str]] = {}
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            settings[flag] = [value] if equals else []
        elif flag:
            settings[flag].append(argument)
    for name in (*_OF_THIS_RUN, *changes):
        settings.pop(name, None)
    settings |= {name: [value] for name, value in changes.items() if value is not None}
    words = (word for name, values in settings.items() for word in (name, *values))
    return f"{program} {shlex.join(words)}"


def _more_patience(settings: config.Loop) -> dict[str, str]:
    assert settings.early_stop_patience is not None, "it stopped the run"
    return {"--loop.early_stop_patience": str(2 * settings.early_stop_patience)}


def _twice_as_long(settings: config.Loop) -> dict[str, str]:
    """The override that doubles the run, of the field that determines its length."""
    for name in ("steps", "epochs", "tokens_per_param"):
        length = getattr(settings, name)
        if length is not None:
            return {f"--loop.{name}": str(2 * length)}
    raise AssertionError("config.validate() holds that one is set")
