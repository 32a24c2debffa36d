"""Check every file of infrastructure with its own tool, and for faults that the tools miss: ``make check-infra``.

::

    .venv/tools/bin/python infra/check.py [FOLDER]

The folder is the repository by default. The exit code is 1 if a check finds a fault.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import charts
import jobsets
import jsonschema
import yaml

BIN = Path(sys.executable).parent
HADOLINT, YAMLLINT = Path(__file__).parent / "hadolint.yaml", Path(__file__).parent / "yamllint.yaml"
JOBSETS = Path(__file__).parent / "jobsets.py"
# Folders to skip, because their files don't belong to the repository.
FOREIGN = {".git", ".venv", "node_modules", "dist", "build", "runs", "logs", "__pycache__", ".terraform"}
# The settings of a job that each kind of worker accepts; tests/infra/test_checks.py compares them with Prefect's
# classes.
SHARED = {"command", "env", "labels", "name", "stream_output"}
SETTINGS = {
    "docker": SHARED | {
        "image", "image_pull_policy", "registry_credentials", "networks", "network_mode", "auto_remove", "volumes",
        "mem_limit", "memswap_limit", "privileged", "container_create_kwargs",
    },
    "kubernetes": SHARED | {
        "annotations", "namespace", "job_manifest", "cluster_config", "job_watch_timeout_seconds",
        "pod_watch_timeout_seconds",
    },
}  # fmt: skip
# The names that the setting `container_create_kwargs` of a Docker job may contain: arguments of Docker's client. The
# same test compares them with Docker's client.
DOCKER_ARGUMENTS = {
    "blkio_weight", "blkio_weight_device", "cap_add", "cap_drop", "cgroup_parent", "cgroupns", "cpu_count",
    "cpu_percent", "cpu_period", "cpu_quota", "cpu_rt_period", "cpu_rt_runtime", "cpu_shares", "cpuset_cpus",
    "cpuset_mems", "detach", "device_cgroup_rules", "device_read_bps", "device_read_iops", "device_requests",
    "device_write_bps", "device_write_iops", "devices", "dns", "dns_opt", "dns_search", "domainname", "entrypoint",
    "environment", "extra_hosts", "group_add", "healthcheck", "hostname", "init", "init_path", "ipc_mode",
    "isolation", "kernel_memory", "links", "log_config", "lxc_conf", "mac_address", "mem_reservation",
    "mem_swappiness", "mounts", "nano_cpus", "network_disabled", "oom_kill_disable", "oom_score_adj", "pid_mode",
    "pids_limit", "platform", "publish_all_ports", "read_only", "restart_policy", "runtime", "security_opt",
    "shm_size", "stdin_open", "stop_signal", "storage_opt", "sysctls", "tmpfs", "tty", "ulimits",
    "use_config_proxy", "user", "userns_mode", "uts_mode", "version", "volume_driver", "volumes_from", "working_dir",
}  # fmt: skip
# Prefect requires these two keys in a pod's spec, where Kubernetes ignores them, because they are keys of a Job's spec.
# So remove them before the check.
WANTED_BY_PREFECT = ("parallelism", "completions")
PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")
UNREACHABLE = ("Failed to query available provider packages", "Failed to install provider")
NO_CHARTS = "is not a valid chart repository or cannot be reached"
# The text of kubernetes-validate's warning about an unknown kind. This check counts the warning as a fault.
NO_SCHEMA = "Couldn't find schema"
# The verbs that a Kubernetes Role can allow. They are checked here, because the schemas accept any text.
VERBS = {
    "get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "bind", "escalate",
    "impersonate",
}  # fmt: skip
HADOLINT_KEYS = {
    "failure-threshold", "ignored", "override", "trustedRegistries", "label-schema", "strict-labels", "no-fail",
    "no-color", "format", "disable-ignore-pragma",
}  # fmt: skip
HADOLINT_THRESHOLDS = {"error", "warning", "info", "style", "ignore", "none"}
HADOLINT_RULE = re.compile(r"(?:DL|SC)\d{4}")
SECRET = re.compile("(?i)password|secret|token|auth_string|(?:account|api)_?key")

Check = Callable[[Path], Iterator[str]]


class Skipped(Exception):
    """The error of a check that can't run on this machine; the message says why."""


