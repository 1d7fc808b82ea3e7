"""k8s-jobset.yaml against the schemas of JobSet v1alpha2 and of Kubernetes' Job and Pod.

The JobSet part is complete. Its sources are the published reference
(https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2), and for value limits the markers in
api/jobset/v1alpha2/jobset_types.go and the admission checks in pkg/webhooks/jobset_webhook.go of
kubernetes-sigs/jobset, read at commits 0336a8fd and 01078527. Of Kubernetes' batch/v1 and core/v1
only what a manifest of this kind may use is here. A key that is not here is an error, as in the API
server's strict validation.
"""

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch.stub import LAUNCH, Stubs

from jaxtrain.config import flags
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.distributed import cluster_env

RUN = ("--config", "demo", "--output-dir", "run")

Check = Callable[[Any, str], list[str]]


def of_type(kind: type, *allowed: object) -> Check:
    def check(value: Any, where: str) -> list[str]:
        if type(value) is not kind or (allowed and value not in allowed):
            return [f"{where}: {value!r} is no {kind.__name__} {allowed or ''}"]
        return []

    return check


def each(of: Check) -> Check:
    def check(value: Any, where: str) -> list[str]:
        if not isinstance(value, list) or not value:
            return [f"{where}: no list"]
        return [one for at, item in enumerate(value) for one in of(item, f"{where}[{at}]")]

    return check


def record(required: dict[str, Check], **optional: Check) -> Check:
    def check(value: Any, where: str) -> list[str]:
        if not isinstance(value, dict):
            return [f"{where}: no mapping"]
        known = required | optional
        found = [f"{where}: {name} is missing" for name in required if name not in value]
        found += [f"{where}: unknown {name}" for name in value if name not in known]
        for name in value.keys() & known.keys():
            found += known[name](value[name], f"{where}.{name}")
        return found

    return check


text, number, flag = of_type(str), of_type(int), of_type(bool)


def mapping(value: Any, where: str) -> list[str]:
    return [] if isinstance(value, dict) else [f"{where}: no mapping"]


def rule_name(value: Any, where: str) -> list[str]:
    pattern = r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"
    if not re.fullmatch(pattern, str(value)) or len(str(value)) > 128:
        return [f"{where}: {value!r} is not a name of a rule"]
    return []


