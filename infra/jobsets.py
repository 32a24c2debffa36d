"""Check a JobSet, or a TrainJob with its runtime, against the official schemas; check that its numbers are consistent.

::

    .venv/tools/bin/python infra/jobsets.py FILE...

The schemas come from the package ``kubeflow-trainer-api``, which Kubeflow generates from the API's source. They give
the type of a value, but not the allowed texts; `TEXTS` lists the allowed texts.
"""

import importlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Object = dict[str, Any]

# The class of each kind of resource in the package ``kubeflow-trainer-api``.
MODELS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): "TrainerV1alpha1ClusterTrainingRuntime",
}
# Two types that the package describes as empty objects: a quantity, and a number or text. kubernetes-validate checks
# their values.
UNKNOWN = ("IoK8sApimachineryPkgApiResourceQuantity", "IoK8sApimachineryPkgUtilIntstrIntOrString")
# The allowed texts of values, from the descriptions in the schemas, by the end of the value's path.
TEXTS = {
    "failurePolicy.rules.action": {
        "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    },
    "podFailurePolicy.rules.action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "onExitCodes.operator": {"In", "NotIn"},
    "onPodConditions.type": {"DisruptionTarget"},
}  # fmt: skip
ANCESTOR = ("trainer.kubeflow.org/trainjob-ancestor-step", "trainer")
QUEUE = "kueue.x-k8s.io/queue-name"
# The default of resume.stop_within_s, in seconds, and the seconds that `holdfast train` may need after the save for its
# records, report and sinks.
STOP_WITHIN_S, LEAVES_WITHIN_S = 25.0, 15.0
# The exit codes after which another attempt may continue the run: stopped early, SIGKILL, SIGTERM.
CONTINUED, FAILED = (3, 137, 143), (1, 2)


def is_known(resource: Object) -> bool:
    """Return whether this module checks a resource."""
    return (resource.get("apiVersion"), resource.get("kind")) in MODELS


def find_faults(resources: Sequence[Object]) -> Iterator[str]:
    """Yield the faults of a file's JobSets, TrainJobs and runtimes, without the Jobs inside them (`list_jobs`)."""
    known = [*filter(is_known, resources)]
    runtimes = {_name(each): each for each in known if each["kind"].endswith("TrainingRuntime")}
    for each in known:
        name = f"{each['kind']} {_name(each)}"
        wrong = [*_find_unfitting(each), *find_wrong_texts(each, TEXTS)]
        yield from (f"{name}: {fault}" for fault in wrong)
        if wrong or each["kind"].endswith("TrainingRuntime"):
            continue
        made = each if each["kind"] == "JobSet" else make_jobset(each, runtimes)
        if made is None:
            yield f"{name}: the file has no runtime {each['spec']['runtimeRef']['name']}"
        else:
            yield from (f"{name}: {fault}" for fault in _find_contradictions(made))


def _name(resource: Object) -> str:
    return str(resource.get("metadata", {}).get("name", "without a name"))


def list_jobs(resource: Object) -> Iterator[Object]:
    """Yield the Jobs inside a JobSet or a runtime. Yield nothing for a TrainJob, because it contains no Jobs."""
    outer = resource["spec"] if resource["kind"] == "JobSet" else resource["spec"].get("template", {}).get("spec", {})
    for each in outer.get("replicatedJobs", ()):
        metadata = each["template"].get("metadata", {}) | {"name": each["name"]}
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": each["template"]["spec"]}


# ---- the schemas


def _read_schema(model: str) -> Object:
    """Return the schema of a class, changed so that it refuses unknown keys."""
    schema: Object = getattr(importlib.import_module("kubeflow_trainer_api.models"), model).model_json_schema()
    known = schema["$defs"]
    for each in (schema, *known.values()):
        if "properties" in each:
            each["additionalProperties"] = False
    known |= {name: {"type": ["string", "number"]} for name in UNKNOWN}
    return schema


def _find_unfitting(resource: Object) -> Iterator[str]:
    validator = jsonschema.Draft202012Validator(_read_schema(MODELS[resource["apiVersion"], resource["kind"]]))
    for error in validator.iter_errors(resource):
        yield from _spell(error)


def _spell(error: jsonschema.ValidationError) -> Iterator[str]:
    """Yield an error as text with its path. If the value may also be null, yield only the errors of the other type."""
    if error.validator == "anyOf":
        for each in error.context or ():
            if each.schema != {"type": "null"}:
                yield from _spell(each)
    else:
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def find_wrong_texts(value: Any, texts: Mapping[str, set[str]], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the texts in a resource that aren't allowed at their place.

    Args:
        texts: the allowed texts of a value, by the end of its path: a key, or several keys with dots between them. If
            several ends match, the longest counts.
        path: the keys that lead to the value.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            yield from find_wrong_texts(each, texts, (*path, key))
    elif isinstance(value, list):
        for each in value:
            yield from find_wrong_texts(each, texts, path)
    else:
        name = ".".join(path)
        fitting = [end for end in texts if f".{name}".endswith(f".{end}")]
        if fitting and value not in (known := texts[max(fitting, key=len)]):
            yield f"{name}: {value!r} is none of {', '.join(sorted(known))}"


# ---- numbers that must fit each other


def make_jobset(trainjob: Object, runtimes: dict[str, Object]) -> Object | None:
    """Return the JobSet that Kubeflow Trainer makes from a TrainJob; None if its runtime isn't in the file."""
    spec = trainjob["spec"]
    runtime = runtimes.get(spec["runtimeRef"]["name"])
    if runtime is None:
        return None
    trainer = spec.get("trainer", {})
    nodes = trainer.get("numNodes", runtime["spec"].get("mlPolicy", {}).get("numNodes", 1))
    made: Object = runtime["spec"]["template"]["spec"] | {"suspend": spec.get("suspend", False)}
    made["replicatedJobs"] = [_give(each, trainer, nodes) for each in made["replicatedJobs"]]
    return {"metadata": trainjob["metadata"], "spec": made}


def _give(replicated: Object, trainer: Object, nodes: int) -> Object:
    """Return a runtime's Job. If it is the training Job, its nodes, command and arguments are those of the TrainJob."""
    template = replicated["template"]
    key, value = ANCESTOR
    if template.get("metadata", {}).get("labels", {}).get(key) != value:
        return replicated
    spec = template["spec"] | {"completions": nodes, "parallelism": nodes}
    pod = spec["template"]["spec"]
    containers = [
        each | {key: trainer[key] for key in ("command", "args") if key in trainer}
        if each["name"] == replicated["name"]
        else each
        for each in pod["containers"]
    ]
    spec["template"] = spec["template"] | {"spec": pod | {"containers": containers}}
    return replicated | {"template": template | {"spec": spec}}


def _find_contradictions(jobset: Object) -> Iterator[str]:
    spec, metadata = jobset["spec"], jobset["metadata"]
    if QUEUE in metadata.get("labels", {}) and not spec.get("suspend"):
        yield f"suspend must be true: the pods would start before the queue {metadata['labels'][QUEUE]} has room"
    policy = spec.get("failurePolicy", {})
    if not policy.get("maxRestarts"):
        yield "failurePolicy.maxRestarts must be set: the JobSet would end with its first failed Job"
    if _decide_for_job(policy, "PodFailurePolicy") != "FailJobSet":
        yield "failurePolicy has no rule FailJobSet for the reason PodFailurePolicy: exit code 1 would restart the pods"
    if _decide_for_job(policy, "BackoffLimitExceeded") == "FailJobSet":
        yield "failurePolicy fails the JobSet for the reason BackoffLimitExceeded"
    trained = [(each, container, found) for each in spec["replicatedJobs"] for container, found in find_trained(each)]
    if not trained:
        yield "no container has the arguments holdfast train"
    for replicated, container, settings in trained:
        where = f"replicatedJobs {replicated['name']}"
        host = f"{metadata['name']}-{replicated['name']}-0-0"
        subdomain = spec.get("network", {}).get("subdomain", metadata["name"])
        faults = [
            *_find_wrong_nodes(replicated, settings, f"{host}.{subdomain}"),
            *_find_wrong_names(replicated, container),
            *_find_wrong_ends(replicated["template"]["spec"], container, settings),
        ]
        yield from (f"{where}: {fault}" for fault in faults)
    if not spec.get("network", {}).get("enableDNSHostnames", True):
        yield "network.enableDNSHostnames must be true: the nodes don't find node 0"


def find_trained(replicated: Object) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name of each container that trains a run, with the settings in its arguments."""
    for container in replicated["template"]["spec"]["template"]["spec"]["containers"]:
        words = [*container.get("command", ()), *container.get("args", ())]
        pairs = [*itertools.pairwise(words)]
        if ("holdfast", "train") in pairs:
            given = [after for word, after in pairs if word == "--set"]
            yield container["name"], dict(each.split("=", 1) for each in given)


def _find_wrong_nodes(replicated: Object, settings: dict[str, str], host: str) -> Iterator[str]:
    job = replicated["template"]["spec"]
    if replicated.get("replicas", 1) != 1:
        yield "replicas must be 1: two Jobs would both have a node 0"
    if job.get("completionMode") != "Indexed":
        yield "completionMode must be Indexed: it numbers the nodes"
    nodes = settings.get("compute.nodes", "1")
    most = nodes.rpartition(":")[2]
    for key in ("completions", "parallelism"):
        if str(job.get(key, 1)) != most:
            yield f"compute.nodes = {nodes}, and {key} is {job.get(key, 1)}"
    found = settings.get("compute.rendezvous", "").rpartition(":")[0]
    if most != "1" and found != host:
        yield f"compute.rendezvous names {found or 'no host'}; node 0 is {host}"


def _find_wrong_names(replicated: Object, container: str) -> Iterator[str]:
    containers = replicated["template"]["spec"]["template"]["spec"]["containers"]
    (env,) = (each.get("env", []) for each in containers if each["name"] == container)
    given = [each for each in env if each["name"] == "HOLDFAST_HOST"]
    if [each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") for each in given] != ["spec.nodeName"]:
        yield "HOLDFAST_HOST must be spec.nodeName: an audit would name a pod in place of the node"


def _find_wrong_ends(job: Object, container: str, settings: dict[str, str]) -> Iterator[str]:
    pod = job["template"]["spec"]
    if pod.get("restartPolicy") != "Never":
        yield "restartPolicy must be Never: a podFailurePolicy needs it"
    if job.get("podReplacementPolicy") != "Failed":
        yield "podReplacementPolicy must be Failed: a pod would be replaced while it saves"
    needed_s = float(settings.get("resume.stop_within_s", STOP_WITHIN_S)) + LEAVES_WITHIN_S
    if (grace_s := pod.get("terminationGracePeriodSeconds", 30)) < needed_s:
        yield f"terminationGracePeriodSeconds is {grace_s}; a save and the end may take {needed_s:g} s"
    rules = job.get("podFailurePolicy", {}).get("rules", [])
    if _decide_for_pod(rules, container, 143, is_disrupted=True) != "Ignore":
        yield "podFailurePolicy doesn't ignore DisruptionTarget: a preemption would cost a retry"
    for code in FAILED:
        if _decide_for_pod(rules, container, code) != "FailJob":
            yield f"podFailurePolicy doesn't fail the Job for exit code {code}: another attempt would end the same way"
    for code in CONTINUED:
        if (action := _decide_for_pod(rules, container, code)) != "Count":
            yield f"podFailurePolicy has {action} for exit code {code}: expected a counted restart"
    if not job.get("backoffLimit", 6):
        yield "backoffLimit must be above 0: no pod would start again"


def _decide_for_pod(rules: Sequence[Object], container: str, code: int, *, is_disrupted: bool = False) -> str:
    """Return the action that the Job controller takes at the end of a pod: the action of the first matching rule."""
    for rule in rules:
        exits = rule.get("onExitCodes")
        if exits and exits.get("containerName", container) == container:
            if (code in exits["values"]) == (exits["operator"] == "In"):
                return str(rule["action"])
        elif is_disrupted and any(_is_disruption(each) for each in rule.get("onPodConditions") or ()):
            return str(rule["action"])
    return "Count"


def _is_disruption(condition: Object) -> bool:
    return condition["type"] == "DisruptionTarget" and condition.get("status", "True") == "True"


def _decide_for_job(policy: Object, reason: str) -> str:
    """Return the action that the JobSet controller takes at a Job's failure: the action of the first matching rule."""
    for rule in policy.get("rules", ()):
        if reason in (rule.get("onJobFailureReasons") or [reason]) and not rule.get("onJobFailureMessagePatterns"):
            return str(rule["action"])
    return "RestartJobSet"


def main(paths: Sequence[Path]) -> int:
    """Print the faults of files; return 1 if there are any."""
    found = []
    for path in paths:
        resources = [each for each in yaml.safe_load_all(path.read_text("utf-8")) if each]
        found += [f"{path}: {fault}" for fault in find_faults(resources)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main([*map(Path, sys.argv[1:])]))
