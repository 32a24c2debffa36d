"""Tests of the Kubernetes pools with Prefect's own server and workers, on a cluster whose pods are local processes.

The workers have the settings of infra/kubernetes/worker-values.yaml and the rights of infra/kubernetes/rbac.yaml.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from deployments import local
from tests.conftest import Reference
from tests.support.cluster import GPU, GPU_TAINT, SPOT, Cluster, Node
from tests.support.kubernetes_jobs import find_faults, read_manifests, read_worker_settings
from tests.support.pools import Pool, PoolRun, await_true, served

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.pool]

STEPS = 30
CHUNK = 4
NAMESPACE, IMAGE = "holdfast", "registry/holdfast:1"
# A hanging program takes longer; a machine with ten times as much work as cores doesn't.
WITHIN_S = 300.0


@dataclass
class KubernetesPool(Pool):
    """A server, a cluster, and a worker of each pool that makes a Job for each flow run.

    Attributes:
        dead: a flow run whose pod dies before it begins.
    """

    cluster: Cluster | None = None
    dead: str = ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    (role,) = (each for each in read_manifests("rbac.yaml") if each["kind"] == "Role")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), role["rules"], role["metadata"]["namespace"])
    with contextlib.closing(cluster):
        cluster.images.add(IMAGE)
        cluster.add_node(Node("system"))
        yield cluster


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[KubernetesPool]:
    folder = tmp_path_factory.mktemp("kubernetes")
    values = {
        "image": IMAGE,
        "namespace": NAMESPACE,
        "env": {"TOY_DELAY_S": "0.1", "TOY_TRAINED": str(folder), "TZ": "UTC"},
    }
    environment = read_worker_settings() | {"KUBECONFIG": str(cluster.write_kubeconfig())}
    pool = KubernetesPool(local.ProcessLedger(folder), environment, "kubernetes", values)
    pool.cluster, cluster.shared = cluster, folder
    with served(pool):
        cluster.secrets["holdfast-auth"] = {"auth-string": local.own_auth(pool.ledger)}
        pool.make_up()
        pool.dead = start_dead(pool)
        yield pool


def start_dead(pool: Pool) -> str:
    """Start a flow run whose pod dies before it begins; return its id. The worker notices that after 30 seconds."""
    known = pool.ask("GET", "/deployments/name/prune/prune")
    command = "sh -c 'echo no module named flows; exit 3'"
    body = {"job_variables": {"command": command}, "parameters": {"store": str(pool.ledger.folder)}}
    return str(pool.ask("POST", f"/deployments/{known['id']}/create_flow_run", body)["id"])


@pytest.fixture
def run(pool: KubernetesPool, request: pytest.FixtureRequest) -> PoolRun:
    return PoolRun(pool, pool.ledger.folder, f"toy-{len(request.node.name)}")


def add_spot_node(cluster: Cluster, name: str) -> None:
    cluster.add_node(Node(name, gpus=1, labels=SPOT, taints=[GPU_TAINT]))


def test_a_run_survives_its_nodes(run: PoolRun, cluster: Cluster, reference: Reference) -> None:
    """It waits for a node, is preempted on the first, loses the second without a notice, and completes on the third.

    Meanwhile the worker uses the rights of its Role, and no others.
    """
    cluster.add_node(Node("spot-0", gpus=0, labels=SPOT, taints=[GPU_TAINT]))
    train = run.start()
    waits = f"{run.name} attempt 1 waits for its cluster to find a machine"
    await_true(lambda: waits in run.pool.logs(train), f"train did not say: {waits}", WITHIN_S)
    (first,) = run.attempts()
    reason = f"0/2 nodes are available: 1 Insufficient {GPU}"
    await_true(lambda: reason in run.pool.logs(first["id"]), f"the attempt did not say: {reason}", WITHIN_S)
    assert run.pool.read(first["id"])["state"]["name"] == "InfrastructurePending"

    add_spot_node(cluster, "spot-1")
    run.await_commits(1, WITHIN_S)
    cluster.preempt("spot-1")
    add_spot_node(cluster, "spot-2")
    run.await_attempt(2, WITHIN_S)
    run.await_commits(run.journal().newest_number() + 1, WITHIN_S)
    cluster.vanish("spot-2")
    at = time.monotonic()
    add_spot_node(cluster, "spot-3")
    run.await_attempt(3, WITHIN_S)
    print(f"the next attempt, {time.monotonic() - at:.1f} s after a node vanished")
    cluster.notice_lost("spot-2")

    assert run.pool.await_end(train, WITHIN_S)["state"]["name"] == "Completed"
    assert [reason for reason, _ in run.reasons()] == ["preempted", "vanished", "completed"]
    commits = [run.journal().read_commit(number) for number in run.journal().numbers("commits")]
    assert run.reasons()[0][1] == max(commit.step for commit in commits if commit.attempt == 1)
    assert STEPS <= run.count_trained() <= STEPS + CHUNK
    assert run.standing().step == STEPS
    assert run.standing().checkpoint_sha256 == reference.standing.checkpoint_sha256
    assert [attempt["state"]["name"] for attempt in run.attempts()] == ["Preempted", "Vanished", "Completed"]
    check_jobs(run, cluster)
    check_rights(cluster)


def check_rights(cluster: Cluster) -> None:
    """Assert that the worker was granted what it asked for, and nothing more.

    It reads a Job that a person has deleted: see the next test. It deletes a Job only if its flow run stays Cancelling
    for minutes.
    """
    assert cluster.refused == []
    granted = {(verb, resource) for rule in cluster.rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert cluster.requests | {("get", "jobs"), ("delete", "jobs")} == granted


def check_jobs(run: PoolRun, cluster: Cluster) -> None:
    """Assert that each flow run had one valid Job and one pod, without the server's password."""
    auth = local.own_auth(run.pool.ledger)
    for flow_run in run.attempts():
        (job,) = cluster.find("jobs", **{"prefect.io/flow-run-id": flow_run["id"]})
        assert auth not in str(job)
        environment = {each["name"]: each for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert environment["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"]["value"] == "relinquish"
        assert environment["PREFECT_API_AUTH_STRING"]["valueFrom"]["secretKeyRef"]["name"] == "holdfast-auth"
        assert str(run.pool.ledger.folder / "prefect") not in str(job)
        assert find_faults({key: value for key, value in job.items() if key != "status"}) == []
    pods = [
        event
        for _, kind, event, each in cluster.history
        if kind == "pods"
        and event == "ADDED"
        and each["metadata"]["labels"].get("prefect.io/flow-run-id") in {each["id"] for each in run.attempts()}
    ]
    assert len(pods) == len(run.attempts())


def test_an_image_that_is_not_there_is_named(run: PoolRun, cluster: Cluster) -> None:
    """A person then deletes its Job."""
    known = run.pool.ask("GET", "/deployments/name/attempt/gpu")
    body = {
        "job_variables": {"image": "registry/holdfast:none"},
        "parameters": {"config": run.config(), "number": 1},
        "state": {"type": "SCHEDULED"},
    }
    add_spot_node(cluster, "spot-4")
    flow_run = str(run.pool.ask("POST", f"/deployments/{known['id']}/create_flow_run", body)["id"])
    message = "registry/holdfast:none: not found"
    await_true(lambda: message in run.pool.logs(flow_run), f"the flow run did not say: {message}", WITHIN_S)
    (job,) = cluster.find("jobs", **{"prefect.io/flow-run-id": flow_run})
    cluster.delete_job(job["metadata"]["name"])
    state = run.pool.await_end(flow_run, WITHIN_S)["state"]
    assert (state["name"], state["message"]) == ("Crashed", "Kubernetes job was deleted")
    assert ("get", "jobs") in cluster.requests


def test_a_pod_that_dies_at_once_shows_its_output(pool: KubernetesPool) -> None:
    ended = pool.await_end(pool.dead, WITHIN_S)
    assert ended["state"]["name"] == "Crashed"
    await_true(lambda: "no module named flows" in pool.logs(pool.dead), "its output is not in its log", WITHIN_S)
