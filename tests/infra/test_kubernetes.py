"""Tests of infra/kubernetes without a cluster: valid manifests, pods on the right nodes, least rights, no secrets."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from deployments.pools import describe_pools
from holdfast.config import RunConfig
from holdfast.machine.host import VARIABLE
from tests.conftest import ROOT
from tests.support.cluster import GPU_TAINT, Object, matches, tolerates
from tests.support.kubernetes_jobs import (
    ENUMS,
    FOLDER,
    find_faults,
    read_manifests,
    read_worker_settings,
    render_job,
)
from tests.support.tools import checks

POOLS = ("stable", "gpu")
# How long `prefect flow-run execute` was seen to stay after the last save, in seconds (facts of Prefect 3.8.8).
LEAVES_WITHIN_S = 37


def values_of(name: str) -> Object:
    return dict(yaml.safe_load((FOLDER / name).read_text("utf-8")))


def pod_of(job: Object) -> Object:
    return dict(job["spec"]["template"]["spec"])


def container_of(job: Object) -> Object:
    (container,) = pod_of(job)["containers"]
    return dict(container)


# ---- valid, and a planted fault is found


@pytest.mark.parametrize("pool", POOLS)
def test_the_job_of_a_pool_is_valid(pool: str) -> None:
    assert find_faults(render_job(pool)) == []


@pytest.mark.parametrize("name", ["rbac.yaml", "pdb.yaml"])
def test_a_manifest_is_valid(name: str) -> None:
    for manifest in read_manifests(name):
        assert find_faults(manifest) == []


def at(*path: str) -> Callable[[Object, Any], None]:
    """Return a function that sets the value at a path of a Job."""

    def plant(job: Object, value: Any) -> None:
        *inner, last = path
        for key in inner:
            job = job[key]
            job = job[0] if isinstance(job, list) else job
        job[last] = value

    return plant


POD = ("spec", "template", "spec")
PLANTED = [
    (at(*POD, "containers", "imagePullPolcy"), "Always", "imagePullPolcy"),
    (at("spec", "backOffLimit"), 0, "backOffLimit"),
    (at(*POD, "terminationGracePeriodSeconds"), "120", "120"),
    (at(*POD, "containers", "resources", "limit"), {"cpu": "1"}, "limit"),
    (at(*POD, "restartPolicy"), "never", "restartPolicy"),
    (at(*POD, "tolerations", "effect"), "NoShedule", "NoShedule"),
    (at(*POD, "volumes", "emptyDir", "medium"), "memory", "medium"),
    (at("spec", "podFailurePolicy", "rules", "onPodConditions", "type"), "Disruption", "onPodConditions.type"),
    (at("spec", "podReplacementPolicy"), "Fail", "podReplacementPolicy"),
    (at("kind"), "Jobs", "there is no kind Jobs"),
]


@pytest.mark.parametrize(("plant", "value", "message"), PLANTED, ids=[message for _, _, message in PLANTED])
def test_a_planted_fault_is_found(plant: Callable[[Object, Any], None], value: Any, message: str) -> None:
    job = render_job("gpu")
    plant(job, value)
    assert message in "\n".join(find_faults(job))


def test_an_unknown_key_in_the_file_is_found() -> None:
    """The fault is in the template itself, and goes through Prefect's rendering."""
    template = copy.deepcopy(describe_pools("kubernetes")["gpu"])
    pod_of(template["job_configuration"]["job_manifest"])["containers"][0]["volumeMount"] = []
    assert "volumeMount" in "\n".join(find_faults(render_job("gpu", template)))


def test_prefect_still_wants_two_keys_that_kubernetes_does_not_know() -> None:
    """If this fails, `parallelism` and `completions` can go from pools.yaml."""
    template = copy.deepcopy(describe_pools("kubernetes")["gpu"])
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    del pod["parallelism"], pod["completions"]
    with pytest.raises(ValueError, match="missing required attributes"):
        render_job("gpu", template)


