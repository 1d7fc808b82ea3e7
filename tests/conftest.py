"""Sets up eight virtual CPU devices for all tests, and fails without them."""

import os
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# Tests compile a lot and compute little. Without optimization and without XLA's newer emitters of
# fusions, the programs of an autoencoder compile in a third of the time: 4 instead of 12 CPU
# seconds. jaxlib 0.12 has only the newer emitters: a step of a video autoencoder compiles in 22 CPU
# seconds at level 1, in 8 with the preset, and in 5 at level 0 with it (2.3 with jaxlib 0.10.2).
# XLA divides a program into up to 32 modules of LLVM: a single one saves a tenth with jax 0.10.2,
# and 17 of 42 CPU seconds with 0.12.0. No flag changes shardings.
if version("jaxlib").startswith("0.10."):
    _FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
else:
    _FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_opt_preset=FAST_COMPILE"
os.environ["XLA_FLAGS"] = " ".join(
    (_FLAGS, "--xla_cpu_parallel_codegen_split_count=1", os.environ.get("XLA_FLAGS", ""))
)

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
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE  # for processes that tests start

# A shell ignores SIGINT in background processes, nohup and cron ignore SIGHUP, and the processes of
# the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Importing jax and tracing create many objects: with the default thresholds, garbage collection
# took a third of the main thread's samples while a small model was compiled.
gc.freeze()
gc.set_threshold(50_000, 20, 20)

if not absl.flags.FLAGS.is_parsed():
    absl.flags.FLAGS.mark_as_parsed()  # Grain's workers require it


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files with slow tests first: a file runs in one process, and would delay the end.

    Long tests are slow, too, so `-m 'not slow'` excludes both.
    """
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    assert jax.device_count() == 8, f"expected 8 devices, found {jax.device_count()}"


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for this test alone."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
