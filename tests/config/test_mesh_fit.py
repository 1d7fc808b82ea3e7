"""Tests the fit of a mesh to other devices."""

import dataclasses
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.config import mesh_fit
from jaxtrain.errors import InputError
from jaxtrain.sharding import make_mesh


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
            "--simulate-devices 1, or add --mesh.auto True to fit the mesh to 3, if that "
            "divides data.batch_size",
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
    changes = mesh_fit.fit_mesh(run, nodes, gpus, "mesh.auto")
    assert tuple(changes.values()) == expected
    other = run.override(changes)
    assert other.data.batch_size == run.data.batch_size
    assert other.mesh.devices == nodes * gpus
    assert other.microbatch_size <= run.microbatch_size
    assert mesh_fit.fit_mesh(other, nodes, gpus, "mesh.auto") == changes


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
        mesh_fit.fit_mesh(run, 1, devices, "mesh.auto")
    assert fix in str(raised.value)


def test_a_run_is_fitted_to_the_devices_of_this_machine() -> None:
    run = config.load("h100_16")
    assert mesh_fit.fit_to_present_devices(run) == (run, "")
    auto = config.load("h100_16", ["--mesh.auto", "True"])
    found, sentence = mesh_fit.fit_to_present_devices(auto)
    assert (found.mesh.devices, found.optim.accumulate) == (8, 2)  # conftest.py: 8 CPU devices
    assert "--mesh.fsdp 8 --optim.accumulate 2, for the 8 devices found" in sentence
    assert mesh_fit.fit_to_present_devices(found) == (found, sentence)
    make_mesh(found.mesh)