# ---- the Job


@pytest.mark.parametrize("pool", POOLS)
def test_kubernetes_starts_no_second_pod(pool: str) -> None:
    spec = render_job(pool)["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["podReplacementPolicy"] == "Failed"
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["FailJob"]
    assert pod_of({"spec": spec})["restartPolicy"] == "Never"


@pytest.mark.parametrize("pool", POOLS)
def test_an_attempt_can_save_within_the_grace_period(pool: str) -> None:
    stop_within_s = RunConfig(recipe="a:b", run="a", epochs=1).resume.stop_within_s
    assert pod_of(render_job(pool))["terminationGracePeriodSeconds"] >= max(90, stop_within_s + LEAVES_WITHIN_S)
    lowest = describe_pools("kubernetes")[pool]["variables"]["properties"]["grace_s"]["minimum"]
    assert lowest >= stop_within_s + LEAVES_WITHIN_S


@pytest.mark.parametrize("pool", POOLS)
def test_prefect_leaves_an_attempt_alone_that_was_told_to_end(pool: str) -> None:
    """A pool's own variables must not hide it, as a list of variables in the container would."""
    job = render_job(pool, env={"NAME": "value"})
    known = {each["name"]: each.get("value") for each in container_of(job)["env"]}
    assert known["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "relinquish"
    assert known["NAME"] == "value"
    assert known["PREFECT_HOME"] == "/tmp/prefect"  # not the worker's


@pytest.mark.parametrize("pool", POOLS)
def test_records_name_the_node_and_not_the_pod(pool: str) -> None:
    (named,) = (each for each in container_of(render_job(pool))["env"] if each["name"] == VARIABLE)
    assert named["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


@pytest.mark.parametrize("pool", POOLS)
def test_the_pod_has_no_rights(pool: str) -> None:
    pod = pod_of(render_job(pool))
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    security = container_of(render_job(pool))["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    accounts = {
        each["metadata"]["name"]: each for each in read_manifests("rbac.yaml") if each["kind"] == "ServiceAccount"
    }
    assert accounts[pod["serviceAccountName"]]["automountServiceAccountToken"] is False
    bound = [each["name"] for each in read_manifests("rbac.yaml")[-1]["subjects"]]
    assert pod["serviceAccountName"] not in bound


def test_the_image_has_the_user_of_the_template() -> None:
    user = pod_of(render_job("gpu"))["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} " in (ROOT / "infra" / "Dockerfile").read_text("utf-8")


def test_a_pod_gets_the_gpus_and_the_shared_memory_of_its_variables() -> None:
    job = render_job("gpu", gpus=4, shm_size="7Gi", memory="64Gi")
    resources = container_of(job)["resources"]
    assert resources["limits"] == resources["requests"] == {"cpu": "3", "memory": "64Gi", "nvidia.com/gpu": 4}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "7Gi"}} in pod_of(job)["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container_of(job)["volumeMounts"]
    assert container_of(render_job("stable"))["resources"]["limits"]["nvidia.com/gpu"] == 0


# ---- the nodes

NODES = {
    "EKS spot": ({"eks.amazonaws.com/capacityType": "SPOT"}, [GPU_TAINT]),
    "Karpenter spot": ({"karpenter.sh/capacity-type": "spot"}, [GPU_TAINT]),
    "GKE spot": (
        {"cloud.google.com/gke-spot": "true"},
        [GPU_TAINT, {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"}],
    ),
    "AKS spot": (
        {"kubernetes.azure.com/scalesetpriority": "spot"},
        [GPU_TAINT, {"key": "kubernetes.azure.com/scalesetpriority", "value": "spot", "effect": "NoSchedule"}],
    ),
    "GPU on demand": ({"eks.amazonaws.com/capacityType": "ON_DEMAND"}, [GPU_TAINT]),
    "spot without a GPU": ({"eks.amazonaws.com/capacityType": "SPOT"}, []),
    "plain": ({}, []),
    "EKS on demand": ({"eks.amazonaws.com/capacityType": "ON_DEMAND"}, []),
}


@pytest.mark.parametrize("node", NODES)
def test_pods_run_on_the_right_nodes(node: str) -> None:
    labels, taints = NODES[node]
    found = set()
    for pool in POOLS:
        pod = pod_of(render_job(pool))
        is_tolerated = all(any(tolerates(each, taint) for each in pod["tolerations"]) for taint in taints)
        if is_tolerated and matches(pod["affinity"]["nodeAffinity"], pod["nodeSelector"], labels):
            found.add(pool)
    expected = {"plain": {"stable"}, "EKS on demand": {"stable"}, "GPU on demand": set()}
    assert found == expected.get(node, {"gpu"})


# ---- the charts' values


def test_the_budget_covers_the_servers_pods() -> None:
    (budget,) = read_manifests("pdb.yaml")
    server = values_of("server-values.yaml")["server"]
    (term,) = server["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert budget["spec"]["selector"] == term["labelSelector"]
    assert server["replicaCount"] > budget["spec"]["maxUnavailable"]


def test_a_rollout_of_the_server_needs_no_third_node() -> None:
    """No two pods of the server share a node, so with two nodes an additional pod would wait forever."""
    server = values_of("server-values.yaml")["server"]
    assert server["replicaCount"] == 2
    # The chart's schema wants texts, and Kubernetes takes a text for a percentage only.
    assert server["updateStrategy"]["rollingUpdate"] == {"maxSurge": "0%", "maxUnavailable": "50%"}


def test_charts_use_the_version_of_prefect_that_the_project_pins() -> None:
    pinned = re.search(r"^prefect==(.+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert pinned
    tags = [
        values_of("server-values.yaml")["global"]["prefect"]["image"]["prefectTag"],
        values_of("worker-values.yaml")["worker"]["image"]["prefectTag"],
    ]
    assert [tag.partition("-")[0] for tag in tags] == [pinned[1]] * 2


def test_workers_have_the_role_and_name_the_secret() -> None:
    values = values_of("worker-values.yaml")
    manifests = read_manifests("rbac.yaml")
    assert values["serviceAccount"]["name"] in [each["name"] for each in manifests[-1]["subjects"]]
    assert [values[name]["create"] for name in ("serviceAccount", "role", "rolebinding")] == [False] * 3
    settings = read_worker_settings()
    prefix = "PREFECT_INTEGRATIONS_KUBERNETES"
    (named,) = (each for each in container_of(render_job("gpu"))["env"] if each["name"] == "PREFECT_API_AUTH_STRING")
    reference = named["valueFrom"]["secretKeyRef"]
    assert reference["name"] == settings[f"{prefix}_WORKER_API_AUTH_STRING_SECRET_NAME"]
    assert reference["key"] == settings[f"{prefix}_WORKER_API_AUTH_STRING_SECRET_KEY"]
    namespaces = {each["metadata"].get("namespace", "holdfast") for each in manifests}
    assert namespaces == {settings[f"{prefix}_OBSERVER_NAMESPACES"]} == {render_job("gpu")["metadata"]["namespace"]}


def test_no_file_has_a_secret() -> None:
    for name in ("server-values.yaml", "worker-values.yaml"):
        found = re.findall(
            r"(?i)^\s*[\w-]*(?:password|authstring|token): *\S+", (FOLDER / name).read_text("utf-8"), re.M
        )
        assert found == []


def test_wrong_values_are_named_with_their_path() -> None:
    job = {"spec": {"tolerations": [{"key": "a", "operator": "Exist"}]}}
    (found,) = checks.jobsets.find_wrong_texts(job, ENUMS)
    assert found.startswith("spec.tolerations.operator: 'Exist' is none of")
