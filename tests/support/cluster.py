"""A Kubernetes cluster for tests: its API over HTTP, its controllers, and nodes whose containers are local processes.

It has the part of the API that prefect-kubernetes uses, and refuses each request that the worker's Role doesn't allow.
A node runs the arguments of a pod's container with the container's environment alone. It has no images: the command
finds this repository and its Python instead.
"""

import contextlib
import copy
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.conftest import ROOT, kill_tree
from tests.support.tools import checks

Object = dict[str, Any]
PATH = re.compile(r"/(?:api/v1|apis/(?P<group>batch)/v1)/namespaces/(?P<namespace>[^/]+)/(?P<kind>[^/]+)")
KINDS = {"pods": ("", "Pod"), "jobs": ("batch", "Job"), "events": ("", "Event")}
GPU = "nvidia.com/gpu"


@dataclass
class Node:
    """A machine of the cluster."""

    name: str
    gpus: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    taints: list[dict[str, str]] = field(default_factory=list)


SPOT = {"eks.amazonaws.com/capacityType": "SPOT"}
GPU_TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}


class Refused(Exception):
    """A request that the API server refuses."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """A cluster with one namespace.

    Attributes:
        requests: the rights that were used, as pairs of a verb and a resource.
        refused: the messages of refused requests.
        secrets: the namespace's Secrets, by name.
        history: every change of an object: its number, the object's kind, the event, and the object after it.
        images: the images that nodes can pull.
        shared: a folder of every pod and of this machine, such as a network file system is.
    """

    def __init__(self, folder: Path, rules: list[Object], namespace: str) -> None:
        """
        Args:
            folder: for the pods' files.
            rules: the rules of the worker's Role.
        """
        self.folder, self.rules, self.namespace = folder, rules, namespace
        self.token = secrets.token_hex(8)
        self.requests: set[tuple[str, str]] = set()
        self.refused: list[str] = []
        self.secrets: dict[str, dict[str, str]] = {}
        self.images: set[str] = set()
        self.shared = folder / "shared"
        self._nodes: dict[str, Node] = {}
        self._objects: dict[tuple[str, str], Object] = {}
        self.history: list[tuple[int, str, str, Object]] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._changed = threading.Condition(threading.RLock())
        self.is_open = True
        server = type("Api", (Api,), {"cluster": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), server)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End the API and every container."""
        with self._changed:
            self.is_open = False
            self._changed.notify_all()
        for process in [*self._processes.values()]:
            kill_tree(process.pid)
            process.wait(timeout=30)
        self._server.shutdown()
        self._server.server_close()

    def write_kubeconfig(self) -> Path:
        """Write the file with which the worker finds the cluster; return its path."""
        named = {"name": "test"}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [named | {"cluster": {"server": self.url}}],
            "users": [named | {"user": {"token": self.token}}],
            "contexts": [named | {"context": {"cluster": "test", "user": "test", "namespace": self.namespace}}],
        }  # fmt: skip
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    # ---- for tests: nodes that come and go

    def add_node(self, node: Node) -> None:
        """Add a node; start the pods that were waiting for one like it."""
        with self._changed:
            self._nodes[node.name] = node
            self._schedule()

    def preempt(self, name: str) -> None:
        """Take a node away with a notice, as the cloud does: its pods are told to end, and have their grace period."""
        with self._changed:
            del self._nodes[name]
            for pod in self._pods_on(name):
                self._disrupt(pod, "TerminationByKubelet")

    def vanish(self, name: str) -> None:
        """Take a node away without a notice. Its pods stay *Running*, as far as the API knows."""
        with self._changed:
            del self._nodes[name]
            for pod in self._pods_on(name):
                kill_tree(self._processes.pop(pod["metadata"]["name"]).pid)

    def notice_lost(self, name: str) -> None:
        """Delete a vanished node's pods, as Kubernetes does minutes later."""
        with self._changed:
            for pod in self._pods_on(name):
                pod["metadata"]["deletionTimestamp"] = now()
                pod["status"]["conditions"].append(disruption("DeletionByTaintManager"))
                self._end(pod, 255)

    def delete_job(self, name: str) -> None:
        """Delete a Job, as ``kubectl delete job`` does."""
        with self._changed:
            self._delete_job(self._objects["jobs", name])

    def find(self, kind: str, **labels: str) -> list[Object]:
        """Return the objects of a kind that have these labels, oldest first."""
        with self._changed:
            found = [each for (known, _), each in self._objects.items() if known == kind]
            return copy.deepcopy([each for each in found if labels.items() <= each["metadata"]["labels"].items()])

    # ---- the API

    def ask(self, method: str, url: str, token: str, body: bytes) -> Object:
        """Answer a request that is not a watch."""
        parts = urlsplit(url)
        if token != self.token:
            raise Refused(401, "Unauthorized")
        if method == "GET" and (found := DISCOVERY.get(parts.path)):
            return found
        kind, name, subresource = self.authorize(method, parts.path, dict(parse_qsl(parts.query)))
        with self._changed:
            if method == "POST":
                return self._create(kind, json.loads(body))
            if not name:
                selected = self._select(kind, dict(parse_qsl(parts.query)).get("labelSelector", ""))
                return {
                    "kind": f"{KINDS[kind][1]}List", "apiVersion": api_version(kind), "items": selected,
                    "metadata": {"resourceVersion": str(len(self.history))},
                }  # fmt: skip
            if (kind, name) not in self._objects:
                raise Refused(404, f'{kind} "{name}" not found')
            if subresource == "log":
                return {"log": (self.folder / name / "log").read_text()}
            if method == "DELETE":
                self._delete_job(self._objects[kind, name])
            return copy.deepcopy(self._objects.get((kind, name), {}))

    def authorize(self, method: str, path: str, query: dict[str, str]) -> tuple[str, str, str]:
        """Return kind, name and subresource of a request that the Role allows.

        Raises:
            Refused: the Role doesn't allow it, or the cluster has no such resource.
        """
        match = PATH.match(path)
        if not match or match["kind"] not in KINDS:
            raise self._note(Refused(404, f"there is no {path}"))
        name, _, subresource = path[match.end() + 1 :].partition("/")
        resource = f"{match['kind']}/{subresource}" if subresource else match["kind"]
        reads = "watch" if query.get("watch") else "get" if name else "list"
        verb = {"GET": reads, "POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}[method]
        group = match["group"] or ""
        is_allowed = match["namespace"] == self.namespace and any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in self.rules
        )
        if not is_allowed:
            raise self._note(Refused(403, f"{verb} {resource} in {match['namespace']} is forbidden"))
        self.requests.add((verb, resource))
        return match["kind"], name, subresource

    def watch(self, kind: str, query: dict[str, str]) -> Iterator[Object]:
        """Yield the events of a kind after a resource version, until the cluster closes."""
        seen = int(query.get("resourceVersion") or 0)
        while self.is_open:
            with self._changed:
                news = [each for each in self.history[seen:] if each[1] == kind]
                seen = len(self.history)
                if not news:
                    self._changed.wait(1)
            for _, _, event, obj in news:
                if is_selected(obj, query.get("labelSelector", "")):
                    yield {"type": event, "object": obj}

    def _note(self, refused: Refused) -> Refused:
        self.refused.append(str(refused))
        return refused

    def _create(self, kind: str, obj: Object) -> Object:
        metadata = obj.setdefault("metadata", {})
        if "name" not in metadata:
            metadata["name"] = f"{metadata['generateName']}{secrets.token_hex(3)[:5]}"
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "namespace": self.namespace}
        metadata.setdefault("labels", {})
        obj |= {"apiVersion": api_version(kind), "kind": KINDS[kind][1]}
        self._put(kind, obj, "ADDED")
        if kind == "jobs":
            self._make_pod(obj)
        return copy.deepcopy(obj)

    def _select(self, kind: str, selector: str) -> list[Object]:
        return [each for each in self.find(kind) if is_selected(each, selector)]

    def _put(self, kind: str, obj: Object, event: str = "MODIFIED") -> None:
        """Store an object, or its removal, and tell the watchers."""
        version = len(self.history) + 1
        obj["metadata"]["resourceVersion"] = str(version)
        key = (kind, obj["metadata"]["name"])
        if event == "DELETED":
            self._objects.pop(key, None)
        else:
            self._objects[key] = obj
        self.history.append((version, kind, event, copy.deepcopy(obj)))
        self._changed.notify_all()

    # ---- the Job controller

    def _make_pod(self, job: Object) -> None:
        template = copy.deepcopy(job["spec"]["template"])
        for unknown in checks.WANTED_BY_PREFECT:  # the API server drops what it doesn't know
            template["spec"].pop(unknown, None)
        name = job["metadata"]["name"]
        labels = template.get("metadata", {}).get("labels", {}) | {"job-name": name}
        job["status"] = {"active": 1}
        self._put("jobs", job)
        pod = {
            "metadata": {"generateName": f"{name}-", "labels": labels},
            "spec": template["spec"],
            "status": {"phase": "Pending", "conditions": []},
        }
        self._create("pods", pod)
        self._schedule()

    def _job_of(self, pod: Object) -> Object | None:
        return self._objects.get(("jobs", pod["metadata"]["labels"]["job-name"]))

    def _disrupt(self, pod: Object, reason: str) -> None:
        """Tell a pod to end because of its node."""
        pod["status"]["conditions"].append(disruption(reason))
        self._tell_to_end(pod)
        job = self._job_of(pod)
        if job and job["spec"].get("podReplacementPolicy") != "Failed" and "podFailurePolicy" not in job["spec"]:
            self._fail_job(job, "BackoffLimitExceeded")

    def _tell_to_end(self, pod: Object) -> None:
        name, grace_s = pod["metadata"]["name"], pod["spec"]["terminationGracePeriodSeconds"]
        pod["metadata"]["deletionTimestamp"] = now()
        self._put("pods", pod)
        if process := self._processes.get(name):
            process.send_signal(signal.SIGTERM)
            timer = threading.Timer(grace_s, lambda: process.poll() is None and kill_tree(process.pid))
            timer.daemon = True
            timer.start()
        else:
            self._put("pods", pod, "DELETED")

    def _delete_job(self, job: Object) -> None:
        self._put("jobs", job, "DELETED")
        for pod in self.find("pods", **{"job-name": job["metadata"]["name"]}):
            self._tell_to_end(self._objects["pods", pod["metadata"]["name"]])

    def _fail_job(self, job: Object, reason: str) -> None:
        job["status"] = {"failed": 1, "conditions": [{"type": "Failed", "status": "True", "reason": reason}]}
        self._put("jobs", job)

    def _end(self, pod: Object, code: int) -> None:
        """Record that a pod's container has ended, and what follows for its Job."""
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
        pod["status"] |= {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [describe_container(pod["spec"]["containers"][0], "terminated", ended)],
        }
        self._put("pods", pod)
        if "deletionTimestamp" in pod["metadata"]:
            self._put("pods", pod, "DELETED")
        job = self._job_of(pod)
        if job is None or job["status"].get("conditions"):
            return
        if not code:
            job["status"] = {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}
            self._put("jobs", job)
            return
        actions = [
            rule["action"]
            for rule in job["spec"].get("podFailurePolicy", {}).get("rules", [])
            for pattern in rule.get("onPodConditions", [])
            for condition in pod["status"]["conditions"]
            if (condition["type"], condition["status"]) == (pattern["type"], pattern["status"])
        ]
        if "Ignore" in actions:
            self._make_pod(job)
        else:
            self._fail_job(job, "PodFailurePolicy" if actions else "BackoffLimitExceeded")

    # ---- the scheduler and the nodes

    def _pods_on(self, node: str) -> list[Object]:
        return [
            each
            for (kind, _), each in [*self._objects.items()]
            if kind == "pods" and each["spec"].get("nodeName") == node
        ]

    def _schedule(self) -> None:
        waiting = [
            each
            for (kind, _), each in [*self._objects.items()]
            if kind == "pods" and each["status"]["phase"] == "Pending" and "nodeName" not in each["spec"]
        ]
        for pod in waiting:
            problems = {name: self._find_problem(pod, node) for name, node in self._nodes.items()}
            free = [name for name, problem in problems.items() if not problem]
            if free:
                pod["spec"]["nodeName"] = free[0]
                pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
                self._start(pod)
            else:
                counted = sorted(f"{[*problems.values()].count(each)} {each}" for each in {*problems.values()})
                message = f"0/{len(problems)} nodes are available: {', '.join(counted)}."
                unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                pod["status"]["conditions"] = [unschedulable | {"message": message}]
                self._put("pods", pod)

    def _find_problem(self, pod: Object, node: Node) -> str:
        """Return why a pod can't run on a node, in the words of Kubernetes; empty if it can."""
        spec = pod["spec"]
        for taint in node.taints:
            if not any(tolerates(each, taint) for each in spec.get("tolerations", [])):
                return f"node(s) had untolerated taint {{{taint['key']}: {taint['value']}}}"
        affinity = spec.get("affinity", {}).get("nodeAffinity", {})
        if not matches(affinity, spec.get("nodeSelector", {}), node.labels):
            return "node(s) didn't match Pod's node affinity/selector"
        used = sum(gpus_of(each) for each in self._pods_on(node.name) if each["metadata"]["name"] in self._processes)
        return f"Insufficient {GPU}" if gpus_of(pod) > node.gpus - used else ""

    def _start(self, pod: Object) -> None:
        """Start a pod's container on its node."""
        name = pod["metadata"]["name"]
        (container,) = pod["spec"]["containers"]
        if container["image"] not in self.images:
            message = f"{container['image']}: not found"
            waiting = {"reason": "ErrImagePull", "message": message}
            pod["status"]["containerStatuses"] = [describe_container(container, "waiting", waiting)]
            self._put("pods", pod)
            return
        home = self.folder / name
        home.mkdir()
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                container["args"], env=self._environment(pod, home), cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._processes[name] = process
        running = describe_container(container, "running", {"startedAt": now()})
        pod["status"] |= {"phase": "Running", "containerStatuses": [running], "startTime": now()}
        self._put("pods", pod)
        threading.Thread(target=self._await, args=(name, process), daemon=True).start()

    def _await(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        with self._changed:
            if self.is_open and self._processes.pop(name, None):
                self._end(self._objects["pods", name], code if code >= 0 else 128 - code)
                self._schedule()

    def _environment(self, pod: Object, home: Path) -> dict[str, str]:
        """Return the environment of a pod's container. Its volumes are folders of its own."""
        (container,) = pod["spec"]["containers"]
        known = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        for source in container.get("envFrom", []):
            reference = source["secretRef"]
            if reference["name"] in self.secrets or not reference.get("optional"):
                known |= self.secrets[reference["name"]]
        for each in container["env"]:
            if "value" in each:
                value = each["value"]
                paths = [mount["mountPath"] for mount in container["volumeMounts"]]
                if any(Path(value).is_relative_to(path) for path in paths) and not Path(value).is_relative_to(
                    self.shared
                ):
                    value = f"{home}{value}"
                    Path(value).mkdir(parents=True, exist_ok=True)
                known[each["name"]] = value
            elif "fieldRef" in each["valueFrom"]:
                assert each["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
                known[each["name"]] = pod["spec"]["nodeName"]
            else:
                reference = each["valueFrom"]["secretKeyRef"]
                known[each["name"]] = self.secrets[reference["name"]][reference["key"]]
        return known


class Api(BaseHTTPRequestHandler):
    """The HTTP side of a cluster."""

    cluster: Cluster

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        if query.get("watch"):
            self._watch(parts.path, query)
        else:
            self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            found, status = self.cluster.ask(method, self.path, token, body), 200
        except Refused as refused:
            found, status = {"kind": "Status", "message": str(refused), "code": refused.status}, refused.status
        data = json.dumps(found).encode()
        kind = "application/json"
        if set(found) == {"log"}:
            data, kind = found["log"].encode(), "text/plain"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def _watch(self, path: str, query: dict[str, str]) -> None:
        try:
            kind, _, _ = self.cluster.authorize("GET", path, query)
        except Refused as refused:
            self.send_error(refused.status)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        with contextlib.suppress(OSError):
            for event in self.cluster.watch(kind, query):
                self.wfile.write(json.dumps(event).encode() + b"\n")
                self.wfile.flush()


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def disruption(reason: str) -> Object:
    """Return the condition of a pod that ends because of its node."""
    return {"type": "DisruptionTarget", "status": "True", "reason": reason}


def describe_container(container: Object, state: str, details: Object) -> Object:
    """Return a container's status, with all that the API promises."""
    known = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
    return known | {"ready": state == "running", "state": {state: details}}


def api_version(kind: str) -> str:
    return f"{KINDS[kind][0]}/v1".lstrip("/")


def gpus_of(pod: Object) -> int:
    return int(pod["spec"]["containers"][0]["resources"]["limits"].get(GPU, 0))


def is_selected(obj: Object, selector: str) -> bool:
    """Return whether an object has the labels of a selector: ``key`` and ``key=value``, separated by commas."""
    labels = obj["metadata"].get("labels", {})
    wanted = [each.partition("=") for each in selector.split(",") if each]
    return all(key in labels and (not equals or labels[key] == value) for key, equals, value in wanted)


def tolerates(toleration: dict[str, str], taint: dict[str, str]) -> bool:
    """Return whether a toleration matches a taint, by the rules of Kubernetes."""
    if toleration.get("effect") not in (None, taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


def matches(affinity: Object, selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Return whether a node's labels satisfy a nodeAffinity and a nodeSelector."""
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = required["nodeSelectorTerms"] if required else [{"matchExpressions": []}]
    has_term = any(all(holds(each, labels) for each in term["matchExpressions"]) for term in terms)
    return has_term and selector.items() <= labels.items()


def holds(expression: Object, labels: dict[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", [])
    return {
        "In": key in labels and labels[key] in values,
        "NotIn": key not in labels or labels[key] not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }[expression["operator"]]


def describe_kinds(group: str) -> Object:
    verbs = ["create", "delete", "get", "list", "watch"]
    found: list[Object] = [
        {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for name, (known, kind) in KINDS.items()
        if known == group
    ]
    if not group:
        found.append({"name": "namespaces", "singularName": "namespace", "namespaced": False, "kind": "Namespace"})
    return {"kind": "APIResourceList", "groupVersion": f"{group}/v1".lstrip("/"), "resources": found}


BATCH = {"groupVersion": "batch/v1", "version": "v1"}
DISCOVERY: dict[str, Object] = {
    "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [{"name": "batch", "versions": [BATCH], "preferredVersion": BATCH}],
    },
    "/api/v1": describe_kinds(""),
    "/apis/batch/v1": describe_kinds("batch"),
}
