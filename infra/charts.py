"""Check the values for Prefect's Helm charts: Helm itself ignores most keys that a chart doesn't have."""

from collections.abc import Iterator
from typing import Any

# The values that the charts take, by the file in infra/kubernetes. A key stands for everything below it.
# From values.yaml and values.schema.json in https://github.com/PrefectHQ/prefect-helm.
_COMMON = "nameOverride fullnameOverride namespaceOverride commonLabels commonAnnotations"
_IMAGE = "repository prefectTag pullPolicy pullSecrets"
_POD = (
    "priorityClassName revisionHistoryLimit replicaCount resources podSecurityContext containerSecurityContext "
    "podLabels podAnnotations affinity nodeSelector tolerations extraEnvVarsCM extraEnvVarsSecret extraContainers "
    "extraVolumes extraVolumeMounts command args"
)
_SCALED = "autoscaling.enabled autoscaling.minReplicas autoscaling.maxReplicas"
_PROBE = "enabled config"
_AUTH = "enabled authString existingSecret"
_ACCOUNT = "create name annotations"
_CHARTS: dict[str, dict[str, str]] = {
    "server-values.yaml": {
        "": f"{_COMMON} migrations ingress gateway httproute sqlite",
        "global.prefect": "env prefectApiUrl prefectApiHost",
        "global.prefect.image": _IMAGE,
        "server": f"{_POD} {_SCALED} debug loggingLevel env apiBasePath updateStrategy extraArgs "
        "autoscaling.targetCPU autoscaling.targetMemory",
        "server.basicAuth": _AUTH,
        "server.uiConfig": "enabled prefectUiApiUrl prefectUiUrl prefectUiStaticDirectory",
        "server.livenessProbe": _PROBE,
        "server.readinessProbe": _PROBE,
        "backgroundServices": f"{_POD} debug loggingLevel env runAsSeparateDeployment serviceAccount "
        "messaging.broker messaging.cache messaging.redis",
        "serviceAccount": _ACCOUNT,
        "service": "port targetPort nodePort extraPorts type clusterIP externalTrafficPolicy annotations",
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
        "autoscaling.targetMemoryUtilizationPercentage clusterUid initContainer apiConfig extraEnvVars extraArgs "
        "updateStrategy cloudApiConfig customerManagedCloudApiConfig",
        "worker.image": f"{_IMAGE} debug",
        "worker.config": "workPool workQueues queryInterval prefetchSeconds http2 limit name installPolicy type "
        "baseJobTemplate",
        "worker.selfHostedServerApiConfig": "apiUrl",
        "worker.selfHostedServerApiConfig.basicAuth": _AUTH,
        "worker.livenessProbe": _PROBE,
        "serviceAccount": _ACCOUNT,
        "role": "create extraPermissions",
        "rolebinding": "create",
    },
}
NAMES = frozenset(_CHARTS)


def find_unknown(name: str, values: dict[str, Any]) -> Iterator[str]:
    """Yield the values, as ``server.affinity``, that a chart doesn't have.

    Args:
        name: the file's name, one of `NAMES`.
    """
    known = {f"{room}.{key}".lstrip(".") for room, keys in _CHARTS[name].items() for key in keys.split()}
    for path in _list_paths(values):
        if not any(path == each or path.startswith(f"{each}.") for each in known):
            yield path


def find_tags(values: dict[str, Any]) -> Iterator[str]:
    """Yield the tags of Prefect's images in a chart's values."""
    for key, value in values.items():
        if key == "prefectTag":
            yield str(value)
        elif isinstance(value, dict):
            yield from find_tags(value)


def make_pods(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a pod of Kubernetes for each part of a chart, with what its values put into the chart's pods as it is."""
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


def _list_paths(values: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield the path of each value that is no mapping, and of each empty mapping."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _list_paths(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"
