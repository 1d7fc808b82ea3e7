"""Prints the end of a run: its results, where its files are, and the commands to type next."""

import array
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxtrain import config
from jaxtrain.config import invocation
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.errors import shortest_folder, shortest_path
from jaxtrain.models import from_file
from jaxtrain.telemetry.line import Field, Line
from jaxtrain.training.diagnosis.canaries import DiscriminatorAlarm
from jaxtrain.training.run_progress import RunProgress, unmet_gate
from jaxtrain.training.save_policy import patience_over
from jaxtrain.training.stopping import REASONS

_TRAIN = ("train/accuracy", "train/loss", "train/psnr")
_VAL = (
    *("val/accuracy", "val/loss", "val/bits_per_byte", "val/pseudo_perplexity"),
    *("val/psnr", "val/ssim"),
)
# A training metric comes from a single batch, so the summary compares means over the first and
# the last tenth of the steps, and over at least this many.
_LEAST_WINDOW = 3


class Results:
    """Collects the training metrics of each step, which the end-of-run summary compares."""

    def __init__(self, first_step: int, say: Callable[[str], None] = lambda line: None) -> None:
        self._first_step, self._alarm = first_step, DiscriminatorAlarm(say)
        self._values = {name: array.array("d") for name in _TRAIN}

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step."""
        self._alarm.stepped(values)
        for name, of_steps in self._values.items():
            if name in values:
                of_steps.append(values[name])

    def lines(self, validations: Sequence[Mapping[str, float]]) -> list[Line]:
        """Returns a line for the training metrics and one for validation.

        Training metrics are compared with their beginning only if there are two separate windows of
        steps; otherwise their mean is shown. A validation repeats the same examples, so the first
        one of the run is compared with the last one.
        """
        steps = max(len(values) for values in self._values.values())
        window = max(_LEAST_WINDOW, steps // 10)
        compares = steps >= 2 * window
        windows = [slice(0, window), slice(-window, None)] if compares else [slice(None)]
        train = [
            _change(name, [_mean(values[window]) for window in windows])
            for name, values in self._values.items()
            if values
        ]
        if train and steps > 1:
            means = f"means of {window} steps" if compares else f"mean of {steps} steps"
            train[-1] += (
                f" ({means}{f' since step {self._first_step}' if self._first_step else ''})"
            )
        val = [
            _change(name, [f"{values[name]:.4g}" for values in (validations[0], validations[-1])])
            for name in _VAL
            if validations and name in validations[0] and name in validations[-1]
        ]
        return [Line(tuple(map(Field, fields)), ", ") for fields in (train, val) if fields]


def _change(name: str, values: Sequence[str]) -> str:
    return f"{name} {' -> '.join(dict.fromkeys(values))}"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4g}"


def ending(
    run: config.Run, step: int, total: int, decision: int, stopped_early: bool, why: str = ""
) -> str:
    """Returns why a run has ended, and how many of its steps are done."""
    if decision:
        reason = f"{REASONS[decision]}: {why}" if why else REASONS[decision]
        return f"{reason}; {step} of {total} steps are done and saved"
    if stopped_early and step < total:
        return (
            f"stopped early: {run.loop.early_stop_patience} validations without a better "
            f"{run.checkpoint.best_metric}; {step} of {total} steps are done and saved"
        )
    return f"done: {step} of {total} steps"


def nothing_to_do(run: config.Run, step: int, total: int, run_progress: RunProgress) -> str | None:
    """Returns why there is nothing left to train; None if there is something."""
    if unmet := unmet_gate(run.loop, run_progress):
        return (
            f"nothing to do: gate {unmet.gate} was not met after {unmet.step} steps; to continue "
            "nevertheless, remove it from --loop.gates, or go back with --resume STEP"
        )
    if step >= total and not run_progress.validation_due:
        (length,) = _twice_as_long(run.loop)
        return (
            f"nothing to do: {step} steps are done and the run has {total}; to train longer, "
            f"raise {length}"
        )
    if patience_over(run.loop, run_progress):
        return (
            f"nothing to do: early stopping ended this run after {step} steps; "
            f"to resume it, raise --loop.early_stop_patience (now {run.loop.early_stop_patience})"
        )
    return None


def train_arguments(run: config.Run, flags: RunFlags) -> Sequence[str]:
    """Returns the arguments of the command line.

    For a run started from Python, these are arguments that give the same run, or () if none do.
    """
    if flags.arguments:
        return flags.arguments
    arguments = config.equivalent_arguments(run)
    if arguments and flags.simulate_devices:
        arguments = (*arguments, "--simulate-devices", str(flags.simulate_devices))
    if arguments and flags.track:
        arguments = (*arguments, "--track", ",".join(flags.track))
    return arguments


def print_summary(
    run: config.Run,
    program: str,
    arguments: Sequence[str],
    directory: Path | str,
    *,
    results: Results,
    validations: Sequence[Mapping[str, float]],
    example_file: str,
    stopped_early: bool,
    processes: int,
    say: Callable[[str | Line], None],
) -> None:
    """Prints the results of a complete run, its directory, and at most three commands.

    Args:
        arguments: of the command line; empty if no command line gives this run.
        directory: of the run, or its URL.
        example_file: an input file on which to try the model; "" prints a placeholder.
    """
    for line in results.lines(validations):
        say(line)
    location = _location(directory)
    say(f"run directory: {location}")
    quoted = shlex.quote(location)
    # In the run directory, an output does not appear in git status. Buckets take no output.
    out = "" if isinstance(directory, str) else f"{quoted}/"
    file = shlex.quote(example_file or "IN.mp4")
    usage, export_usage = usages(run, arguments)
    if usage:
        say(f"try it: {program} {usage.format(run=quoted, input=file, out=out)}")
    longer = _more_patience(run.loop) if stopped_early else _twice_as_long(run.loop)
    each = in_each(processes)
    say(f"resume for longer{each}: {resume_command(program, arguments, directory, longer)}")
    if run.data.path is None and arguments:
        same_command = invocation.again(program, "train", arguments, {"--data.path": "DIR"})
        say(f"train on your own data{each}: {same_command}")
    elif export_usage:
        say(f"export the weights: {program} {export_usage.format(run=quoted, out=out)}")


def usages(run: config.Run, arguments: Sequence[str]) -> tuple[str, str]:
    """Returns the commands that use and export the model, see ``ModelConfig.usage``.

    With ``--config``, if the model is not part of jaxtrain.
    """
    commands = (run.model.usage, run.model.export_usage)
    if from_file.file_of(run.model) is None or "--config" not in arguments[:-1]:
        return commands
    file = shlex.quote(arguments[list(arguments).index("--config") + 1])
    config_argument = f" --config {file}".replace("{", "{{").replace("}", "}}")
    use, export = (f"{command}{config_argument}" if command else "" for command in commands)
    return use, export


def write_report(directory: Path, say: Callable[[str], None], largest: float = math.inf) -> None:
    """Writes ``report.html`` of a run that has ended, and prints its path.

    A failure is only a warning.
    """
    try:
        from jaxtrain.reporting import page, planned, run_files

        records = directory / run_files.METRICS
        if records.is_file() and records.stat().st_size <= largest:
            (run,) = page.write([directory], directory / page.NAME, holders=[""])
            for line in planned.deviations(run):
                say(line)
            say(f"report: {shortest_path(str(directory / page.NAME))}")
    except Exception as error:
        why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
        say(
            f"warning: {directory}/report.html was not written ({why}); to try again: "
            f"`{invocation.program()} report {shlex.quote(str(directory))}`"
        )


def in_each(processes: int) -> str:
    """Returns a note on where to run a command, if there are several processes."""
    return "" if processes == 1 else f" (in each of {processes} processes, or with the launcher)"


def resume_command(
    program: str,
    arguments: Sequence[str],
    directory: Path | str,
    longer: dict[str, str] | None = None,
) -> str:
    """Returns the command that resumes a run; if no command does, an explanation.

    Args:
        arguments: of the command line; empty if no command line gives this run.
    """
    if not arguments:
        changes = ", ".join(f'"{name[2:]}": {value}' for name, value in (longer or {}).items())
        more = f", overrides={{{changes}}}" if changes else ""
        return (
            "this run was built in Python; to resume it, pass "
            f'output_dir={str(directory)!r}, resume="latest"{more}'
        )
    again = {"--output-dir": _location(directory), "--resume": "latest"}
    return invocation.again(program, "train", arguments, again | (longer or {}))


def _location(directory: Path | str) -> str:
    return directory if isinstance(directory, str) else shortest_folder(str(directory))


def fit_command(program: str, arguments: Sequence[str]) -> str:
    """Returns the command that looks for overrides with which a run fits its GPUs."""
    if not arguments:
        return ""
    without: dict[str, str | None] = {"--simulate-devices": None, "--track": None}
    return f"{invocation.again(program, 'plan', arguments, without)} --fit"


def find_nan_command(program: str, config_name: str, directory: Path | str) -> str:
    """Returns the command that examines the bad step that a run has saved.

    Args:
        config_name: a shipped config, or the path of a file, which may define the model.
    """
    own = ("--config", config_name) if config_name.endswith(".py") else ()
    return f"{program} find-nan {shlex.join([_location(directory), *own])}"


def _more_patience(settings: config.Loop) -> dict[str, str]:
    assert settings.early_stop_patience is not None, "it stopped the run"
    patience, steps = 2 * settings.early_stop_patience, settings.steps
    reachable = steps is None or patience <= config.most_patience(settings, steps)
    return {"--loop.early_stop_patience": str(patience if reachable else None)}


def _twice_as_long(settings: config.Loop) -> dict[str, str]:
    for name in ("steps", "epochs", "tokens_per_param"):
        length = getattr(settings, name)
        if length is not None:
            return {f"--loop.{name}": str(2 * length)}
    raise AssertionError("config.validate() ensures that one is set")
