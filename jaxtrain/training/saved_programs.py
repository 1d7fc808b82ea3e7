"""Saves a run's compiled programs, and loads them in a run that they match.

``plan --save DIR`` writes them, on a machine that may have no GPU; a run with ``--compiled DIR``
loads them and starts without compiling. The folder contains::

    programs.json   what the programs depend on, and the checksum of each
    init.bin        the initial state
    step.bin        the training step

A ``.bin`` is what jax serializes; loading it can run any code
(:func:`jax.experimental.serialize_executable.deserialize_and_load` unpickles it), so load only
folders that you trust. The checksums detect damage, not forgery.

A program computes wrong numbers, or crashes, if anything that it depends on differs. Hence a run
compares everything that :func:`dependencies` lists before it opens a ``.bin``, and compiles as
usual if anything differs.
"""

import functools
import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxtrain import config
from jaxtrain.config import invocation
from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import atomic
from jaxtrain.training.state import State
from jaxtrain.xla.options import BackgroundCompilation

INDEX = "programs.json"
INIT, STEP = "init", "step"
_LARGEST_INDEX = 2**20  # bytes
_LARGEST_PROGRAM = 2**31
_MOST_ARGUMENTS = 10**6

_AGAIN = "write the folder again with jaxtrain plan --save"

_PACKAGE = Path(__file__).resolve().parents[1]

# Fields that no program depends on: what a run reads, when it validates and saves, and its name.
# The batch size and the number of steps are listed separately.
_NOT_COMPILED = ("name", "data.", "loop.", "checkpoint.", "model.init_from")

# Settings of jax that change a program, whether set in the environment or in Python.
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)
# XLA flags that change no program.
_OTHER_XLA_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")

# Packages whose code is traced or compiles.
_PACKAGES = ("jax", "jaxlib", "flax", "optax")
_GPU_PACKAGES = ("jax-cuda", "nvidia-")  # XLA's compiler for GPUs, cuDNN, cuBLAS, NCCL, ptxas


class Mismatch(Exception):
    """The programs were compiled for something else; the message names it and both values."""


def known_without_data(run: config.Run) -> bool:
    """Returns whether :func:`dependencies` are known before the data and the model are opened.

    The number of steps may depend on both. A model outside of this package may import some of its
    code only when it is built.
    """
    return run.loop.steps is not None and _is_ours(type(run.model))


def dependencies(
    run: config.Run,
    total: int,
    devices: Sequence[jax.Device],
    processes: int,
    *,
    donate: bool = True,
) -> dict[str, str]:
    """Returns everything that the programs depend on, by name.

    Args:
        run: the config.
        total: steps of the complete run; the schedule is compiled in.
        devices: of the mesh, in its order; may be described only.
        processes: of the run, each with as many devices.
        donate: whether the step reuses the memory of its state.
    """
    found = {
        name: str(value)
        for name, value in config.flat(config.to_dict(run)).items()
        if not name.startswith(_NOT_COMPILED)
    }
    batch = run.batch_spec(run.data.batch_size)
    found |= {
        "data.batch_size": str(run.data.batch_size),
        # Prepared clips are sent as planes, which depends on the folder (data.convert_on).
        "batch": ", ".join(f"{name} {one.dtype}{list(one.shape)}" for name, one in batch.items()),
        "number of steps": str(total),
        "number of devices": str(len(devices)),
        "number of processes": str(processes),
        "device": devices[0].device_kind,
        "buffer donation": str(donate),
        "jaxtrain's code": _digest(_PACKAGE.rglob("*.py"), _PACKAGE),
        "the model's code": _own_code(type(run.model)),
        "Python": platform.python_version(),
        "XLA_FLAGS": " ".join(
            sorted(
                flag
                for flag in shlex.split(os.environ.get("XLA_FLAGS", ""))
                if not flag.startswith(_OTHER_XLA_FLAGS)
            )
        ),
    }
    # Not all of them are attributes of jax.config.
    found |= {name: str(jax.config.values.get(name)) for name in _JAX_SETTINGS}
    on_cpu = devices[0].platform == "cpu"
    found |= {package: metadata.version(package) for package in _PACKAGES}
    if on_cpu:
        found["processor"] = _processor()
    else:
        installed = {one.name.lower(): one.version for one in metadata.distributions()}
        found |= {
            name: version
            for name, version in sorted(installed.items())
            if name.startswith(_GPU_PACKAGES) and name != "nvidia-ml-py"
        }
    return found