# ---- a check for each kind of file; each check yields a text for each fault


def check_dockerfile(path: Path) -> Iterator[str]:
    arguments: dict[str, str] = {}
    stages = {"scratch"}
    for line in path.read_text("utf-8").splitlines():
        if found := re.match(r"ARG\s+(\w+)=(\S+)", line):
            arguments[found[1]] = found[2]
        elif found := re.match(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", line, re.IGNORECASE):
            image = re.sub(r"\$\{?(\w+)\}?", lambda name: arguments.get(name[1], ""), found[1])
            if image not in stages and not is_pinned(image):
                yield f"{path}: base image {image or found[1]!r} is not pinned to a version"
            stages.add(found[2])
    yield from run_tool("hadolint", "--no-color", "--config", HADOLINT, path)


def check_dockerignore(path: Path) -> Iterator[str]:
    """Check that .dockerignore allows all files that the build copies, and that each file that it allows exists."""
    root = next((each for each in path.parents if path.is_relative_to(each / "infra")), path.parent)
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    kept = [line[1:] for line in lines if line.startswith("!")]
    yield from (f"{path}: !{name} names no file" for name in kept if not any(root.glob(name)))
    if "*" not in lines:
        yield f"{path}: a line `*` has to leave everything else out"
    dockerfile = path.with_suffix("")
    for copied in re.findall(r"(?m)^COPY +((?:[^-\s]\S* +)+)\S+$", dockerfile.read_text("utf-8")):
        for source in copied.split():
            if source.split("/")[0] not in kept and source not in kept:
                yield f"{path}: {dockerfile.name} copies {source}, which is left out"


def check_hadolint(path: Path) -> Iterator[str]:
    """Check the settings of hadolint, which ignores keys and names that it doesn't know."""
    known = read_yaml(path)
    yield from (f"{path}: unknown key {key}" for key in known.keys() - HADOLINT_KEYS)
    if (threshold := known.get("failure-threshold", "info")) not in HADOLINT_THRESHOLDS:
        yield f"{path}: no failure-threshold is named {threshold}"
    wrong = [each for each in known.get("ignored") or () if not HADOLINT_RULE.fullmatch(each)]
    yield from (f"{path}: no rule is named {each}" for each in wrong)


def check_yaml(path: Path) -> Iterator[str]:
    yield from run_tool("yamllint", "--format", "parsable", "--config-file", YAMLLINT, path)


def check_compose(path: Path) -> Iterator[str]:
    composed = read_yaml(path)
    services = composed.get("services") or {}
    needs = [(name, *each) for name, service in services.items() for each in list_needed(service)]
    ending = {other for _, other, condition in needs if condition == "service_completed_successfully"}
    built = {service.get("image") for service in services.values() if "build" in service}
    for name, service in services.items():
        where = f"{path}: service {name}"
        image = re.sub(r"\$\{\w+(?::?-([^}]*))?\}", lambda found: found[1] or "", service.get("image", ""))
        if image and service["image"] not in built and not is_ours(image) and not is_pinned(image):
            yield f"{where}: image {image} is not pinned to a version"
        health = service.get("healthcheck") or {}
        ends = name in ending or service.get("restart") == "no"
        if not ends and ("test" not in health or health.get("disable")):
            yield f'{where} has no healthcheck, and isn\'t one that ends (restart: "no")'
        if name in ending and service.get("restart") in ("always", "unless-stopped"):
            yield f"{where} never ends, and a service waits for its end"
        yield from (f"{where}: {variable} is written down" for variable in list_written_secrets(service))
    for name, other, condition in needs:
        if other not in services:
            yield f"{path}: service {name} waits for {other}, which is not a service"
        elif condition == "service_started":
            yield f"{path}: service {name} doesn't wait until {other} is healthy or has ended"
    yield from run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def list_needed(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the services for which a service waits, each with the condition that it waits for."""
    needed = service.get("depends_on") or {}
    known = needed if isinstance(needed, dict) else {name: {} for name in needed}
    return [(name, each.get("condition", "service_started")) for name, each in known.items()]


def list_written_secrets(service: dict[str, Any]) -> Iterator[str]:
    """Yield the environment variables of a service that contain a secret as text."""
    environment = service.get("environment") or {}
    if isinstance(environment, list):
        environment = dict(pair.partition("=")[::2] for pair in environment)
    for name, value in environment.items():
        if SECRET.search(name) and value and "$" not in str(value) and not str(value).startswith("/"):
            yield name


def check_workflow(path: Path) -> Iterator[str]:
    for name, job in read_yaml(path)["jobs"].items():
        if "timeout-minutes" not in job:
            yield f"{path}: job {name} has no timeout-minutes: it could take six hours"
    yield from run_tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", path)


def check_manifest(path: Path) -> Iterator[str]:
    resources = [each for each in yaml.safe_load_all(path.read_text("utf-8")) if each]
    there = {(each.get("kind"), each.get("metadata", {}).get("name")) for each in resources}
    for each in resources:
        yield from (f"{path}: {fault}" for fault in find_wrong_rights(each, there))
    yield from check_jobsets(path, resources) if any(map(jobsets.is_known, resources)) else validate(path)


def check_jobsets(path: Path, resources: list[dict[str, Any]]) -> Iterator[str]:
    """Check the JobSets or TrainJobs in a file, whose schemas kubernetes-validate lacks, and the Jobs inside them."""
    if found := [*run_tool("python", JOBSETS, path)]:
        yield from found
        return
    for each in resources:
        for resource in jobsets.list_jobs(each) if jobsets.is_known(each) else [each]:
            yield from check_resource(f"{path}: {resource['kind']} {resource['metadata']['name']}", resource)


def validate(path: Path) -> Iterator[str]:
    yield from run_tool("kubernetes-validate", "--strict", path, warning=NO_SCHEMA)


def find_wrong_rights(resource: dict[str, Any], there: set[tuple[str, str]]) -> Iterator[str]:
    """Yield each unknown verb in a Role, and each name in a RoleBinding that its file doesn't define."""
    kind, name = resource.get("kind"), resource.get("metadata", {}).get("name")
    if kind in ("Role", "ClusterRole"):
        verbs = {verb for rule in resource["rules"] for verb in rule["verbs"]}
        yield from (f"{kind} {name}: no verb is named {verb}" for verb in sorted(verbs - VERBS))
    if kind in ("RoleBinding", "ClusterRoleBinding"):
        for named in (resource["roleRef"], *resource["subjects"]):
            if (named["kind"], named["name"]) not in there:
                yield f"{kind} {name} names {named['kind']} {named['name']}, which the file doesn't have"


def check_values(path: Path) -> Iterator[str]:
    """Check the values of one of Prefect's charts: its keys, its images' tags and the values copied into pods."""
    values = read_yaml(path)
    yield from (f"{path}: the chart has no value {each}" for each in charts.find_unknown(path.name, values))
    yield from (f"{path}: a container has a variable twice: {each}" for each in charts.find_repeated(path.name, values))
    for tag in charts.find_tags(values):
        if not is_pinned(f"prefect:{tag}"):
            yield f"{path}: the tag {tag} is not pinned to a version"
    for pod in charts.make_pods(values):
        yield from check_resource(f"{path}: {pod['metadata']['name']}", pod)


def check_chart(path: Path) -> Iterator[str]:
    """Render one of Prefect's charts with its values, and check the result."""
    helm = shutil.which("helm")
    if not helm:
        raise Skipped("there is no helm")
    chart, options = charts.CHARTS[path.name]
    folder = os.environ.get("HOLDFAST_HELM_CHARTS")
    source = [str(Path(folder, chart))] if folder else [chart, "--repo", charts.REPOSITORY, "--version", charts.VERSION]
    with tempfile.TemporaryDirectory() as made:
        rendered = Path(made, "rendered.yaml")
        command = [helm, "template", chart, *source, "--namespace", "holdfast", "--values", str(path), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
        if NO_CHARTS in done.stderr:
            raise Skipped("Helm can't download the chart; set HOLDFAST_HELM_CHARTS to a folder that contains it")
        if done.returncode:
            yield f"{path}: {done.stderr.strip()}"
            return
        rendered.write_text(done.stdout, "utf-8")
        for resource in yaml.safe_load_all(done.stdout):
            for each in charts.find_repeated_in(resource or {}):
                yield f"{path}: a container has a variable twice: {each}"
        yield from (fault.replace(str(rendered), str(path)) for fault in validate(rendered))


def check_pools(path: Path) -> Iterator[str]:
    """Render the job template of each pool with its defaults, and check the result."""
    known = read_yaml(path)
    kind, variables = known["type"], known["variables"]
    try:
        jsonschema.Draft202012Validator.check_schema(variables)
    except jsonschema.SchemaError as error:
        yield f"{path}: variables: {error.message}"
        return
    if unknown := known["job_configuration"].keys() - SETTINGS.get(kind, set()):
        yield f"{path}: job_configuration has the unknown key {', '.join(sorted(unknown))}"
        return
    arguments = known["job_configuration"].get("container_create_kwargs") or {}
    if unknown := arguments.keys() - DOCKER_ARGUMENTS:
        yield f"{path}: container_create_kwargs has the unknown key {', '.join(sorted(unknown))}"
    for name in {*PLACEHOLDER.findall(str(known["job_configuration"]))} - variables["properties"].keys():
        yield f"{path}: job_configuration has {{{{ {name} }}}}, which is not a variable"
    for pool, defaults in known["pools"].items():
        values = {name: each["default"] for name, each in variables["properties"].items() if "default" in each}
        values |= dict.fromkeys(variables.get("required", ()), "example")
        values |= {name: value for name, value in defaults.items() if name != "description"}
        for wrong in jsonschema.Draft202012Validator(variables | {"additionalProperties": False}).iter_errors(values):
            yield f"{path}: pool {pool}: {'.'.join(map(str, wrong.path))}: {wrong.message}"
        if kind == "kubernetes":
            yield from check_job(f"{path}: pool {pool}", render(known["job_configuration"]["job_manifest"], values))


def check_job(where: str, job: dict[str, Any]) -> Iterator[str]:
    """Check a rendered Job. Give it a name, which the cluster would generate and kubernetes-validate requires."""
    job["metadata"]["name"] = job["metadata"].pop("generateName", "job").rstrip("-")
    for name in WANTED_BY_PREFECT:
        job["spec"]["template"]["spec"].pop(name, None)
    yield from check_resource(where, job)


def check_resource(where: str, resource: dict[str, Any]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "resource.yaml")
        file.write_text(yaml.safe_dump(resource), "utf-8")
        yield from (fault.replace(str(file), where) for fault in validate(file))


def render(template: Any, values: dict[str, Any]) -> Any:
    """Return a job template with values in place of its variables, as Prefect renders it; drop unset variables."""
    if isinstance(template, dict):
        rendered = {key: render(value, values) for key, value in template.items()}
        return {key: value for key, value in rendered.items() if value is not None}
    if isinstance(template, list):
        return [render(value, values) for value in template]
    if not isinstance(template, str):
        return template
    if alone := PLACEHOLDER.fullmatch(template):
        return values.get(alone[1])
    return PLACEHOLDER.sub(lambda found: str(values.get(found[1]) or "example"), template)


def check_terraform(folder: Path) -> Iterator[str]:
    terraform = shutil.which("terraform")
    if not terraform:
        raise Skipped("there is no terraform")
    plugins = os.environ.get("HOLDFAST_TERRAFORM_PLUGINS")
    yield from run(terraform, "fmt", "-check", "-diff", "-no-color", folder)
    with tempfile.TemporaryDirectory() as copied:  # work on a copy, because `terraform init` writes to its folder
        shutil.copytree(folder, copied, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".terraform"))
        options = [f"-plugin-dir={plugins}"] if plugins else []
        begun = [*run(terraform, f"-chdir={copied}", "init", "-backend=false", "-input=false", "-no-color", *options)]
        if any(text in each for each in begun for text in UNREACHABLE):
            raise Skipped("its provider can't be had; HOLDFAST_TERRAFORM_PLUGINS may name a folder that has it")
        yield from begun or run(terraform, f"-chdir={copied}", "validate", "-no-color")


def check_prometheus(path: Path) -> Iterator[str]:
    """Check alert rules, or a configuration and the alert rules that it names, with Prometheus's own tool."""
    tool = shutil.which("promtool")
    if tool is None:
        raise Skipped("there is no promtool, which Debian's package prometheus has")
    yield from run(tool, "check", "config" if path.name == "prometheus.yaml" else "rules", path)


def check_script(path: Path) -> Iterator[str]:
    yield from run_tool("shellcheck", "--color=never", path)


# ---- find the files to check


def find_files(root: Path) -> Iterator[tuple[str, Check, Path]]:
    """Yield the name of a check, the check, and the file or folder to check."""
    for path in sorted(list_files(root)):
        name, room = path.name, path.relative_to(root).parts[0]
        if (name.startswith("Dockerfile") and path.suffix != ".dockerignore") or path.suffix == ".Dockerfile":
            yield "dockerfile", check_dockerfile, path
        elif path.name == "Dockerfile.dockerignore":
            yield "ignored", check_dockerignore, path
        elif path.suffix in (".yaml", ".yml"):
            yield "yaml", check_yaml, path
            yield from find_yaml_checks(path, room)
        elif path.suffix == ".sh" or (not path.suffix and is_shell(path)):
            yield "shell", check_script, path
    for folder in sorted({path.parent for path in list_files(root) if path.suffix == ".tf"}):
        yield "terraform", check_terraform, folder


def find_yaml_checks(path: Path, room: str) -> Iterator[tuple[str, Check, Path]]:
    """Yield the checks of a YAML file besides yamllint: for each its name, the check and the file."""
    if room == ".github" and path.parent.name == "workflows":
        yield "workflow", check_workflow, path
    if room == "infra":
        if path.name.startswith(("compose.", "compose-", "docker-compose")):
            yield "compose", check_compose, path
        elif path.name == "pools.yaml":
            yield "pools", check_pools, path
        elif path.name in charts.NAMES:
            yield "values", check_values, path
            yield "chart", check_chart, path
        elif path.name == "hadolint.yaml":
            yield "hadolint", check_hadolint, path
        elif path.name in ("prometheus.yaml", "rules.yaml"):
            yield "prometheus", check_prometheus, path
        elif is_manifest(path):
            yield "manifest", check_manifest, path


def list_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        # Other programs, which may run at the same time, delete files of their caches.
        folders[:] = [each for each in folders if each not in FOREIGN and not each.endswith("_cache")]
        yield from (Path(folder, name) for name in names)


def is_shell(path: Path) -> bool:
    with path.open("rb") as file:
        return bool(re.match(rb"#!.*\b(?:ba|da|k)?sh\b", file.readline(100)))


def is_manifest(path: Path) -> bool:
    """Return whether every document of a file is a resource of Kubernetes."""
    try:
        documents = [each for each in yaml.safe_load_all(path.read_text("utf-8")) if each is not None]
    except yaml.YAMLError:  # skip a file that isn't YAML: yamllint reports this fault
        return False
    return bool(documents) and all(
        isinstance(each, dict) and {"apiVersion", "kind"} & each.keys() for each in documents
    )


def is_pinned(image: str) -> bool:
    """Return whether a reference to an image has a digest or the tag of a version."""
    name, _, tag = image.rpartition("/")[2].partition(":")
    return "@sha256:" in image or bool(name and re.search(r"\d", tag))


def is_ours(image: str) -> bool:
    """Return whether an image is the one that `make image` builds."""
    return image.rpartition("/")[2].partition(":")[0] == "holdfast"


# ---- tools


def read_yaml(path: Path) -> dict[str, Any]:
    known: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return known


def run_tool(name: str, *arguments: str | Path, warning: str = "") -> Iterator[str]:
    yield from run(str(BIN / name), *arguments, warning=warning)


def run(*command: str | Path, warning: str = "") -> Iterator[str]:
    """Run a command; yield its output if the command fails, or if the output contains ``warning``."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    if done.returncode or (warning and warning in done.stdout + done.stderr):
        yield (done.stdout + done.stderr).strip() or f"{command[0]} ended with {done.returncode}"


def main(root: Path) -> int:
    """Run all checks. Print a line for each file, and all faults."""
    faults = 0
    for name, check, path in find_files(root):
        where = path.relative_to(root)
        try:
            found = [*check(path)]
        except Skipped as reason:
            print(f"skipped     {name:11} {where}: {reason}")
            continue
        except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            found = [f"{path}: {type(error).__name__}: {error}"]
        print(f"{'FAULT' if found else 'ok':11} {name:11} {where}")
        for each in found:
            print("  " + each.replace("\n", "\n  "))
        faults += len(found)
    print(f"{faults} fault{'' if faults == 1 else 's'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()))
