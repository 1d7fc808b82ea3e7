"""k8s-jobset.yaml and k8s-prepare.yaml fit the package, and pod.sh, with a stand-in for Python."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch.stub import LAUNCH, Stubs

from jaxtrain.cli import command_line, flags, job_flags
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.distributed import cluster_env
from jaxtrain.jobs.resumable import Part

RUN = ("--config", "demo", "--output-dir", "run")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


@pytest.fixture
def manifest() -> dict[str, Any]:
    return documents("k8s-jobset.yaml")[0]


def job_of(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The spec of the Job, the spec of the pod, and the container."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        (replicated,) = spec["replicatedJobs"]
        assert replicated["replicas"] == 1
        spec = replicated["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    return spec, spec["template"]["spec"], container


@pytest.mark.parametrize("name", ["k8s-jobset.yaml", "k8s-prepare.yaml"])
def test_a_pod_has_no_more_rights_than_it_needs(name: str) -> None:
    """The "restricted" profile of Kubernetes' Pod Security Standards, and no service account."""
    spec, pod, container = job_of(documents(name)[0])
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy requires it
    for rule in spec["podFailurePolicy"]["rules"]:
        if codes := rule.get("onExitCodes"):
            assert codes["containerName"] == container["name"]
            assert codes["values"] == sorted(set(codes["values"]) - {0})
    assert pod["automountServiceAccountToken"] is False
    user = pod["securityContext"]
    assert user["runAsNonRoot"] is True
    assert user["runAsUser"] > 0
    assert user["fsGroup"] == user["runAsGroup"] > 0
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == rights
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (cache,) = [one["value"] for one in container["env"] if one["name"] == "JAXTRAIN_CACHE"]
    (claim,) = [one["name"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    (shared,) = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == claim]
    assert cache.startswith(shared)


def test_only_pods_of_the_run_can_connect_to_its_pods(manifest: dict[str, Any]) -> None:
    policy = documents("k8s-jobset.yaml")[1]
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": manifest["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == own
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]


def test_exit_codes_choose_between_an_end_and_a_restart(manifest: dict[str, Any]) -> None:
    """A healthy run may be preempted any number of times: pod.sh counts starts in vain."""
    spec, _, container = job_of(manifest)
    assert spec["backoffLimit"] == 0
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 4, 130])
    policy = manifest["spec"]["failurePolicy"]
    assert "maxRestarts" not in policy
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"]),
        ("RestartJobSetAndIgnoreMaxRestarts", ["BackoffLimitExceeded"]),
    ]
    fields = {entry["name"]: entry.get("valueFrom") for entry in container["env"]}
    for name, label in (("RESTARTS", "restart-attempt"), ("JOBSET_UID", "jobset-uid")):
        path = f"metadata.labels['jobset.sigs.k8s.io/{label}']"
        assert fields[name] == {"fieldRef": {"fieldPath": path}}


def test_the_manifest_sets_the_variables_that_jaxtrain_reads(manifest: dict[str, Any]) -> None:
    spec, _, container = job_of(manifest)
    name = manifest["metadata"]["name"]
    values = {"JOBSET_NAME": name, "JOB_COMPLETION_INDEX": "1"}  # by Kubernetes itself
    for entry in container["env"]:
        if "value" in entry:  # $(NAME) refers to an earlier variable
            value = entry["value"]
            for known, text in list(values.items()):
                value = value.replace(f"$({known})", text)
            assert "$(" not in value
            values[entry["name"]] = value
    cluster = cluster_env.find(values)
    assert cluster is not None
    jobs = manifest["spec"]["replicatedJobs"][0]["name"]
    assert cluster.host == f"{name}-{jobs}-0-0.{name}"
    assert (cluster.count, cluster.index, cluster.hosts) == (2, 1, 2)
    assert spec["completions"] == spec["parallelism"] == cluster.count


def test_the_command_line_is_valid(manifest: dict[str, Any]) -> None:
    _, _, container = job_of(manifest)
    typed, problems = flags.parse(RunFlags, "train", container["args"])
    assert not problems
    assert typed.config == "h100_16"
    assert str(typed.output_dir).startswith("/shared/")
    assert typed.overrides == ("--data.path=/shared/data/videos",)
    (script,) = container["command"]
    image = (LAUNCH / "Dockerfile").read_text()
    assert "WORKDIR /opt/jaxtrain\n" in image
    assert "COPY launch launch\n" in image
    assert os.access(LAUNCH / Path(script).relative_to("/opt/jaxtrain/launch"), os.X_OK)


