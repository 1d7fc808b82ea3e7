"""Out of memory: the computed and the measured memory, and overrides that fit."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from training import toy

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.formats import GIB
from jaxtrain.training.diagnosis import out_of_memory
from jaxtrain.training.state import State

COMMAND = "jaxtrain plan mlm_h200_8 --fit"
SPEC = {
    "video": jax.ShapeDtypeStruct((64, 2**20, 24), jnp.uint8),  # 1.5 GiB
    "weight": jax.ShapeDtypeStruct((64,), jnp.float32),
}


def parts() -> tuple[Any, Any, Any]:
    """A run on 8 devices; 3 GiB of its parameters are in 4 shards, and 0.5 GiB is replicated."""
    mesh = toy.mesh_of(2, 4)

    def stored(shape: tuple[int, ...], *spec: str) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {"kernel": stored((3 * 2**10, 2**18), "fsdp"), "table": stored((2**27,))}
    target = State(
        step=stored(()), examples_seen=stored(()), params=params, extras={}, opt={}, skip_step={}
    )
    typed = ["--data.path", "x", "--mesh.data", "2", "--mesh.fsdp", "4", "--data.batch_size", "64"]
    run = config.load("mlm_h200_8", [*typed, "--optim.accumulate", "2"])
    return run, target, SPEC


def told(command: str = COMMAND) -> tuple[str, list[str]]:
    """Makes an impossible allocation; returns the error and the printed lines."""
    said: list[str] = []
    with (
        pytest.raises(InputError) as error,
        out_of_memory.explained(*parts(), command, said.append),
    ):
        jnp.zeros(2**48, jnp.float32).block_until_ready()
    assert isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)
    return str(error.value), said


def test_the_memory_of_state_and_batch_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "_measured", lambda: (70 * GIB, 71 * GIB))
    message, said = told()
    assert "\n" not in message
    assert f"`{COMMAND}` finds overrides that fit" in message
    first, second, third = said
    assert first.startswith("RESOURCE_EXHAUSTED: Out of memory allocating 1125899906842624 bytes")
    assert second == (
        "computed: per device 1.250 GiB of state and 0.188 GiB of batch, plus the "
        "activations of 4 examples"
    )
    assert third == "measured: at most 70.0 GiB in use on a device, of 71.0 GiB available to jax"


def test_a_run_built_in_python_is_given_no_command() -> None:
    message, _ = told("")
    assert message.startswith("out of device memory: this run was built in Python")
    assert "`" not in message


def test_the_measurement_is_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [{"peak_bytes_in_use": 5, "bytes_limit": 9}, {"peak_bytes_in_use": 7, "bytes_limit": 8}]
    fakes = [types.SimpleNamespace(memory_stats=lambda one=one: one) for one in peaks]
    monkeypatch.setattr(jax, "local_devices", lambda: fakes)
    assert out_of_memory._measured() == (7, 8)


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("INTERNAL: a kernel failed"),
        InputError("the data is gone"),
        ValueError("RESOURCE_EXHAUSTED is only a word here"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_pass_untouched(error: BaseException) -> None:
    with (
        pytest.raises(type(error)) as caught,
        out_of_memory.explained(*parts(), COMMAND, pytest.fail),
    ):
        raise error
    assert caught.value is error
    assert caught.value.__cause__ is None
