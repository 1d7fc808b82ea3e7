"""The container files fit the configs."""

import re
from pathlib import Path

import pytest

from jaxtrain import config
from jaxtrain.data import worker_count

GPUS_A_HOST, CORES = 8, 96


@pytest.mark.parametrize(
    ("file", "size"),
    [("Dockerfile", r"--shm-size (\d+)g"), ("k8s-jobset.yaml", r"sizeLimit: (\d+)Gi")],
)
def test_shared_memory_is_large_enough_for_the_batches(
    checkout: Path, file: str, size: str
) -> None:
    text = (checkout / "launch" / file).read_text()
    (gib,) = re.findall(size, text)
    (name,) = re.findall(r"--config[ =](\w+)", text)
    run = config.load(name)
    rows = run.data.batch_size * GPUS_A_HOST // run.mesh.devices
    workers = worker_count.chosen(run.data, CORES, rows=rows, devices=GPUS_A_HOST, on_cpu=False)
    batches = worker_count.most_batches(
        rows, workers, run.data.prefetch, GPUS_A_HOST, run.data.block
    )
    need = batches * worker_count.shared_batch_bytes(run.data, run.model, rows)
    assert need > 2**30
    assert need < int(gib) * 2**30


def instructions(checkout: Path) -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each with its arguments on one line."""
    text = (checkout / "launch" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def test_the_image_runs_as_an_unprivileged_user(checkout: Path) -> None:
    found = instructions(checkout)
    names = [name for name, _ in found]
    (user,) = [arguments for name, arguments in found if name == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)  # Kubernetes cannot check a name
    # Installed and copied files belong to root.
    assert names.index("USER") > max(at for at, name in enumerate(names) if name in ("RUN", "COPY"))
    assert names[names.index("USER") + 1 :] == ["ENTRYPOINT", "CMD"]
    assert not [arguments for name, arguments in found if "--chown" in arguments]
