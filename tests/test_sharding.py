"""Tests the sharding of parameters as a function of their shapes."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P
from training import toy

from jaxtrain import config, sharding
from jaxtrain.errors import InputError
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


@dataclasses.dataclass
class Device:
    """Describes a device like jax."""

    device_kind: str
    platform: str


GPU = Device("NVIDIA H100 80GB HBM3", "gpu")


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        (
            (2, 8),
            [GPU] * 8,
            "mesh.data 2 x mesh.fsdp 8 needs 16 devices, but jax sees 8 (NVIDIA H100 80GB HBM3): "
            "add --mesh.auto True to fit the mesh to what is there, with the same "
            "data.batch_size; or start the run on 16 devices; or try it without them with "
            "--simulate-devices 16",
        ),
        (
            (1, 2),
            [GPU] * 4,
            "mesh.data 1 x mesh.fsdp 2 needs 2 devices, but jax sees 4 (NVIDIA H100 80GB HBM3): "
            "add --mesh.auto True to fit the mesh to what is there, with the same "
            "data.batch_size, or set CUDA_VISIBLE_DEVICES=0,1 to use only 2",
        ),
        (
            (1, 1),
            [Device("cpu", "cpu")] * 3,
            "mesh.data 1 x mesh.fsdp 1 needs 1 device, but --simulate-devices gives 3: use "
            "--simulate-devices 1, or add --mesh.auto True to fit the mesh to 3",
        ),
    ],
)
def test_a_wrong_device_count_is_reported_with_fixes(
    mesh: tuple[int, int], devices: list[Any], expected: str
) -> None:
    data, fsdp = mesh
    with pytest.raises(InputError) as raised:
        make_mesh(config.Mesh(data=data, fsdp=fsdp, shard="params"), devices)
    assert str(raised.value) == expected


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


RUN = config.load("h100_16")  # 8 clips per device
HYBRID = config.load("h100_16", ["--mesh.data", "2", "--mesh.fsdp", "8"])


@pytest.mark.parametrize(
    ("run", "nodes", "gpus", "expected"),
    [
        (RUN, 2, 8, (1, 16, 1)),
        (RUN, 1, 8, (1, 8, 2)),
        (RUN, 1, 1, (1, 1, 16)),
        (RUN, 4, 8, (1, 32, 1)),
        (HYBRID, 4, 8, (4, 8, 1)),  # sharded inside a node, still
        (HYBRID, 1, 4, (1, 4, 4)),
        (HYBRID, 32, 1, (4, 8, 1)),  # a process per device
        (HYBRID, 4, 1, (1, 4, 4)),  # fewer than mesh.fsdp: still sharded
    ],
)
def test_other_devices_keep_the_global_batch(
    run: config.Run, nodes: int, gpus: int, expected: tuple[int, int, int]
) -> None:
    changes = sharding.fit_mesh(run, nodes, gpus, "mesh.auto")
    assert tuple(changes.values()) == expected
    other = run.override(changes)
    assert other.data.batch_size == run.data.batch_size
    assert other.mesh.devices == nodes * gpus
    assert other.microbatch_size <= run.microbatch_size
    assert sharding.fit_mesh(other, nodes, gpus, "mesh.auto") == changes


@pytest.mark.parametrize(
    ("batch", "devices", "fix"),
    [
        (128, 24, "use 16 or 32 devices, or --data.batch_size 120 or 144"),
        (4, 8, "use 4 devices, or --data.batch_size 8"),
    ],
)
def test_devices_that_do_not_divide_the_batch(batch: int, devices: int, fix: str) -> None:
    run = config.load("h100_16", ["--data.batch_size", str(batch), "--mesh.auto", "True"])
    with pytest.raises(InputError) as raised:
        sharding.fit_mesh(run, 1, devices, "mesh.auto")
    assert fix in str(raised.value)


def test_a_run_is_fitted_to_the_devices_of_this_machine() -> None:
    run = config.load("h100_16")
    assert sharding.fit_to_present_devices(run) == (run, "")
    auto = config.load("h100_16", ["--mesh.auto", "True"])
    found, sentence = sharding.fit_to_present_devices(auto)
    assert (found.mesh.devices, found.optim.accumulate) == (8, 2)  # conftest.py: 8 CPU devices
    assert "--mesh.fsdp 8 --optim.accumulate 2, for the 8 devices found" in sentence
    assert sharding.fit_to_present_devices(found) == (found, sentence)
    make_mesh(found.mesh)


if __name__ == "__main__":
    for config_name in ("h100_16", "mlm_h200_8"):
        path = Path(__file__).parent / "fixtures" / f"sharding_{config_name}.txt"
        path.write_text(table(config_name))
