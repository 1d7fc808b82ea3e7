"""Tests the sharding of parameters as a function of their shapes."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P
from training import toy

from jaxtrain import config
from jaxtrain.sharding import ShardingRule, make_mesh, partition_spec


@pytest.mark.parametrize(
    ("shape", "fsdp", "spec"),
    [
        ((3, 3, 64, 128), 8, P(None, None, None, "fsdp")),  # the largest
        ((3, 3, 128, 64), 8, P(None, None, "fsdp")),
        ((64, 64), 8, P(None, "fsdp")),  # the last of equal dimensions
        ((100, 64), 8, P(None, "fsdp")),  # the largest is not divisible
        ((9, 7), 8, P()),  # none is divisible
        ((4,), 8, P()),  # too small to shard
        ((64, 64), 1, P()),  # one device
        ((), 8, P()),
        ((0, 64), 8, P()),
    ],
)
def test_partition_spec(shape: tuple[int, ...], fsdp: int, spec: P) -> None:
    assert partition_spec(shape, fsdp, min_elements=32) == spec
    assert partition_spec(shape, fsdp, min_elements=10**6) == P()


@dataclasses.dataclass(frozen=True)
class OfNode:
    """A GPU of a node: jax calls nodes, which it knows by their boot, slices."""

    slice_index: int
    id: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"

    @property
    def process_index(self) -> int:
        return 1 - self.slice_index


def test_each_row_of_a_mesh_over_several_nodes_is_in_one_of_them() -> None:
    devices: list[Any] = [OfNode(node, 4 * node + place) for node in (1, 0) for place in range(4)]
    mesh = make_mesh(config.Mesh(data=2, fsdp=4, shard="params"), devices)
    assert [[one.id for one in row] for row in mesh.devices] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_none_replicates_everything() -> None:
    rule = ShardingRule(toy.mesh_of(1, 8), config.Mesh(data=1, fsdp=8, shard="none"))
    array = jax.ShapeDtypeStruct((1024, 1024), "float32")
    assert rule(array).spec == P()
    assert rule.unsharded({"a": jax.ShapeDtypeStruct((1023, 1023), "float32")}) == {}


def test_arrays_that_cannot_be_sharded_are_listed() -> None:
    rule = ShardingRule(toy.mesh_of(1, 8), config.Mesh(data=1, fsdp=8, shard="params"))
    arrays = {
        "odd": jax.ShapeDtypeStruct((1023, 1023), "float32"),
        "small": jax.ShapeDtypeStruct((7,), "float32"),
        "even": jax.ShapeDtypeStruct((1024, 1023), "float32"),
    }
    assert rule.unsharded(arrays) == {"odd": (1023, 1023)}


@pytest.mark.parametrize("name", ["h100_16", "mlm_h200_8"])
def test_the_sharding_of_a_shipped_config_is_unchanged(name: str, checkout: Path) -> None:
    """The golden table has the shape and PartitionSpec of every parameter.

    After an intended change of the model or the rule, rewrite it with
    ``python tests/test_sharding.py`` and review the difference.
    """
    golden = checkout / "tests" / "fixtures" / f"sharding_{name}.txt"
    assert table(name) == golden.read_text()


def table(name: str) -> str:
    """Returns one line per parameter: dotted path, shape, spec."""
    from jaxtrain.training.state import ModelDefinition

    run = config.named(name)
    lines = []
    for path, array in sorted(ModelDefinition(run.model.build).params.items()):
        spec = partition_spec(array.shape, run.mesh.fsdp, run.mesh.min_shard_elements)
        lines.append(f"{path} {tuple(array.shape)} {spec}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for config_name in ("h100_16", "mlm_h200_8"):
        path = Path(__file__).parent / "fixtures" / f"sharding_{config_name}.txt"
        path.write_text(table(config_name))