def save(
    folder: Path,
    programs: Mapping[str, jax.stages.Compiled],
    metrics: Sequence[str],
    depends_on: Mapping[str, str],
) -> None:
    """Writes compiled programs to a folder, and replaces those that are in it.

    They must have been compiled, not taken from jax's compilation cache: a CPU program from the
    cache is saved and loaded without an error, but fails when it runs (jax 0.10.2: "Function
    wrapped_broadcast.7 not found").

    Args:
        folder: made if it does not exist.
        programs: :data:`INIT` and :data:`STEP`.
        metrics: names that the step returns.
        depends_on: from :func:`dependencies`.
    """
    folder.mkdir(exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # it appears last, so that a folder is complete
    files = {}
    for name, program in programs.items():
        content, _, _ = serialize_executable.serialize(program)
        atomic.write_whole(folder / f"{name}.bin", content)
        files[name] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "arguments": len(jax.tree.leaves(program.args_info)),
        }
    index = {"depends_on": dict(depends_on), "metrics": sorted(metrics), "programs": files}
    atomic.write_whole(folder / INDEX, json.dumps(index, indent=1).encode() + b"\n")


class SavedPrograms:
    """The programs of a folder, which threads load while the run starts.

    Linking a program takes seconds on a CPU: XLA compiles each kernel to an object file of its own,
    428 for the step of ``demo``. Python runs meanwhile.

    Args:
        folder: from :func:`save`; opened, compared and read at once.
        depends_on: what this run's programs depend on, from :func:`dependencies`.
        devices: of the mesh, in its order.

    Raises:
        InputError: the folder has no programs, or they are damaged.
        Mismatch: they were compiled for something else.

    Attributes:
        folder: as above.
        loaded_s: seconds from the beginning until the programs returned so far were loaded.
        waited_s: seconds of these that the caller could not do anything else.
    """

    def __init__(
        self, folder: Path, depends_on: Mapping[str, str], devices: Sequence[jax.Device]
    ) -> None:
        self.folder = folder
        self._began = time.perf_counter()
        index = _index(folder)
        if different := difference(index["depends_on"], depends_on):
            raise Mismatch(different)
        self._metrics: list[str] = index["metrics"]
        contents = {name: _content(folder, name, index["programs"][name]) for name in (INIT, STEP)}
        self._loading = {
            name: BackgroundCompilation(
                functools.partial(
                    _deserialized, contents[name], index["programs"][name]["arguments"], devices
                )
            )
            for name in (INIT, STEP)
        }
        self.loaded_s = self.waited_s = time.perf_counter() - self._began

    def init(self, target: State) -> jax.stages.Compiled:
        """Waits for the program () -> the initial state, and returns it.

        Args:
            target: shapes and shardings of the state.

        Raises:
            Mismatch: jax cannot load it here.
        """
        return self._loaded(INIT, (), target)

    def step(self, target: State, spec: Mapping[str, Any]) -> jax.stages.Compiled:
        """Waits for the program (state, batch) -> (state, metrics), and returns it.

        Args:
            target: shapes and shardings of the state.
            spec: of a global batch.

        Raises:
            Mismatch: jax cannot load it here.
        """
        result = (target, dict.fromkeys(self._metrics, 0))
        return self._loaded(STEP, (target, dict(spec)), result)

    def close(self) -> None:
        """Waits until nothing is loading, because Python cannot exit before."""
        for one in self._loading.values():
            one.ready(lambda: False)

    def _loaded(self, name: str, arguments: Any, result: Any) -> jax.stages.Compiled:
        began = time.perf_counter()
        try:
            flat, ended = self._loading[name].result()
            # The trees are known only after the model has been traced.
            trees = jax.tree.structure((arguments, {})), jax.tree.structure(result)
            arguments_info = jax.tree.unflatten(trees[0], jax.tree.leaves(flat.args_info))
        except Exception as error:  # of XLA: a different build of the same version
            raise Mismatch(f"jax cannot load {name}.bin here ({first_line(error)})") from error
        del self._loading[name]  # and the bytes that it was loaded from
        self.waited_s += time.perf_counter() - began
        self.loaded_s = max(self.loaded_s, ended - self._began)
        return jax.stages.Compiled(flat._executable, [], arguments_info, trees[1], no_kwargs=True)


