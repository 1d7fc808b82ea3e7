"""k8s-prepare.yaml against the schema of Kubernetes' Job, and its command line."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch.stub import LAUNCH

from jaxtrain import main
from jaxtrain.data.video import prepare_clips
from launch import test_jobset

JOB = test_jobset.record(
    {
        "apiVersion": test_jobset.of_type(str, "batch/v1"),
        "kind": test_jobset.of_type(str, "Job"),
        "metadata": test_jobset.record({"name": test_jobset.label}),
        "spec": test_jobset.job,
    }
)


@pytest.fixture
def manifest() -> dict[str, Any]:
    found = yaml.safe_load((LAUNCH / "k8s-prepare.yaml").read_text())
    assert isinstance(found, dict)
    return found


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (one,) = manifest["spec"]["template"]["spec"]["containers"]
    assert isinstance(one, dict)
    return one


def test_the_manifest_follows_the_schema(manifest: dict[str, Any]) -> None:
    assert JOB(manifest, "Job") == []
    other = copy.deepcopy(manifest)
    other["spec"].update(completionMode="indexed")
    assert JOB(other, "Job")


def test_all_pods_work_at_once_and_are_numbered(manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] > 1
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy requires it
    names = {rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"][1:]}
    assert names == {container(manifest)["name"]}
    mounted = {one["name"] for one in container(manifest)["volumeMounts"]}
    assert mounted == {one["name"] for one in spec["template"]["spec"]["volumes"]}


def test_each_pod_runs_the_command_with_its_number(
    manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image's entry point receives the args; Kubernetes sets JOB_COMPLETION_INDEX."""
    one = container(manifest)
    assert "command" not in one
    image = (LAUNCH / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["python", "-m", "jaxtrain.main"]' in image
    shares = []

    def run(source: str, out: Path, settings: Any, *, engine: Any, say: Any, share: str) -> Any:
        assert (source, str(out)) == ("/shared/data/videos", "/shared/data/clips")
        assert engine.workers == one["resources"]["limits"]["cpu"]
        shares.append(share)
        return {"pieces": 1, "frames": 9, "cut": 1, "dropped": [], "frames_left_out": 0}

    monkeypatch.setattr(prepare_clips, "run", run)
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for index in range(manifest["spec"]["completions"]):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        assert main.main(list(one["args"])) == 0
    assert shares == ["0", "1", "2", "3"]
