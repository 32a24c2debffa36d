"""Tests of infra/kubernetes/jobset.yaml and trainjob.yaml: valid, right nodes, and no planted fault passes."""

import re
from pathlib import Path

import pytest
import yaml

from holdfast.config import RunConfig, load_config
from holdfast.errors import Damage, RunStopped, WrongUse
from holdfast.extensions.report.observer import STOPPED_WITHIN_S as REPORT_WITHIN_S
from holdfast.extensions.sinks.observer import STOPPED_WITHIN_S as SINKS_WITHIN_S
from holdfast.rank.process import find_node, split_address
from tests.conftest import ROOT
from tests.support.cluster import Object
from tests.support.kubernetes_jobs import FOLDER, read_manifests
from tests.support.tools import checks, needs_tools

JOBSET, TRAINJOB = "jobset.yaml", "trainjob.yaml"
BOTH = (JOBSET, TRAINJOB)
# A fault in one of the files: a pattern, its replacement, and a word of what the check says.
PLANTED = [
    (BOTH, "podReplacementPolicy:", "podReplacmentPolicy:", "podReplacmentPolicy"),
    ((JOBSET,), "maxRestarts: 3", 'maxRestarts: "3"', "maxRestarts: '3' is not of type 'integer'"),
    (BOTH, "maxRestarts: 3", "maxRestart: 3", "'maxRestart' was unexpected"),
    ((JOBSET,), "FailJobSet", "FailJob", "'FailJob' is none of"),
    ((JOBSET,), r"\n +rules:\n.*\n +- name(.*\n){3}", "\n", "no rule FailJobSet for the reason PodFailurePolicy"),
    ((JOBSET,), "onJobFailureReasons: .*", "targetReplicatedJobs: [node]", "for the reason BackoffLimitExceeded"),
    ((JOBSET,), "replicas: 1", "replicas: 2", "replicas must be 1"),
    ((JOBSET,), "replicas: 1", "replicas: one", "replicas: 'one' is not of type 'integer'"),
    ((JOBSET,), "completionMode: Indexed", "completionMode: NonIndexed", "completionMode must be Indexed"),
    ((JOBSET,), "backoffLimit: 20", "backoffLimit: 0", "backoffLimit must be above 0"),
    ((JOBSET,), "backoffLimit: 20", "backofLimit: 20", "backofLimit"),
    (BOTH, "Seconds: 90", "Seconds: 39", "terminationGracePeriodSeconds is 39; a save and the end may take 40 s"),
    ((JOBSET,), ".*Seconds: 90\n", "", "terminationGracePeriodSeconds is 30"),
    (BOTH, "spec.nodeName", "metadata.name", "HOLDFAST_HOST must be spec.nodeName"),
    (BOTH, ".*HOLDFAST_HOST.*\n", "", "HOLDFAST_HOST must be spec.nodeName"),
    ((JOBSET,), "- store=", "- resume.stop_within_s=80\n{}- --set\n{}- store=", "a save and the end may take 95 s"),
    ((JOBSET,), "podReplacementPolicy: Failed", "podReplacementPolicy: TerminatingOrFailed", "must be Failed"),
    (BOTH, "action: Ignore", "action: Count", "doesn't ignore DisruptionTarget"),
    ((JOBSET,), "action: Ignore", "action: Ingore", "'Ingore' is none of"),
    ((JOBSET,), "type: DisruptionTarget", "type: Disruption", "'Disruption' is none of"),
    ((JOBSET,), r'status: "True"', 'status: "False"', "doesn't ignore DisruptionTarget"),
    (BOTH, r"values: \[1, 2\]", "values: [1]", "for exit code 2"),
    ((JOBSET,), r"values: \[1, 2\]", "values: [1, 2, 3]", "FailJob for exit code 3"),
    ((JOBSET,), r"In, values: \[1, 2\]", "NotIn, values: [0]", "FailJob for exit code 143"),
    ((JOBSET,), "containerName: node", "containerName: train", "for exit code 1"),
    ((JOBSET,), "compute.nodes=2", "compute.nodes=4", "compute.nodes = 4, and completions is 2"),
    (BOTH, "train-node-0-0.train:", "train-node-0.train:", "node 0 is train-node-0-0.train"),
    ((JOBSET,), ".*--set\n.*rendezvous.*\n", "", "names no host; node 0 is"),
    ((JOBSET,), "enableDNSHostnames: true", "enableDNSHostnames: false", "the nodes don't find node 0"),
    ((JOBSET,), "publishNotReadyAddresses: true", "subdomain: other", "node 0 is train-node-0-0.other"),
    (BOTH, "suspend: true", "suspend: false", "before the queue gpu has room"),
    ((JOBSET,), "suspend: true", "suspended: true", "'suspended' was unexpected"),
    ((JOBSET,), "- train\n", "- plan\n", "no container has the arguments holdfast train"),
    ((JOBSET,), "parallelism: 2", "parallelism: 1", "compute.nodes = 2, and parallelism is 1"),
    ((JOBSET,), "nvidia.com/gpu: 8}", "nvidia.com/gpu: [8]}", "8"),
    ((TRAINJOB,), r"(  trainer:\n    numNodes:) 2", r"\1 3", "compute.nodes = 2, and completions is 3"),
    ((TRAINJOB,), r"(  trainer:\n    )numNodes", r"\1nodes", "'nodes' was unexpected"),
    ((TRAINJOB,), "runtimeRef: {name: holdfast}", "runtimeRef: {name: other}", "no runtime other"),
    ((TRAINJOB,), "runtimeRef: .*", "runtimeRef: {}", "'name' is a required property"),
    ((TRAINJOB,), "ancestor-step: trainer", "ancestor-step: other", "no container has the arguments holdfast train"),
]  # fmt: skip