def label(value: Any, where: str) -> list[str]:
    """Names of jobs, pods and groups must be DNS labels (RFC 1035)."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", str(value)):
        return [f"{where}: {value!r} is not a DNS label"]
    return []


def natural(value: Any, where: str) -> list[str]:
    return [] if type(value) is int and value >= 0 else [f"{where}: {value!r} is not 0 or more"]


def exit_codes(value: Any, where: str) -> list[str]:
    """The API server accepts only ascending, distinct codes, and no 0 with In."""
    if not isinstance(value, list) or not value or len(value) > 255:
        return [f"{where}: not a list of 1 to 255 exit codes"]
    ordered = all(type(one) is int for one in value) and value == sorted(set(value))
    return [] if ordered and 0 not in value else [f"{where}: {value} is not in ascending order"]


env_source = record(
    {},
    fieldRef=record({"fieldPath": text}, apiVersion=text),
    secretKeyRef=record({"name": text, "key": text}, optional=flag),
)
seccomp = record(
    {"type": of_type(str, "RuntimeDefault", "Unconfined", "Localhost")}, localhostProfile=text
)
volume = record(
    {"name": text},
    persistentVolumeClaim=record({"claimName": text}, readOnly=flag),
    emptyDir=record({}, medium=of_type(str, "", "Memory"), sizeLimit=text),
    hostPath=record({"path": text}, type=text),
    nfs=record({"server": text, "path": text}, readOnly=flag),
)
container = record(
    {"name": text, "image": text},
    args=each(text),
    command=each(text),
    env=each(record({"name": text}, value=text, valueFrom=env_source)),
    resources=record({}, limits=mapping, requests=mapping),
    volumeMounts=each(record({"name": text, "mountPath": text}, readOnly=flag, subPath=text)),
    securityContext=record(
        {},
        allowPrivilegeEscalation=flag,
        capabilities=record({}, add=each(text), drop=each(text)),
        privileged=flag,
        readOnlyRootFilesystem=flag,
        runAsGroup=number,
        runAsNonRoot=flag,
        runAsUser=number,
        seccompProfile=seccomp,
    ),
    imagePullPolicy=of_type(str, "Always", "IfNotPresent", "Never"),
    workingDir=text,
)
pod = record(
    {"containers": each(container)},
    restartPolicy=of_type(str, "Never", "OnFailure"),
    terminationGracePeriodSeconds=number,
    automountServiceAccountToken=flag,
    securityContext=record(
        {},
        fsGroup=number,
        fsGroupChangePolicy=of_type(str, "OnRootMismatch", "Always"),
        runAsGroup=number,
        runAsNonRoot=flag,
        runAsUser=number,
        seccompProfile=seccomp,
        supplementalGroups=each(number),
    ),
    volumes=each(volume),
    nodeSelector=mapping,
    hostNetwork=flag,
    dnsPolicy=text,
    tolerations=each(mapping),
)
pod_failure_policy = record(
    {
        "rules": each(
            record(
                {"action": of_type(str, "FailJob", "FailIndex", "Ignore", "Count")},
                onExitCodes=record(
                    {"operator": of_type(str, "In", "NotIn"), "values": exit_codes},
                    containerName=text,
                ),
                onPodConditions=each(record({"type": text}, status=text)),
            )
        )
    }
)
job = record(
    {"template": record({"spec": pod}, metadata=mapping)},
    completionMode=of_type(str, "Indexed", "NonIndexed"),
    completions=number,
    parallelism=number,
    backoffLimit=number,
    backoffLimitPerIndex=number,
    podFailurePolicy=pod_failure_policy,
    activeDeadlineSeconds=number,
)
jobset = record(
    {
        "apiVersion": of_type(str, "jobset.x-k8s.io/v1alpha2"),
        "kind": of_type(str, "JobSet"),
        "metadata": record({"name": text}, labels=mapping, annotations=mapping, namespace=text),
        "spec": record(
            {
                "replicatedJobs": each(
                    record(
                        {"name": label, "template": record({"spec": job}, metadata=mapping)},
                        replicas=natural,
                        groupName=label,
                        dependsOn=each(
                            record({"name": text, "status": of_type(str, "Ready", "Complete")})
                        ),
                    )
                )
            },
            network=record(
                {}, enableDNSHostnames=flag, subdomain=label, publishNotReadyAddresses=flag
            ),
            successPolicy=record(
                {"operator": of_type(str, "All", "Any")}, targetReplicatedJobs=each(text)
            ),
            failurePolicy=record(
                {},
                maxRestarts=natural,
                restartStrategy=of_type(str, "Recreate", "BlockingRecreate", "InPlaceRestart"),
                rules=each(
                    record(
                        {
                            "name": rule_name,
                            "action": of_type(
                                str,
                                *("FailJobSet", "RestartJobSet", "RestartJob"),
                                "RestartJobSetAndIgnoreMaxRestarts",
                                "RestartJobAndIgnoreMaxRestarts",
                            ),
                        },
                        onJobFailureReasons=each(
                            of_type(
                                str,
                                *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
                                *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
                            )
                        ),
                        onJobFailureMessagePatterns=each(text),
                        targetReplicatedJobs=each(text),
                    )
                ),
            ),
            startupPolicy=record({"startupPolicyOrder": of_type(str, "AnyOrder", "InOrder")}),
            coordinator=record({"replicatedJob": text}, jobIndex=natural, podIndex=natural),
            suspend=flag,
            ttlSecondsAfterFinished=natural,
            managedBy=text,
            volumeClaimPolicies=each(
                record(
                    {},
                    templates=each(mapping),
                    retentionPolicy=record({}, whenDeleted=of_type(str, "Delete", "Retain")),
                )
            ),
        ),
    }
)


# Not in v0.6, the oldest version that the manifest supports.
AFTER_V0_6 = {
    *("restartStrategy", "onJobFailureMessagePatterns", "groupName", "dependsOn"),
    *("volumeClaimPolicies", "RestartJob", "RestartJobAndIgnoreMaxRestarts"),
}


def admitted(manifest: dict[str, Any]) -> list[str]:
    """Errors that JobSet's own admission checks report beyond the schema."""
    found = []
    spec = manifest["spec"]
    jobs = spec["replicatedJobs"]
    names = [job["name"] for job in jobs]
    rules = spec.get("failurePolicy", {}).get("rules", [])
    of_rules = [rule["name"] for rule in rules]
    targets = [spec.get("successPolicy", {}), *rules]
    found += [f"{name} twice" for name in {*names} if names.count(name) > 1]
    found += [f"rule {name} twice" for name in {*of_rules} if of_rules.count(name) > 1]
    for one in targets:
        for name in one.get("targetReplicatedJobs", []):
            found += [] if name in names else [f"no replicated job {name}"]
    for number, job in enumerate(jobs):
        last = job.get("replicas", 1) - 1
        child = f"{manifest['metadata']['name']}-{job['name']}-{last}"
        pods = f"{child}-{job['template']['spec'].get('completions', 1) - 1}-abcde"
        found += label(child, "job") + label(pods, "pod")  # with Kubernetes' random suffix
        for other in job.get("dependsOn", []):
            found += [] if other["name"] in names[:number] else [f"depends on {other['name']}"]
    return found


