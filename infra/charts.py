"""Check the values for Prefect's Helm charts, because Helm itself ignores most keys that a chart doesn't have."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

# For each file of values: its chart, and the further options of the command in docs/kubernetes.md that installs the
# chart.
REPOSITORY, VERSION = "https://prefecthq.github.io/prefect-helm", ">=2026.7"
CHARTS: dict[str, tuple[str, list[str]]] = {
    "server-values.yaml": ("prefect-server", []),
    "worker-values.yaml": (
        "prefect-worker",
        ["--set", "fullnameOverride=worker-gpu", "--set", "worker.config.workPool=gpu"],
    ),
}

# The values that the charts accept, by the file in infra/kubernetes. A key includes all keys below it. Sources:
# values.yaml, values.schema.json and the tests in https://github.com/PrefectHQ/prefect-helm, of July 2026.
_COMMON = "nameOverride fullnameOverride namespaceOverride commonLabels commonAnnotations"
_IMAGE = "repository prefectTag pullPolicy pullSecrets"
_POD = (
    "priorityClassName revisionHistoryLimit replicaCount resources podSecurityContext containerSecurityContext "
    "podLabels podAnnotations affinity nodeSelector tolerations extraEnvVarsCM extraEnvVarsSecret extraContainers "
    "extraVolumes extraVolumeMounts command args"
)
_SERVER_POD = f"{_POD} debug loggingLevel env terminationGracePeriodSeconds lifecycle extraInitContainers"
_SCALED = "autoscaling.enabled autoscaling.minReplicas autoscaling.maxReplicas"
_PROBE = "enabled path config"
_AUTH = "enabled authString existingSecret"
_ACCOUNT = "create name annotations"
_CHARTS: dict[str, dict[str, str]] = {
    "server-values.yaml": {
        "": f"{_COMMON} migrations ingress gateway httproute sqlite database",
        "global.prefect": "env",
        "global.prefect.image": _IMAGE,
        "server": f"{_SERVER_POD} {_SCALED} apiBasePath updateStrategy extraArgs "
        "autoscaling.targetCPU autoscaling.targetMemory",
        "server.basicAuth": _AUTH,
        "server.uiConfig": "prefectUiApiUrl prefectUiStaticDirectory",
        "server.startupProbe": "enabled config",
        "server.livenessProbe": _PROBE,
        "server.readinessProbe": _PROBE,
        "backgroundServices": f"{_SERVER_POD} runAsSeparateDeployment serviceAccount "
        "messaging.broker messaging.cache messaging.redis messaging.docket",
        "serviceAccount": _ACCOUNT,
        "service": "portName port targetPort appProtocol nodePort extraPorts type clusterIP externalTrafficPolicy "
        "ipFamilyPolicy ipFamilies annotations",
        "secret": "create name username password host port database",
        "redis": "enabled architecture image auth master",
        "postgresql": "enabled image",
        "postgresql.auth": "enablePostgresUser database username password existingSecret secretKeys",
        "postgresql.primary": "initdb resources",
        "postgresql.primary.persistence": "enabled size storageClass existingClaim accessModes annotations",
    },
    "worker-values.yaml": {
        "": _COMMON,
        "worker": f"{_POD} {_SCALED} autoscaling.targetCPUUtilizationPercentage "
        "autoscaling.targetMemoryUtilizationPercentage clusterUid initContainer apiConfig extraEnvVars extraEnvVarsCMs "
        "extraEnvVarsSecrets extraArgs dnsPolicy dnsConfig podDisruptionBudget cloudApiConfig "
        "customerManagedCloudApiConfig",
        "worker.image": f"{_IMAGE} debug",
        "worker.config": "workPool workQueues queryInterval prefetchSeconds http2 limit name installPolicy type "
        "jobNamespace observerClusterWide baseJobTemplate",
        "worker.selfHostedServerApiConfig": "apiUrl",
        "worker.selfHostedServerApiConfig.basicAuth": _AUTH,
        "worker.livenessProbe": "enabled config",
        "serviceAccount": _ACCOUNT,
        "role": "create namespace extraPermissions",
        "rolebinding": "create",
    },
}
NAMES = frozenset(_CHARTS)
# For each container of a chart: the lists of values that form its environment, and the variables that the chart adds.
_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL PREFECT_API_DATABASE_CONNECTION_URL"
_MULTI_SERVER = (
    "PREFECT_SERVER_DATABASE_MIGRATE_ON_START PREFECT_API_DATABASE_MIGRATE_ON_START PREFECT_MESSAGING_BROKER "
    "PREFECT_MESSAGING_CACHE PREFECT_SERVER_EVENTS_CAUSAL_ORDERING PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE "
    "PREFECT_REDIS_MESSAGING_HOST PREFECT_REDIS_MESSAGING_PORT PREFECT_REDIS_MESSAGING_DB "
    "PREFECT_REDIS_MESSAGING_USERNAME PREFECT_REDIS_MESSAGING_PASSWORD PREFECT_REDIS_MESSAGING_SSL "
    "PREFECT_SERVER_DOCKET_URL"
)
_ENVIRONMENTS: dict[str, dict[tuple[str, ...], str]] = {
    "server-values.yaml": {
        ("global.prefect.env", "server.env"): f"HOME PREFECT_DEBUG_MODE PREFECT_LOGGING_SERVER_LEVEL {_DATABASE} "
        f"{_MULTI_SERVER} PREFECT_SERVER_API_BASE_PATH PREFECT_SERVER_API_HOST PREFECT_SERVER_API_PORT "
        "PREFECT_SERVER_API_AUTH_STRING PREFECT_UI_API_URL PREFECT_UI_STATIC_DIRECTORY",
        ("global.prefect.env", "backgroundServices.env"): "HOME PREFECT_DEBUG_MODE PREFECT_LOGGING_SERVER_LEVEL "
        f"{_DATABASE} {_MULTI_SERVER} PREFECT_UI_ENABLED",
    },
    "worker-values.yaml": {
        ("worker.extraEnvVars",): "HOME PREFECT_WORKER_PREFETCH_SECONDS PREFECT_WORKER_QUERY_SECONDS "
        "PREFECT_API_ENABLE_HTTP2 PREFECT_API_URL PREFECT_API_KEY PREFECT_API_AUTH_STRING PREFECT_DEBUG_MODE "
        "PREFECT_KUBERNETES_CLUSTER_UID PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES "
        "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_NAME "
        "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_KEY",
    },
}


def find_unknown(name: str, values: dict[str, Any]) -> Iterator[str]:
    """Yield the values, such as ``server.affinity``, that a chart doesn't have.

    Args:
        name: the file's name, one of `NAMES`.
    """
    known = {f"{room}.{key}".lstrip(".") for room, keys in _CHARTS[name].items() for key in keys.split()}
    for path in _list_paths(values):
        if not any(path == each or path.startswith(f"{each}.") for each in known):
            yield path


def find_repeated(name: str, values: dict[str, Any]) -> Iterator[str]:
    """Yield the environment variables, such as ``server.env: HOME``, that a container would have twice.

    Helm 4 applies manifests on the server's side, and the server refuses such a container
    (https://github.com/helm/helm/issues/31529).

    Args:
        name: the file's name, one of `NAMES`.
    """
    found = set()
    for rooms, own in _ENVIRONMENTS[name].items():
        seen = set(own.split())
        for room in rooms:
            for variable in _list_variables(values, room):
                if variable in seen:
                    found.add(f"{room}: {variable}")
                seen.add(variable)
    yield from sorted(found)


def find_repeated_in(resource: dict[str, Any]) -> Iterator[str]:
    """Yield the environment variables, such as ``Deployment worker-gpu: HOME``, that a rendered container has twice."""
    spec = resource.get("spec", {}).get("template", {}).get("spec", {})
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        for variable, count in Counter(each["name"] for each in container.get("env") or []).items():
            if count > 1:
                yield f"{resource['kind']} {resource['metadata']['name']}: {variable}"


def find_tags(values: dict[str, Any]) -> Iterator[str]:
    """Yield the tags of Prefect's images in a chart's values."""
    for key, value in values.items():
        if key == "prefectTag":
            yield str(value)
        elif isinstance(value, dict):
            yield from find_tags(value)


def make_pods(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a Kubernetes pod for each part of a chart, with the values that the chart copies into its pods."""
    for part, known in values.items():
        if not isinstance(known, dict) or not {"podSecurityContext", "affinity", "env", "extraEnvVars"} & known.keys():
            continue
        container = {
            "name": "container",
            "image": "image:1",
            "env": known.get("env") or known.get("extraEnvVars") or [],
            "securityContext": known.get("containerSecurityContext") or {},
            "resources": known.get("resources") or {},
        }
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": part.lower()},
            "spec": {
                "containers": [container],
                "securityContext": known.get("podSecurityContext") or {},
                "affinity": known.get("affinity") or {},
                "nodeSelector": known.get("nodeSelector") or {},
                "tolerations": known.get("tolerations") or [],
            },
        }


def _list_variables(values: dict[str, Any], room: str) -> list[str]:
    """Return the names of the environment variables in a list of a chart's values.

    Args:
        room: the dotted path of the list.
    """
    known: Any = values
    for key in room.split("."):
        known = (known or {}).get(key)
    return [each["name"] for each in known or []]


def _list_paths(values: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield the path of each value that is no mapping, and of each empty mapping."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _list_paths(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"