def test_each_pod_prepares_its_part() -> None:
    """The image's entry point receives the args, in which Kubernetes replaces $(NAME)."""
    spec, _, container = job_of(documents("k8s-prepare.yaml")[0])
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] >= spec["parallelism"] > 1
    assert "FailIndex" in {rule["action"] for rule in spec["podFailurePolicy"]["rules"]}
    assert spec["backoffLimitPerIndex"] > 1  # which FailIndex requires
    assert "command" not in container
    image = (LAUNCH / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["python", "-m", "jaxtrain.main"]' in image
    parts = []
    for index in range(spec["completions"]):
        args = [text.replace("$(JOB_COMPLETION_INDEX)", str(index)) for text in container["args"]]
        assert args[:4] == ["prepare", "clips", "/shared/data/videos", "/shared/data/clips"]
        typed = command_line.parse("prepare clips", args[2:])
        assert typed.workers == container["resources"]["limits"]["cpu"]
        parts.append(job_flags.part(typed, {}))
    assert parts == [Part(index, len(parts)) for index in range(len(parts))]


def started(stubs: Stubs, restarts: int, pod: int = 0, **more: str) -> tuple[int, str]:
    names = {"RESTARTS": str(restarts), "JOB_COMPLETION_INDEX": str(pod), "MAX_RESTARTS": "2"}
    code, _, err = stubs.run("pod.sh", *RUN, **(names | {"JAX_PROCESS_ID": str(pod)} | more))
    return code, err


def test_restarts_without_progress_end_the_run(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { save 7; exit 75; }")
    codes = [started(stubs, number)[0] for number in range(4)]
    assert codes == [75, 75, 75, 2]
    assert len(stubs.calls(0)) == 3
    code, err = started(stubs, 4)
    assert code == 2
    assert "2 restarts in a row produced no new checkpoint (newest: 7): giving up" in err
    # Another run in the same directory starts counting from zero.
    assert started(stubs, 0)[0] == 75


@pytest.mark.long  # test_slurm.py has the same
def test_restarts_are_counted_in_the_bucket_of_the_run(tmp_path: Path) -> None:
    """Each pod may be on another node, with an empty disk."""
    stubs = Stubs(tmp_path, "play() { exit 75; }")
    run = ("--config", "demo", "--output-dir", "s3://bucket/one")
    more = {"BUCKETS": str(tmp_path / "buckets"), "MAX_RESTARTS": "1", "JOBSET_UID": "12-ab"}
    codes = []
    for number in range(3):
        more |= {"RESTARTS": str(number), "JAXTRAIN_CACHE": str(tmp_path / f"node-{number}")}
        codes.append(stubs.run("pod.sh", *run, **more)[0])
    assert codes == [75, 75, 2]
    counted = json.loads((tmp_path / "buckets/bucket/one/restarts.json").read_text())
    assert counted == {"launch": "jobset-12-ab", "newest": "none", "in_vain": 1}
    # Of another JobSet in the same place, nothing counts.
    assert stubs.run("pod.sh", *run, **(more | {"JOBSET_UID": "13-cd"}))[0] == 75


def test_only_pod_zero_counts(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { exit 75; }")
    (tmp_path / "run").mkdir()
    assert [started(stubs, number, pod=1)[0] for number in range(5)] == [75] * 5


def test_a_pod_without_its_disk_does_not_start_from_scratch(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    code, err = started(stubs, 1)
    assert code == 2
    assert "run does not exist now: is its disk mounted?" in err
    assert not (tmp_path / "run").exists()


def test_the_first_start_uses_the_users_resume(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { exit 75; }")
    for number in range(2):
        code, _, _ = stubs.run("pod.sh", *RUN, "--resume", "400", RESTARTS=str(number))
        assert code == 75
    first, second = (call[5:] for call in stubs.calls(0))
    assert first == [*RUN, "--resume", "400"]
    assert second == [*RUN, "--resume", "400", "--again"]


def test_all_starts_of_a_jobset_have_one_name(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, 'play() { echo "of ${JAXTRAIN_LAUNCH-nothing}"; }')
    _, out, _ = stubs.run("pod.sh", *RUN, JOBSET_UID="12-ab")
    assert out == "of jobset-12-ab\n"
    assert stubs.run("pod.sh", *RUN, JOBSET_UID="")[1] == "of nothing\n"  # an older JobSet


def test_a_signal_ends_the_delay_of_a_pod(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { exit 75; }")
    (tmp_path / "run").mkdir()
    with stubs.start("pod.sh", *RUN, RESTARTS="1", RESTART_DELAY_S="1000") as pod:
        assert pod.stderr is not None
        assert "restart 1 of at most 5" in pod.stderr.readline()
        pod.terminate()
        pod.communicate(timeout=30)
        assert pod.returncode == 75
    assert not (stubs.stubs / "calls.0").exists()