selector = record({}, matchLabels=mapping)
peer = record({}, podSelector=selector, namespaceSelector=selector)
network_policy = record(
    {
        "apiVersion": of_type(str, "networking.k8s.io/v1"),
        "kind": of_type(str, "NetworkPolicy"),
        "metadata": record({"name": text}, labels=mapping, annotations=mapping, namespace=text),
        "spec": record(
            {"podSelector": selector},
            policyTypes=each(of_type(str, "Ingress", "Egress")),
            ingress=each(record({}, **{"from": each(peer)}, ports=each(mapping))),
            egress=each(record({}, to=each(peer), ports=each(mapping))),
        ),
    }
)


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / "k8s-jobset.yaml").read_text()))


@pytest.fixture
def manifest() -> dict[str, Any]:
    return documents()[0]


def inner(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The spec of the Job, the spec of the pod, and the container."""
    (replicated,) = manifest["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    (one,) = spec["template"]["spec"]["containers"]
    return spec, spec["template"]["spec"], one


def test_the_manifest_follows_the_schema(manifest: dict[str, Any]) -> None:
    assert jobset(manifest, "JobSet") == []
    assert admitted(manifest) == []


def test_the_manifest_works_with_v0_6(manifest: dict[str, Any]) -> None:
    assert "v0.6 or newer" in (LAUNCH / "k8s-jobset.yaml").read_text()

    def words(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {one for inside in value.values() for one in words(inside)}
        if isinstance(value, list):
            return {one for inside in value for one in words(inside)}
        return {str(value)}

    assert not words(manifest["spec"]) & AFTER_V0_6


def test_the_schema_is_strict(manifest: dict[str, Any]) -> None:
    def broken(change: Callable[[dict[str, Any]], object]) -> list[str]:
        other = copy.deepcopy(manifest)
        change(other)
        return jobset(other, "JobSet")

    assert broken(lambda m: m["spec"].update(replicas=1))
    assert broken(lambda m: m["spec"].pop("replicatedJobs"))
    assert broken(lambda m: m["spec"]["failurePolicy"].update(maxRestarts="30"))
    assert broken(lambda m: m["spec"]["failurePolicy"]["rules"][0].update(name="wrong-use"))
    assert broken(lambda m: inner(m)[0].update(completionMode="indexed"))
    assert broken(lambda m: inner(m)[2]["env"][0].update(value=2))
    assert broken(lambda m: inner(m)[1].update(restartpolicy="Never"))
    assert broken(lambda m: m["spec"]["failurePolicy"]["rules"][0].pop("name"))
    assert broken(lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="Fail"))
    assert broken(lambda m: m["spec"].update(startupPolicy={"startupPolicyOrder": "Any"}))
    assert broken(lambda m: m["spec"]["replicatedJobs"][0].update(replicas=-1))
    assert broken(
        lambda m: inner(m)[0]["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[130, 2])
    )


def test_jobsets_admission_checks_are_applied(manifest: dict[str, Any]) -> None:
    def refused(change: Callable[[dict[str, Any]], object]) -> list[str]:
        other = copy.deepcopy(manifest)
        change(other)
        return admitted(other)

    rules = manifest["spec"]["failurePolicy"]["rules"]
    assert refused(lambda m: m["metadata"].update(name="a" * 55))
    assert refused(lambda m: m["metadata"].update(name="1run"))
    assert refused(lambda m: m["spec"]["failurePolicy"]["rules"].append(rules[0]))
    assert refused(lambda m: m["spec"].update(successPolicy={"targetReplicatedJobs": ["node"]}))
    assert refused(lambda m: m["spec"]["replicatedJobs"][0].update(dependsOn=[{"name": "nodes"}]))


def test_a_pod_has_no_more_rights_than_it_needs(manifest: dict[str, Any]) -> None:
    """The "restricted" profile of Kubernetes' Pod Security Standards, and no service account."""
    _, pod_spec, one = inner(manifest)
    assert pod_spec["automountServiceAccountToken"] is False
    user = pod_spec["securityContext"]
    assert user["runAsNonRoot"] is True
    assert user["runAsUser"] > 0
    assert user["fsGroup"] == user["runAsGroup"] > 0
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod_spec.keys()
    assert not [volume for volume in pod_spec["volumes"] if "hostPath" in volume]


def test_the_cache_is_on_the_shared_volume(manifest: dict[str, Any]) -> None:
    _, pod_spec, one = inner(manifest)
    (folder,) = [entry["value"] for entry in one["env"] if entry["name"] == "JAXTRAIN_CACHE"]
    (mount,) = [mount for mount in one["volumeMounts"] if folder.startswith(mount["mountPath"])]
    (volume,) = [volume for volume in pod_spec["volumes"] if volume["name"] == mount["name"]]
    assert "persistentVolumeClaim" in volume


def test_only_pods_of_the_run_can_connect_to_its_pods(manifest: dict[str, Any]) -> None:
    _, policy = documents()
    assert network_policy(policy, "NetworkPolicy") == []
    assert network_policy(policy | {"spec": {"podselector": {}}}, "NetworkPolicy")
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": manifest["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == own
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]


