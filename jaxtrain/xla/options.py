"""Sets up compilation: the cache on disk, GPU memory, and compiler options for a platform."""

import threading
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Generic, TypeVar

import jax

from jaxtrain import terminal
from jaxtrain.ops import cpu

# Shorter compilations are not cached.
_WORTH_KEEPING_S = 0.5

# Fraction of a GPU's memory that XLA allocates at the start, which is all it can use. jax's default
# is 0.75. CUDA's context, loaded kernels and NCCL's buffers need memory outside it; with too little
# left, NCCL fails to start ("unhandled system error").
MEMORY_FRACTION = 0.9
_FRACTION, _DEPRECATED_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"

Options = dict[str, str | bool]
T = TypeVar("T")

_THREAD = "compile"
_LOOK_EVERY_S = 0.05


class BackgroundCompilation(Generic[T]):
    """Compiles in a thread. The compilation cannot be interrupted, but you need not wait for it.

    Args:
        compile: returns the compiled function.
    """

    def __init__(self, compile: Callable[[], T]) -> None:
        self._compile = compile
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()

    def ready(self, until: Callable[[], bool]) -> bool:
        """Waits until the compilation or ``until`` is done; returns whether the compilation is."""
        while self._thread.is_alive() and not until():
            self._thread.join(_LOOK_EVERY_S)
        return not self._thread.is_alive()

    def result(self) -> T:
        """Waits for the compiled function and returns it; raises the compilation's error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._compile())
        except BaseException as error:  # raised by result()
            self._error = error


def still_compiling() -> bool:
    """Returns whether an abandoned compilation still runs, which keeps Python from exiting."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def reserve_memory(environment: MutableMapping[str, str]) -> None:
    """Sets the fraction of each GPU's memory that XLA takes; call it before jax finds devices.

    jax reads two variables, ignores empty ones, and raises ValueError if both are set (jaxlib 0.10,
    ``generate_pjrt_gpu_plugin_options``). A value that you set takes precedence. If you set both,
    the deprecated one is removed, with a warning if it differs.

    Args:
        environment: ``os.environ``.
    """
    fraction, deprecated = environment.get(_FRACTION), environment.get(_DEPRECATED_FRACTION)
    if fraction and deprecated:
        del environment[_DEPRECATED_FRACTION]
        if fraction != deprecated:
            terminal.warn(
                f"warning: {_FRACTION}={fraction} and {_DEPRECATED_FRACTION}={deprecated} are both "
                "set: the second, which is deprecated, is ignored"
            )
    elif not (fraction or deprecated):
        environment[_FRACTION] = str(MEMORY_FRACTION)


def use_cache(environment: Mapping[str, str], folder: Path) -> None:
    """Turns on jax's compilation cache, so that the same run starts faster the next time.

    Args:
        environment: JAX_COMPILATION_CACHE_DIR in it takes precedence.
        folder: of the cache.
    """
    if not environment.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)


def options(platform: str, *, deterministic: bool = False) -> Options:
    """Returns the compiler options for a platform.

    Args:
        platform: "cpu", "gpu" or "cuda".
        deterministic: bitwise reproducible. Only GPUs need an option for this: their fastest
            kernels add in the order in which threads arrive.
    """
    if platform == "cpu":
        return dict(cpu.COMPILER_OPTIONS)
    return {"xla_gpu_deterministic_ops": True} if deterministic else {}
