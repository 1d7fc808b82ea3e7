"""Sets up compilation: the cache on disk, and compiler options for a platform."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import jax

from jaxtrain.ops import cpu

# Shorter compilations are not cached.
_WORTH_KEEPING_S = 0.5
_HIT = "/jax/compilation_cache/cache_hits"  # an event of jax.monitoring

Options = dict[str, str | bool]
T = TypeVar("T")

_THREAD = "compile"
# Without XLA's own matmuls: jax 0.12.0 chooses none of their configurations if it may not time them
# and has no GPU, so a plan failed.
DETERMINISTIC: Options = {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def in_background(make: Callable[[], T]) -> Future[T]:
    """Compiles in a thread. The compilation cannot be interrupted, but you need not wait for it."""
    programs: Future[T] = Future()

    def run() -> None:
        try:
            programs.set_result(make())
        except BaseException as error:  # raised by result()
            programs.set_exception(error)

    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    return programs


def still_compiling() -> bool:
    """Returns whether an abandoned compilation still runs, which keeps Python from exiting."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def use_cache(environment: Mapping[str, str], folder: Path) -> None:
    """Turns on jax's compilation cache, so that the same run starts faster the next time.

    Args:
        environment: JAX_COMPILATION_CACHE_DIR in it takes precedence.
    """
    if not environment.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Collects an entry for each program that is read from the compilation cache in the block."""
    hits = list[str]()

    def listen(event: str, **details: str | int) -> None:
        if event == _HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def options(
    platform: str,
    *,
    of_model: Mapping[str, str | bool] = MappingProxyType({}),
    deterministic: bool = False,
    profiled: bool = False,
) -> Options:
    """Returns the compiler options for a platform, without tuning that XLA_FLAGS has.

    Args:
        deterministic: bitwise reproducible. Only GPUs need an option for this: their fastest
            kernels add in the order in which threads arrive.
        profiled: name each kernel in a trace. Only GPUs need an option for this: XLA launches
            kernels in CUDA graphs, and a trace on an H100 (jax 0.11.2) showed a step of BERT base
            as one operation, `command_buffer_1` (openxla/xprof#3070).
    """
    tuning = cpu.COMPILER_OPTIONS if platform == "cpu" else of_model
    flags = os.environ.get("XLA_FLAGS", "")  # which an option would silently replace
    chosen: Options = {name: tuning[name] for name in tuning if f"--{name}=" not in flags}
    if platform == "cpu":
        return chosen
    chosen |= DETERMINISTIC if deterministic else {}
    return chosen | ({"xla_gpu_enable_command_buffer": ""} if profiled else {})