def test_the_numbers_of_nodes_are_equal(manifest: dict[str, Any]) -> None:
    spec, pod_spec, one = inner(manifest)
    count = {entry["name"]: entry.get("value") for entry in one["env"]}["JAX_NUM_PROCESSES"]
    assert spec["completions"] == spec["parallelism"] == int(count)
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 1
    assert {mount["name"] for mount in one["volumeMounts"]} == {
        volume["name"] for volume in pod_spec["volumes"]
    }


def test_the_manifest_handles_our_exit_codes(manifest: dict[str, Any]) -> None:
    spec, pod_spec, one = inner(manifest)
    assert spec["backoffLimit"] == 0
    assert pod_spec["restartPolicy"] == "Never"  # podFailurePolicy requires it
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 4, 130])
    assert rule["onExitCodes"]["containerName"] == one["name"]
    over, _ = manifest["spec"]["failurePolicy"]["rules"]
    assert (over["action"], over["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_the_manifest_sets_the_variables_that_jaxtrain_reads(manifest: dict[str, Any]) -> None:
    _, _, one = inner(manifest)
    name = manifest["metadata"]["name"]
    values = {"JOBSET_NAME": name, "JOB_COMPLETION_INDEX": "1"}  # by Kubernetes itself
    for entry in one["env"]:
        if "value" in entry:  # $(NAME) refers to an earlier variable
            value = entry["value"]
            for known, text_of in list(values.items()):
                value = value.replace(f"$({known})", text_of)
            assert "$(" not in value
            values[entry["name"]] = value
    found = cluster_env.find(values)
    assert found is not None
    jobs = manifest["spec"]["replicatedJobs"][0]["name"]
    assert found.host == f"{name}-{jobs}-0-0.{name}"
    assert (found.count, found.index, found.hosts) == (2, 1, 2)


def test_the_command_line_is_valid(manifest: dict[str, Any]) -> None:
    _, _, one = inner(manifest)
    typed, problems = flags.parse(RunFlags, "train", one["args"])
    assert not problems
    assert typed.config == "h100_16"
    assert str(typed.output_dir).startswith("/shared/")
    assert typed.overrides == ("--data.path=/shared/data/videos",)
    (script,) = one["command"]
    image = (LAUNCH / "Dockerfile").read_text()
    assert "WORKDIR /opt/jaxtrain\n" in image
    assert "COPY launch launch\n" in image
    assert os.access(LAUNCH / Path(script).relative_to("/opt/jaxtrain/launch"), os.X_OK)


def test_a_healthy_run_may_be_preempted_any_number_of_times(manifest: dict[str, Any]) -> None:
    policy = manifest["spec"]["failurePolicy"]
    assert "maxRestarts" not in policy
    again = policy["rules"][1]
    assert again["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert again["onJobFailureReasons"] == ["BackoffLimitExceeded"]
    _, _, one = inner(manifest)
    (field,) = [entry["valueFrom"] for entry in one["env"] if entry["name"] == "RESTARTS"]
    label = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    assert field == {"fieldRef": {"fieldPath": label}}


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


def test_restarts_after_a_new_checkpoint_do_not_count(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { save $2; kill -KILL $$; }")
    assert [started(stubs, number)[0] for number in range(6)] == [
        -9
    ] * 6  # exec replaced the script


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
    assert second == [*RUN, "--resume", "400", "--resume", "latest"]


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    for arguments, more, message in (
        (("--config", "demo"), {}, "--output-dir is missing"),
        (RUN, {"RESTARTS": "some"}, "RESTARTS is 'some'"),
    ):
        code, _, err = stubs.run("pod.sh", *arguments, **more)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


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
