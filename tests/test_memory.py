"""Out of memory: what was held, and which overrides to try."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import toy
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import config, memory, overrides
from jaxtrain import state as states
from jaxtrain.errors import InputError

BASE = ["--data.path", "somewhere", "--mesh.data", "2", "--mesh.fsdp", "4"]
ONE_DEVICE = ["--mesh.data", "1", "--mesh.fsdp", "1", "--mesh.shard", "none"]
SPEC = {
    "video": jax.ShapeDtypeStruct((64, 2**20, 24), jnp.uint8),  # 1.5 GiB
    "weight": jax.ShapeDtypeStruct((64,), jnp.float32),
}


def run_of(*changed: str) -> config.Run:
    """A run on eight devices."""
    return config.load("mlm_h200_8", [*BASE, "--data.batch_size", "64", *changed])


def target() -> states.State:
    """3 GiB of parameters in four shards and 1/2 GiB that every device holds."""
    mesh = toy.mesh_of(2, 4)

    def stored(shape: tuple[int, ...], *spec: str) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {"kernel": stored((3 * 2**10, 2**18), "fsdp"), "table": stored((2**27,))}
    return states.State(
        step=stored(()), examples_seen=stored(()), params=params, extras={}, opt={}, guard={}
    )


def told(run: config.Run) -> tuple[str, list[str]]:
    """What an allocation that no machine can make leads to: the error, and what was said."""
    said: list[str] = []
    with pytest.raises(InputError) as error, memory.explained(run, target(), SPEC, said.append):
        jnp.zeros(2**48, jnp.float32).block_until_ready()
    assert isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)
    return str(error.value), said


def ways_out(run: config.Run) -> list[list[str]]:
    """The overrides that the error names, those together that it names together."""
    ways = told(run)[0].partition("; try ")[2].split(", or ")
    flags = [[word for pair in re.findall(r"(--\S+) (\w+)", way) for word in pair] for way in ways]
    return [way for way in flags if way]


def at_a_time(run: config.Run) -> int:
    """Examples whose activations a device holds."""
    (count,) = re.findall(r"activations of (\d+) examples at a time", told(run)[0])
    return int(count)


def test_the_error_says_what_was_held() -> None:
    message, said = told(run_of("--optim.accumulate", "2"))
    assert "out of device memory: each device holds 1.250 GiB of state" in message
    assert "0.188 GiB of batch (computed)" in message
    assert "activations of 4 examples at a time" in message
    assert "\n" not in message
    (line,) = said
    assert line.startswith("RESOURCE_EXHAUSTED: Out of memory allocating 1125899906842624 bytes")


def test_the_error_names_the_overrides_to_try() -> None:
    run = run_of("--mesh.shard", "optimizer", "--model.remat", "none")
    assert ways_out(run) == [
        ["--optim.accumulate", "2"],
        ["--model.remat", "block"],
        ["--mesh.shard", "params"],
        ["--data.batch_size", "32"],
    ]
    assert told(run)[0].endswith(", or more devices, or a smaller model")


@pytest.mark.parametrize(
    ("now", "later"), [("none", ["ends", "block"]), ("ends", ["block"]), ("block", [])]
)
def test_only_what_computes_more_again_is_named(now: str, later: list[str]) -> None:
    run = config.load("h100_8", ["--data.path", "clips", "--model.remat", now])
    assert [way[1] for way in ways_out(run) if way[0] == "--model.remat"] == later


@pytest.mark.parametrize(
    "used",
    [
        ["--mesh.shard", "params", "--model.remat", "block", "--optim.accumulate", "8"],
        [*ONE_DEVICE, "--model.remat", "block", "--data.batch_size", "1"],
    ],
)
def test_what_is_in_use_is_not_suggested(used: list[str]) -> None:
    run = run_of(*used)
    assert ways_out(run) == []
    assert told(run)[0].endswith("; try more devices, or a smaller model")


@pytest.mark.parametrize(
    ("batch_size", "accumulate"),
    [(8, 1), (16, 1), (16, 2), (24, 1), (24, 3), (40, 1), (64, 2), (72, 3), (96, 4)],
)
def test_every_suggestion_is_accepted_and_less_is_computed_at_a_time(
    batch_size: int, accumulate: int
) -> None:
    run = run_of("--data.batch_size", str(batch_size), "--optim.accumulate", str(accumulate))
    for way in ways_out(run):
        changed = overrides.apply(run, way)
        config.validate(changed)
        assert changed != run
        if way[0] in ("--data.batch_size", "--optim.accumulate"):
            assert at_a_time(changed) < at_a_time(run), way


@pytest.mark.parametrize("shard", ["none", "optimizer", "params"])
def test_copies_of_the_state_give_way_to_shards(shard: str) -> None:
    """Without an axis to shard along, another mesh.shard would change nothing."""
    run = run_of("--mesh.data", "8", "--mesh.fsdp", "1", "--mesh.shard", shard)
    (way,) = [way for way in ways_out(run) if "--mesh.fsdp" in way or "--mesh.shard" in way]
    changed = overrides.apply(run, way)
    config.validate(changed)
    assert (changed.mesh.data * changed.mesh.fsdp, changed.mesh.shard) == (8, "params")
    assert changed.mesh.fsdp > 1


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
        memory.explained(run_of(), target(), SPEC, pytest.fail),
    ):
        raise error
    assert caught.value is error
    assert caught.value.__cause__ is None


def test_where_memory_suffices_nothing_is_said() -> None:
    with memory.explained(run_of(), target(), SPEC, pytest.fail):
        pass
