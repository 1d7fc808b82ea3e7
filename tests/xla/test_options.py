"""The compilation cache and compiler options."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.models import masked
from jaxtrain.xla import options

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Puts jax's settings back."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("environment", [{}, {"JAX_COMPILATION_CACHE_DIR": ""}])
def test_the_folder_becomes_the_cache(environment: dict[str, str], tmp_path: Path) -> None:
    options.use_cache(environment, tmp_path)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)


def test_the_environment_may_set_another_folder(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", "chosen")  # jax reads the variable by itself
    options.use_cache({"JAX_COMPILATION_CACHE_DIR": "chosen"}, tmp_path)
    assert jax.config.jax_compilation_cache_dir == "chosen"


def test_a_program_from_the_cache_is_noticed(tmp_path: Path) -> None:
    options.use_cache({}, tmp_path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # it keeps the folder that it has opened
    lowered = jax.jit(lambda x: x * 3 + 1).lower(jnp.zeros(7))
    counts = []
    for _ in range(2):
        with options.cache_hits() as hits:
            lowered.compile()
        jax.clear_caches()
        lowered = jax.jit(lambda x: x * 3 + 1).lower(jnp.zeros(7))
        counts.append(len(hits))
    assert counts == [0, 1]
    compilation_cache.reset_cache()


def test_short_compilations_are_not_cached(tmp_path: Path) -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    options.use_cache({}, tmp_path)
    assert 0.1 <= jax.config.jax_persistent_cache_min_compile_time_secs <= 1.0


def test_on_cpus_flags_of_the_user_replace_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS")
    default = options.options("cpu")
    assert "xla_backend_optimization_level" in default
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_backend_optimization_level=3")
    del default["xla_backend_optimization_level"]
    assert options.options("cpu") == default
    assert options.options("gpu", deterministic=True) == options.DETERMINISTIC


def test_gpus_have_no_options_by_default() -> None:
    assert options.options("gpu") == options.options("cuda") == {}


def test_options_of_a_model_are_for_gpus_and_flags_of_the_user_replace_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XLA_FLAGS")
    of_model = masked.MaskedConfig.gpu_options
    assert options.options("gpu", of_model=of_model) == {"xla_gpu_enable_triton_gemm": False}
    assert options.options("cpu", of_model=of_model) == options.options("cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert options.options("gpu", of_model=of_model) == {}


def test_a_profiled_step_launches_no_cuda_graphs() -> None:
    assert options.options("gpu", profiled=True) == {"xla_gpu_enable_command_buffer": ""}
    assert options.options("cpu", profiled=True) == options.options("cpu")


def test_on_cpus_eigen_runs_convolutions_and_ynnpack_runs_sums() -> None:
    def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def program(function: Any, *arguments: Any) -> str:
        jitted = jax.jit(function, compiler_options=options.options("cpu"))
        return str(jitted.lower(*arguments).compile().as_text())

    x, kernel = jnp.ones((4, 32, 32, 64)), jnp.ones((3, 3, 64, 64))
    assert "__ynn_fusion" not in program(conv, x, kernel)
    assert "__ynn_fusion" in program(lambda x: x.sum((0, 1, 2)), x)


def test_the_compiler_accepts_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS")  # the suite's replace one of them
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    compiled = lowered.compile(compiler_options=options.options(jax.devices()[0].platform))
    assert compiled(1.0) == 2.0
    of_model = masked.MaskedConfig.gpu_options
    of_gpus = options.options("gpu", of_model=of_model, deterministic=True, profiled=True)
    assert lowered.compile(compiler_options=of_gpus)(1.0) == 2.0  # read on every platform
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={"xla_no_such_option": "1"})
