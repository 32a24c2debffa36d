"""Jobs as prefect-kubernetes renders them from a work pool's template, and checks of a Kubernetes manifest."""

import asyncio
import copy
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from deployments.pools import describe_pools, set_defaults
from tests.conftest import ROOT
from tests.support.cluster import Object
from tests.support.tools import TOOLS, checks

FOLDER = ROOT / "infra" / "kubernetes"
# The values that Kubernetes knows. kubernetes-validate accepts any text for them.
ENUMS = {
    "action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "imagePullPolicy": {"IfNotPresent", "Always", "Never"},
    "medium": {"", "Memory"},
    "operator": {"In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Equal"},
    "podReplacementPolicy": {"TerminatingOrFailed", "Failed"},
    "restartPolicy": {"Never", "OnFailure"},  # of a Job
    "seccompProfile.type": {"RuntimeDefault", "Unconfined", "Localhost"},
    "onPodConditions.type": {"DisruptionTarget", "PodScheduled", "Ready", "ContainersReady", "Initialized"},
    "onPodConditions.status": {"True", "False", "Unknown"},
}
KINDS = {
    "v1": {"Namespace", "ServiceAccount", "Pod"},
    "batch/v1": {"Job"},
    "policy/v1": {"PodDisruptionBudget"},
    "rbac.authorization.k8s.io/v1": {"Role", "RoleBinding"},
}


def render_job(pool: str, template: Object | None = None, **values: Any) -> Object:
    """Return the Job that prefect-kubernetes makes for a flow run on a pool, with these defaults of variables."""
    template = set_defaults(template or describe_pools("kubernetes")[pool], {"image": "registry/holdfast:1"} | values)
    # It asks the client only for blocks and variables of the server, of which the template has none.
    client: Any = object()
    configuration = asyncio.run(KubernetesWorkerJobConfiguration.from_template_and_values(template, {}, client=client))
    configuration.prepare_for_flow_run(FlowRun(id=UUID(int=1), flow_id=UUID(int=2), name="toy attempt 1"))
    return configuration.job_manifest


def read_manifests(name: str) -> list[Object]:
    """Return the manifests of a file in infra/kubernetes."""
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


def read_worker_settings() -> dict[str, str]:
    """Return a worker's environment: what worker-values.yaml says, and what the chart prefect-worker makes of it."""
    (values,) = read_manifests("worker-values.yaml")
    worker = values["worker"]
    secret = worker["selfHostedServerApiConfig"]["basicAuth"]["existingSecret"]
    prefix = "PREFECT_INTEGRATIONS_KUBERNETES"
    return {each["name"]: each["value"] for each in worker["extraEnvVars"]} | {
        f"{prefix}_OBSERVER_NAMESPACES": worker["config"]["jobNamespace"],
        f"{prefix}_WORKER_API_AUTH_STRING_SECRET_NAME": secret,
        f"{prefix}_WORKER_API_AUTH_STRING_SECRET_KEY": "auth-string",
    }


def find_faults(manifest: Object) -> list[str]:
    """Return what Kubernetes would refuse or ignore in a manifest. Skip the test if the validator is missing."""
    if not TOOLS.exists():
        pytest.skip("kubernetes-validate is installed by make check-infra")
    manifest = copy.deepcopy(manifest)
    if manifest["kind"] not in KINDS.get(manifest["apiVersion"], set()):
        return [f"there is no kind {manifest['kind']} in {manifest['apiVersion']}"]
    check = checks.check_job if manifest["kind"] == "Job" else checks.check_resource
    return [*check(manifest["kind"], manifest), *checks.jobsets.find_wrong_texts(manifest, ENUMS)]
