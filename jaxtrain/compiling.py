"""How programs are compiled: the cache on disk, and the compiler's options for the platform."""

from collections.abc import Mapping, MutableMapping
from pathlib import Path

import jax

# Compilations shorter than this are not worth a file.
_WORTH_KEEPING_S = 0.5

# Share of a GPU's memory that XLA takes at the start, and all that a program can use. jax's own
# default is 0.75; CUDA's context, loaded kernels and NCCL's buffers lie outside, and with too
# little left NCCL fails to start ("unhandled system error").
MEMORY_FRACTION = 0.9

Options = dict[str, str | bool]


def reserve_memory(environment: MutableMapping[str, str]) -> None:
    """Has XLA take as much of each GPU as a plan counts on; before jax looks for devices.

    Args:
        environment: XLA_PYTHON_CLIENT_MEM_FRACTION in it wins.
    """
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))


def use_cache(environment: Mapping[str, str], folder: Path) -> None:
    """Keeps compiled programs on disk, so that the same run starts faster the next time.

    Args:
        environment: JAX_COMPILATION_CACHE_DIR in it wins.
        folder: where the programs lie.
    """
    if not environment.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)


def options(platform: str) -> Options:
    """Compiler options for a platform.

    CPU: LLVM's level 1 compiles the demo's step in two thirds of the time of the default and the
    step is as fast, because convolutions and products are library calls. Level 0 computes wrong
    numbers in places (jax 0.12.0: a PSNR off by 0.04%).
    """
    return {"xla_backend_optimization_level": "1"} if platform == "cpu" else {}