def find_faults(path: Path) -> str:
    return "\n".join(checks.check_manifest(path))


def list_trained(name: str) -> list[tuple[Object, str]]:
    """Return the Job that trains a file's run, and the name of the JobSet."""
    resources = read_manifests(name)
    runtimes = {each["metadata"]["name"]: each for each in resources}
    made = resources[0] if name == JOBSET else checks.jobsets.make_jobset(resources[1], runtimes)
    return [(each, made["metadata"]["name"]) for each in made["spec"]["replicatedJobs"]]


@needs_tools
@pytest.mark.parametrize("name", BOTH)
def test_a_manifest_is_valid(name: str) -> None:
    assert find_faults(FOLDER / name) == ""


@needs_tools
def test_an_unknown_version_is_found(tmp_path: Path) -> None:
    (tmp_path / JOBSET).write_text((FOLDER / JOBSET).read_text("utf-8").replace("v1alpha2", "v1alpha1"))
    assert checks.NO_SCHEMA in find_faults(tmp_path / JOBSET)


@needs_tools
def test_each_planted_fault_is_found_and_named(tmp_path: Path) -> None:
    """One process checks all files: it takes a second to start."""
    planted = [(name, *rest) for names, *rest in PLANTED for name in names]
    for number, (name, pattern, fault, _) in enumerate(planted):
        (tmp_path / f"{number}-{name}").write_text(plant(name, pattern, fault))
    paths = [tmp_path / f"{number}-{name}" for number, (name, *_) in enumerate(planted)]
    found = "".join(checks.run_tool("python", checks.JOBSETS, *paths)).splitlines()
    for path, (_, pattern, fault, message) in zip(paths, planted, strict=True):
        own = [line for line in found if line.startswith(f"{path}: ")]
        assert any(message in line for line in own), (pattern, fault, own)


def plant(name: str, pattern: str, fault: str) -> str:
    """Return a manifest with a fault. In the fault, ``{}`` stands for the indentation of the arguments."""
    text = (FOLDER / name).read_text("utf-8")
    indent = re.search(r"( *)- store=", text)
    assert indent
    broken, count = re.subn(pattern, fault.replace("{}- ", f"{indent[1]}- "), text, count=1)
    assert count == 1, pattern
    return broken


@pytest.mark.parametrize("name", BOTH)
def test_the_pods_of_a_manifest_are_the_nodes_of_one_run(name: str) -> None:
    """JobSet names a pod's host JOBSET-JOB-0-INDEX, in the subdomain of its own name; the Job sets the index."""
    ((replicated, jobset),) = list_trained(name)
    job = replicated["template"]["spec"]
    ((container, settings),) = checks.jobsets.find_trained(replicated)
    config = load_config(ROOT / "holdfast/recipes/language.toml", [f"{key}={value}" for key, value in settings.items()])
    assert container == "node"
    assert config.compute.node_range == (job["completions"], job["parallelism"])
    assert split_address(config.compute) == (f"{jobset}-{replicated['name']}-0-0.{jobset}", 29500)
    indexes = [{"JOB_COMPLETION_INDEX": str(index)} for index in range(job["completions"])]
    assert [find_node(config.compute, each) for each in indexes] == [0, 1]


def test_the_check_knows_what_a_command_takes_to_end() -> None:
    assert RunConfig(recipe="a:b", run="a").resume.stop_within_s == checks.jobsets.STOP_WITHIN_S
    assert checks.jobsets.LEAVES_WITHIN_S >= 2 * (SINKS_WITHIN_S + 1 + REPORT_WITHIN_S)
    assert (WrongUse.exit_code, Damage.exit_code) == checks.jobsets.FAILED
    assert RunStopped.exit_code in checks.jobsets.CONTINUED


@pytest.mark.parametrize("name", BOTH)
def test_pods_have_no_rights_and_the_users_of_the_pool(name: str) -> None:
    ((replicated, _),) = list_trained(name)
    pod = replicated["template"]["spec"]["template"]["spec"]
    pool = yaml.safe_load((FOLDER / "pools.yaml").read_text("utf-8"))["job_configuration"]["job_manifest"]
    other = pool["spec"]["template"]["spec"]
    for key in ("automountServiceAccountToken", "enableServiceLinks", "securityContext"):
        assert pod[key] == other[key]
    assert pod["containers"][0]["securityContext"] == other["containers"][0]["securityContext"]
    assert pod["serviceAccountName"] in {each["metadata"]["name"] for each in read_manifests("rbac.yaml")}
