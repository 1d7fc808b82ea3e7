"""What is wrong with a run, as far as one can tell before it opens its data: all of it at once."""

import os
from collections.abc import Iterator

from jaxtrain import config
from jaxtrain import sharding as meshes
from jaxtrain.distributed import cluster_env, process_group
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.storage.atomic import expanded


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


def refuse(run: config.Run, *, resumes: bool, simulate_devices: int | None) -> None:
    """Refuses a config that is wrong by itself, and says what else is wrong with the run.

    A config that is right passes at once: :func:`check` sees to the rest when all processes of
    the run are there.

    Args:
        run: the config.
        resumes: whether ``--resume`` is given.
        simulate_devices: virtual CPU devices; None uses what is there.

    Raises:
        InputError: holds everything that was found.
    """
    if not (found := config.problems(run)):
        return
    if cluster_env.find(os.environ) is None:  # the devices of other processes are not known yet
        process_group.connect(os.environ, simulate_devices)
        found += _devices(run)
    raise InputError(*found, *unreadable(run, resumes=resumes))


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
            yield f"model.init_from {error}"
    if hasattr(run.model, "problems"):
        yield from run.model.problems()
    if data and hasattr(run.data, "problems"):
        yield from run.data.problems(run.model)


def _devices(run: config.Run) -> Iterator[str]:
    wrong = meshes.wrong_count(run.mesh)
    if wrong:
        yield wrong
