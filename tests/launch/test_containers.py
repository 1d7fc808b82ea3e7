"""What the container files promise their configs."""

import re
from pathlib import Path

import pytest

from jaxtrain import config
from jaxtrain.doctor import system

GPUS_A_HOST = 8


@pytest.mark.parametrize(
    ("file", "size"),
    [("Dockerfile", r"--shm-size (\d+)g"), ("k8s-jobset.yaml", r"sizeLimit: (\d+)Gi")],
)
def test_shared_memory_holds_the_batches(checkout: Path, file: str, size: str) -> None:
    text = (checkout / "launch" / file).read_text()
    (gib,) = re.findall(size, text)
    (name,) = re.findall(r"--config[ =](\w+)", text)
    run = config.load(name)
    rows = run.data.batch_size * GPUS_A_HOST // run.mesh.devices
    batches = system._batches(run, rows, run.data.workers, run.data.prefetch)
    need = batches * system._batch_bytes(run, rows)
    assert need > 2**30
    assert need < int(gib) * 2**30
