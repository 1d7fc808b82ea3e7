"""k8s-prepare.yaml against the schema of Kubernetes' Job, and its command line."""

import copy
from typing import Any

import pytest
import yaml
from launch.stub import LAUNCH

from jaxtrain.cli import command_line, job_flags
from jaxtrain.data.jobs import Part
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


def test_all_pods_are_numbered(manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] >= spec["parallelism"] > 1
    actions = {rule["action"] for rule in spec["podFailurePolicy"]["rules"]}
    assert "FailIndex" in actions  # which requires this limit
    assert spec["backoffLimitPerIndex"] > 1
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy requires it
    names = {rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"][1:]}
    assert names == {container(manifest)["name"]}
    mounted = {one["name"] for one in container(manifest)["volumeMounts"]}
    assert mounted == {one["name"] for one in spec["template"]["spec"]["volumes"]}


def test_each_pod_makes_its_part(manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's entry point receives the args, in which Kubernetes replaces $(NAME)."""
    pod = container(manifest)
    assert "command" not in pod
    image = (LAUNCH / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["python", "-m", "jaxtrain.main"]' in image
    count = manifest["spec"]["completions"]
    parts = []
    for index in range(count):
        args = [text.replace("$(JOB_COMPLETION_INDEX)", str(index)) for text in pod["args"]]
        assert args[:4] == ["prepare", "clips", "/shared/data/videos", "/shared/data/clips"]
        flags = command_line.parse("prepare clips", args[2:])
        assert flags.workers == pod["resources"]["limits"]["cpu"]
        parts.append(job_flags.part(flags, {}))
    assert parts == [Part(index, count) for index in range(count)]
