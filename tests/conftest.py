"""Eight virtual CPU devices for every test, asserted; nothing is skipped for want of them."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# Tests compile much and compute little: level 1 compiles faster. Level 0 would be faster still, but
# with jax 0.12.0 it computes a wrong PSNR (by 0.04%). The level changes no shardings.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=1 " + os.environ.get("XLA_FLAGS", "")

import gc
import signal
import tempfile
from pathlib import Path

import absl.flags
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
_CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(
    Path(tempfile.gettempdir()) / f"jaxtrain-test-compilations-{os.getuid()}"
)
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE  # for the programs that tests start

# A shell ignores SIGINT in what it starts in the background, and what tests start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes many objects, among the many that jax has made when it was imported: collections in
# their usual rhythm were a third of the main thread's samples while a small model was compiled.
gc.freeze()
gc.set_threshold(50_000, 20, 20)

if not absl.flags.FLAGS.is_parsed():
    absl.flags.FLAGS.mark_as_parsed()  # Grain's workers want them parsed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a file stays in one process, and a long one last holds all."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    assert jax.device_count() == 8, f"8 virtual devices wanted, {jax.device_count()} found"


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The top of the checkout."""
    return Path(__file__).resolve().parent.parent