def _content(folder: Path, name: str, expected: Mapping[str, Any]) -> bytes:
    """Reads a program, and compares its checksum.

    Raises:
        InputError: it cannot be read, or it is damaged.
    """
    path = folder / f"{name}.bin"
    try:
        content = atomic.read_regular(path, _LARGEST_PROGRAM)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): {_AGAIN}") from error
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise InputError(f"{path} is damaged: {_AGAIN}")
    return content


def _deserialized(
    content: bytes, arguments: int, devices: Sequence[jax.Device]
) -> tuple[jax.stages.Compiled, float]:
    """Loads a program, for now without the trees of its arguments and results.

    Returns:
        The program, and the time when it was loaded.
    """
    program = serialize_executable.deserialize_and_load(
        content,
        jax.tree.structure(((0,) * arguments, {})),
        jax.tree.structure(()),
        backend=devices[0].client,
        execution_devices=devices,
    )
    return program, time.perf_counter()


def difference(saved: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Returns the first thing that differs, with both values; None if nothing does."""
    for name in (*here, *saved):
        if saved.get(name) != here.get(name):
            return (
                f"{name} is {saved.get(name, 'unknown')} there and {here.get(name, 'unknown')} here"
            )
    return None


def check_folder(folder: Path) -> None:
    """Checks that a folder has programs, without loading them.

    Raises:
        InputError: it has none.
    """
    _index(folder)


def check_writable(folder: Path) -> None:
    """Checks that :func:`save` may write to a folder.

    Raises:
        InputError: it is a file, or it contains other files.
    """
    if not folder.parent.is_dir():
        raise InputError(f"--save {folder}: {folder.parent} is not a folder: create it first")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--save {folder} is a file: name a folder")
    ours = {INDEX, f"{INIT}.bin", f"{STEP}.bin"}
    if folder.is_dir() and (others := {path.name for path in folder.iterdir()} - ours):
        raise InputError(
            f"--save {folder} contains other files, such as {min(others)}: name a new folder"
        )


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise InputError(
            f"--compiled {folder} {'has no ' + INDEX if folder.is_dir() else 'is not a folder'}: "
            f"write it with {invocation.program()} plan --config NAME --save "
            f"{shlex.quote(str(folder))}"
        )
    try:
        content = atomic.read_json(path, _LARGEST_INDEX)
        programs = [content["programs"][name] for name in (INIT, STEP)]
        checksums = [one["sha256"] for one in programs]
        texts = [*checksums, *content["metrics"], *content["depends_on"].values()]
        counts = [one["arguments"] for one in programs]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("it contains something other than strings")
        if not all(type(one) is int and 0 <= one <= _MOST_ARGUMENTS for one in counts):
            raise ValueError("a number of arguments is wrong")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}): {_AGAIN}") from error
    return content


def _own_code(model: type) -> str:
    """A digest of the code of a model outside this package; "part of jaxtrain" for one inside.

    It covers the loaded modules in the folder of the model's outermost package, except installed
    packages.
    """
    if _is_ours(model):
        return "part of jaxtrain"
    module, source = sys.modules[model.__module__], _source(model)
    root = source.parents[module.__name__.count(".")]
    loaded = {
        path
        for name, one in tuple(sys.modules.items())
        if name != "__main__"
        and (file := getattr(one, "__file__", None))
        and (path := Path(file).resolve()).is_relative_to(root)
        and path.suffix == ".py"
        and not path.is_relative_to(_PACKAGE)
        and not {"site-packages", "dist-packages"}.intersection(path.parts)
    }
    return _digest({source, *loaded}, root)


def _is_ours(model: type) -> bool:
    return _source(model).is_relative_to(_PACKAGE)


def _source(model: type) -> Path:
    module = sys.modules[model.__module__]
    return Path(getattr(module, "__file__", None) or "").resolve()


def _digest(paths: Iterator[Path] | set[Path], root: Path) -> str:
    """A short digest of the names and contents of files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(
            f"{path.relative_to(root)}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The instruction sets of this processor: LLVM compiles for exactly these."""
    flags = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = line.partition(":")[2].strip()
                break
    except OSError:
        flags = "unknown"
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:8]}"
