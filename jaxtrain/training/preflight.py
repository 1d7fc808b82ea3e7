"""What is wrong with a run, as far as one can tell before it opens its data: all of it at once."""

import dataclasses
import os
from collections.abc import Iterator, Sequence

from jaxtrain import config
from jaxtrain.checkpoint import resume
from jaxtrain.distributed import cluster_env, process_group
from jaxtrain.errors import InputError, Problem, fields_of
from jaxtrain.interop import weights
from jaxtrain.sharding import wrong_count
from jaxtrain.storage import addresses
from jaxtrain.storage.atomic import expanded
from jaxtrain.training import profiler, run_directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of the command line that are not config fields, as they were typed.

    Attributes:
        arguments: of the command line, to print what to type next; () where there was none.
    """

    output_dir: str | None = None
    resume: str | None = None
    simulate_devices: int | None = None
    debug: bool = False
    profile: str | None = None
    arguments: tuple[str, ...] = ()


def check(run: config.Run, *, resumes: bool) -> None:
    """Refuses a run that cannot start on this machine.

    Args:
        run: the config, by itself without problems.
        resumes: whether ``--resume`` is given: then the parameters come from a checkpoint.

    Raises:
        InputError: holds everything that was found.
    """
    if found := [*_devices(run), *unreadable(run, resumes=resumes)]:
        raise InputError(*found)


def refuse(run: config.Run, flags: Flags, wrong: Sequence[str] = ()) -> None:
    """Refuses what is wrong on a command line, and says what else is wrong with the run.

    Where nothing is, it passes at once: :func:`check` sees to the rest when all processes of the
    run are there.

    Args:
        run: the config.
        flags: of the command line.
        wrong: about overrides that could not be applied to the config.

    Raises:
        InputError: holds everything that was found.
    """
    alone = cluster_env.find(os.environ) is None
    found = [*config.problems(run), *_profile(run, flags.profile)]
    if is_address := flags.output_dir is not None and addresses.is_address(flags.output_dir):
        found.append(
            f"--output-dir {addresses.public(flags.output_dir)} is an address: name a folder"
        )
    if alone and not is_address:  # else process 0 decides, and the others hear of it
        found += _places(flags)
    if not found and not wrong:
        return
    if alone:  # the devices of other processes are not known yet
        process_group.connect(os.environ, flags.simulate_devices)
        found += _devices(run)
    found += unreadable(run, resumes=flags.resume is not None)
    raise InputError(*wrong, *_without_consequences(found, wrong))


def _without_consequences(found: Sequence[str], wrong: Sequence[str]) -> list[str]:
    """Without what may only follow from an override that could not be applied."""
    open_fields = {name for message in wrong for name in fields_of(message)}
    return [problem for problem in found if not open_fields.intersection(fields_of(problem))]


def _profile(run: config.Run, text: str | None) -> Iterator[str]:
    """Only a run whose steps are set has an end before its data is read."""
    try:
        span = profiler.span(text)
    except InputError as error:
        yield from error.messages
        return
    if span is not None and isinstance(run.loop.steps, int):
        wrong = profiler.too_late(span, run.loop.steps)
        if wrong:
            yield Problem(wrong, "loop.steps")


def _places(flags: Flags) -> Iterator[str]:
    """The folders that flags name. No checkpoint is read: that may take minutes."""
    if flags.output_dir is not None:
        yield from run_directory.problems(flags.output_dir, flags.resume)
    output_dir = None if flags.output_dir is None else expanded(flags.output_dir)
    yield from resume.problems(flags.resume, output_dir)


def unreadable(run: config.Run, *, resumes: bool = False, data: bool = True) -> Iterator[str]:
    """Files and folders that the run reads and that are not there; nothing is opened or fetched.

    Args:
        run: the config.
        resumes: whether the run resumes from a checkpoint.
        data: whether to look at the data too.
    """
    if run.model.init_from is not None and not resumes:
        try:
            weights.check_there(expanded(run.model.init_from))
        except InputError as error:
            yield Problem(f"model.init_from {error}", "model.init_from")
    if hasattr(run.model, "problems"):
        yield from run.model.problems()
    if data and hasattr(run.data, "problems"):
        yield from run.data.problems(run.model)


def _devices(run: config.Run) -> Iterator[str]:
    wrong = wrong_count(run.mesh)
    if wrong:
        yield Problem(wrong, "mesh.data", "mesh.fsdp", "data.batch_size", "optim.accumulate")
