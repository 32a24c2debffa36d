"""Tests of ``make check-infra``: it passes on the repository, and fails on a fault planted in each file."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.support.tools import checks, needs_tools

needs_terraform = pytest.mark.skipif(not shutil.which("terraform"), reason="there is no terraform")
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool")
needs_helm = pytest.mark.skipif(not shutil.which("helm"), reason="there is no helm")
pytestmark = [needs_tools, pytest.mark.slow]

# Small files of each kind, so that every check has one, whatever infra/ has.
EXAMPLES = {
    "infra/Dockerfile": """\
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM scratch AS wheels

FROM ${BASE} AS base
COPY --from=wheels / /wheels
USER nobody
COPY install /opt/
CMD ["python3"]
""",
    "infra/Dockerfile.dockerignore": """\
# Nothing but this.
*
!install
!infra
**/__pycache__
""",
    "infra/hadolint.yaml": """\
failure-threshold: warning
ignored:
  - DL3025
""",
    "install": "",
    "infra/compose.yaml": """\
services:
  database:
    image: docker.io/library/postgres:17.2
    environment:
      POSTGRES_PASSWORD: ${PASSWORD}
      POSTGRES_PASSWORD_FILE: /run/secrets/password
    healthcheck:
      test: [CMD, pg_isready]
  deploy:
    image: ${IMAGE:-holdfast}:worker
    restart: "no"
    depends_on:
      database: {condition: service_healthy}
  worker:
    image: ${IMAGE:-holdfast}:worker
    healthcheck:
      test: [CMD, "true"]
    depends_on:
      deploy: {condition: service_completed_successfully}
""",
    "infra/kubernetes/budget.yaml": """\
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: server}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {app: server}
""",
    "infra/kubernetes/rights.yaml": """\
apiVersion: v1
kind: ServiceAccount
metadata: {name: worker}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: jobs}
rules:
  - apiGroups: [batch]
    resources: [jobs]
    verbs: [create, get]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: worker}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: jobs}
subjects:
  - {kind: ServiceAccount, name: worker}
""",
    "infra/kubernetes/server-values.yaml": """\
global:
  prefect:
    image: {prefectTag: 3.9.1-python3.12}
    env: [{name: DO_NOT_TRACK, value: "1"}]
backgroundServices:
  env: [{name: ANALYTICS, value: "false"}]
server:
  basicAuth: {enabled: true, existingSecret: auth}
  containerSecurityContext: {runAsNonRoot: true}
  affinity:
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {app.kubernetes.io/name: prefect-server}
""",
    "infra/kubernetes/worker-values.yaml": """\
worker:
  config: {workPool: gpu}
  extraEnvVars:
    - {name: DO_NOT_TRACK, value: "1"}
""",
    "infra/kubernetes/pools.yaml": """\
type: kubernetes
pools:
  gpu: {description: For GPUs., gpus: 1}
variables:
  type: object
  required: [image]
  properties:
    image: {type: string}
    gpus: {type: integer, default: 0}
    name: {type: string}
job_configuration:
  name: "{{ name }}"
  job_manifest:
    apiVersion: batch/v1
    kind: Job
    metadata:
      generateName: "{{ name }}-"
    spec:
      backoffLimit: 0
      template:
        spec:
          parallelism: 1
          completions: 1
          restartPolicy: Never
          containers:
            - name: prefect-job
              image: "{{ image }}"
              resources:
                limits: {nvidia.com/gpu: "{{ gpus }}"}
""",
    "infra/docker/pools.yaml": """\
type: docker
pools:
  gpu: {}
variables:
  type: object
  properties:
    image: {type: string, enum: [a, b], default: a}
job_configuration:
  image: "{{ image }}"
  auto_remove: false
  container_create_kwargs: {shm_size: 2g}
""",
    "infra/metrics/rules.yaml": """\
groups:
  - name: runs
    rules:
      - alert: No commit
        expr: max by (run) (commit_age) > 600
""",
    "infra/run.sh": """\
#!/usr/bin/env bash
set -euo pipefail
echo "$@"
""",
    "infra/terraform/main.tf": """\
terraform {
  required_version = ">= 1.0"
}

variable "name" {
  type = string
}

output "name" {
  value = var.name
}
""",
    ".github/workflows/ci.yaml": """\
name: CI
on: push
jobs:
  test:
    runs-on: ubuntu-24.04
    timeout-minutes: 10
    steps:
      - run: .ci/run
""",
}
# A fault in an example: a pattern, its replacement, and a word of what the check says.
PLANTED = [
    ("infra/Dockerfile", "BASE=.*", "BASE=python", "not pinned"),
    ("infra/Dockerfile", "BASE=.*", "BASE=python:latest", "not pinned"),
    ("infra/Dockerfile", "BASE=.*", "OTHER=1", "not pinned"),
    ("infra/Dockerfile", r"FROM \$\{BASE\}", "FROM python:slim", "not pinned"),
    ("infra/Dockerfile", "USER nobody", "USER root", "root"),
    ("infra/Dockerfile", "USER nobody", "USR nobody", "unexpected 'U'"),
    ("infra/Dockerfile", "COPY install", "COPY other", "copies other, which is left out"),
    ("infra/Dockerfile.dockerignore", "!install", "!instal", "!instal names no file"),
    ("infra/Dockerfile.dockerignore", "!install\n", "", "copies install, which is left out"),
    ("infra/Dockerfile.dockerignore", r"\n\*\n", "\n", "has to leave everything else out"),
    ("infra/hadolint.yaml", "ignored", "ignore", "unknown key ignore"),
    ("infra/hadolint.yaml", "DL3025", "DL325", "no rule is named DL325"),
    ("infra/hadolint.yaml", "warning", "wraning", "wraning"),
    ("infra/compose.yaml", r"    healthcheck:\n      test: \[CMD, pg_isready\]\n", "", "database has no healthcheck"),
    ("infra/compose.yaml", r"test: \[CMD, pg_isready\]", "disable: true", "database has no healthcheck"),
    ("infra/compose.yaml", 'restart: "no"', "restart: always", "deploy never ends"),
    ("infra/compose.yaml", r'    healthcheck:\n      test: \[CMD, "true"\]\n', "", "worker has no healthcheck"),
    ("infra/compose.yaml", "restart: ", "restrat: ", "restrat"),
    ("infra/compose.yaml", "postgres:17.2", "postgres", "not pinned"),
    ("infra/compose.yaml", r"\$\{PASSWORD\}", "postgres", "POSTGRES_PASSWORD is written down"),
    ("infra/compose.yaml", "service_healthy", "service_started", "until database is healthy"),
    ("infra/compose.yaml", "database: {cond", "databas: {cond", "databas, which is not a service"),
    ("infra/kubernetes/budget.yaml", "maxUnavailable", "maxUnavailible", "maxUnavailible"),
    ("infra/kubernetes/budget.yaml", "maxUnavailable: 1", "maxUnavailable: [1]", "1"),
    ("infra/kubernetes/budget.yaml", "kind: .*", "kind: PodDisruptionBudgit", "PodDisruptionBudgit"),
    ("infra/kubernetes/budget.yaml", "kind: .*\n", "", "kind"),
    ("infra/kubernetes/rights.yaml", "create", "creat", "Role jobs: no verb is named creat"),
    ("infra/kubernetes/rights.yaml", "kind: Role, name: jobs", "kind: Role, name: job", "names Role job, which"),
    ("infra/kubernetes/rights.yaml", "metadata: {name: worker}", "metadata: {name: w}", "names ServiceAccount worker"),
    ("infra/kubernetes/server-values.yaml", "prefectTag", "tag", "no value global.prefect.image.tag"),
    ("infra/kubernetes/server-values.yaml", "3.9.1-python3.12", "latest", "tag latest is not pinned"),
    ("infra/kubernetes/server-values.yaml", "existingSecret", "secret", "no value server.basicAuth.secret"),
    ("infra/kubernetes/server-values.yaml", "runAsNonRoot", "runAsNonRot", "runAsNonRot"),
    ("infra/kubernetes/server-values.yaml", "topologyKey", "topologieKey", "topologyKey"),
    ("infra/kubernetes/server-values.yaml", "DO_NOT_TRACK", "ANALYTICS", "backgroundServices.env: ANALYTICS"),
    ("infra/kubernetes/server-values.yaml", "DO_NOT_TRACK", "PREFECT_UI_API_URL", "global.prefect.env: PREFECT_UI_API"),
    ("infra/kubernetes/worker-values.yaml", "DO_NOT_TRACK", "PREFECT_API_URL", "worker.extraEnvVars: PREFECT_API_URL"),
    ("infra/kubernetes/worker-values.yaml", "workPool", "pool", "no value worker.config.pool"),
    ("infra/kubernetes/worker-values.yaml", '"1"', "1", "string"),
    ("infra/kubernetes/pools.yaml", "backoffLimit", "backofLimit", "backofLimit"),
    ("infra/kubernetes/pools.yaml", "restartPolicy: Never", "restartPolicy: 1", "restartPolicy"),
    ("infra/kubernetes/pools.yaml", "job_manifest", "job_manifst", "unknown key job_manifst"),
    ("infra/kubernetes/pools.yaml", r"\{\{ gpus \}\}", "{{ gpu }}", "which is not a variable"),
    ("infra/kubernetes/pools.yaml", "gpus: 1}", "gpu: 1}", "'gpu' was unexpected"),
    ("infra/kubernetes/pools.yaml", "gpus: 1}", 'gpus: "1"}', "is not of type 'integer'"),
    ("infra/docker/pools.yaml", "auto_remove", "auto_remov", "unknown key auto_remov"),
    ("infra/docker/pools.yaml", "shm_size", "shm_sise", "unknown key shm_sise"),
    ("infra/docker/pools.yaml", "default: a", "default: c", "is not one of"),
    ("infra/docker/pools.yaml", "type: string", "type: sting", "sting"),
    ("infra/docker/pools.yaml", "  image:", "   image:", "indentation"),
    ("infra/run.sh", r'"\$@"', "$@", "SC2068"),
    ("infra/run.sh", "set ", "fi; set ", "SC1"),
    pytest.param("infra/terraform/main.tf", r"var\.name", "var.nam", "undeclared", marks=needs_terraform),
    pytest.param("infra/terraform/main.tf", "  type =", "  tipe =", "tipe", marks=needs_terraform),
    pytest.param("infra/terraform/main.tf", "  value", "    value", "value", marks=needs_terraform),
    pytest.param("infra/metrics/rules.yaml", "alert:", "alarm:", "alarm", marks=needs_promtool),
    pytest.param("infra/metrics/rules.yaml", r"by \(run\)", "by (run", "parse", marks=needs_promtool),
    (".github/workflows/ci.yaml", "runs-on", "run-on", "run-on"),
    (".github/workflows/ci.yaml", "    timeout-minutes: 10\n", "", "timeout-minutes"),
    (".github/workflows/ci.yaml", "- run:", "- runs:", "runs"),
]
# A chart of one container, which takes its variables as Prefect's charts do.
CHART = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: server}
spec:
  selector: {matchLabels: {app: server}}
  template:
    metadata: {labels: {app: server}}
    spec:
      containers:
        - name: server
          image: prefect:1
          env:
            - {name: HOME, value: /home}
            {{- range list ((.Values.global).prefect).env (.Values.worker).extraEnvVars }}
            {{- with . }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
            {{- end }}
"""
# For each kind of check, faults that fit the files of infra/; each file has to have at least one of them.
FITTING = {
    "dockerfile": [(r"(ARG BASE=[^:\s]+):\S+", r"\1"), (r"(?m)^USER .*", "USER root")],
    "yaml": [(r"\A", "key:   [\n")],
    "compose": [(r"(?m)^    healthcheck:\n(?:      .*\n)+", ""), (r"(?m)^services:", "service:")],
    "pools": [(r"(?m)^( +)(stream_output|backoffLimit):", r"\1\2s:"), (r"(?m)^( +)shm_size: \"", r'\1shm_sise: "')],
    "manifest": [(r"(?m)^  name:", "  nam:"), (r"verbs: \[create", "verbs: [creat")],
    "ignored": [("!holdfast", "!holdfats")],
    "hadolint": [("DL3025", "DL325"), ("failure-threshold", "failure-treshold")],
    "chart": [("name: DO_NOT_TRACK", "name: HOME")],
    "values": [(r"(?m)^( +)prefectTag", r"\1prefctTag"), (r"(?m)^( +)existingSecret", r"\1existingSecrets")],
    "prometheus": [
        ("alert:", "alarm:"),
        (r"by \(run\)", "by (run"),
        ("scrape_interval: 15s", "scrape_interval: often"),
    ],
    "shell": [(r"\Z", "\nrm $1\n")],
    "terraform": [(r"\Z", '\nresource "aws_s3_bukket" "x" {}\n')],
    "workflow": [(r"runs-on", "run-on")],
}


@pytest.fixture(autouse=True)
def charts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two small charts in the place of Prefect's, which no test asks the network for."""
    folder = tmp_path_factory.mktemp("charts")
    for name in ("prefect-server", "prefect-worker"):
        (folder / name / "templates").mkdir(parents=True)
        (folder / name / "Chart.yaml").write_text(f"{{apiVersion: v2, name: {name}, version: 1.0.0}}\n")
        (folder / name / "templates" / "deployment.yaml").write_text(CHART)
    monkeypatch.setenv("HOLDFAST_HELM_CHARTS", str(folder))
    return folder


def write_examples(folder: Path) -> None:
    for name, text in EXAMPLES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def find_faults(folder: Path) -> Iterator[str]:
    """Yield the faults one by one, those that need no tool first: a tool takes a second to start."""
    for _, check, path in sorted(checks.find_files(folder), key=lambda found: found[0] == "yaml"):
        yield from check(path)


def test_the_examples_have_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_examples(tmp_path)
    assert checks.main(tmp_path) == 0
    said = capsys.readouterr().out
    assert {line.split()[1] for line in said.splitlines()[:-1]} == {*FITTING}
    assert said.endswith("0 faults\n")


@pytest.mark.parametrize(("name", "pattern", "fault", "message"), PLANTED)
def test_a_fault_is_found(name: str, pattern: str, fault: str, message: str, tmp_path: Path) -> None:
    text, count = re.subn(pattern, fault, EXAMPLES[name], count=1)
    assert count == 1
    together = ["infra/Dockerfile", "infra/Dockerfile.dockerignore", "install"]
    needed = together if name in together else []
    for each in [*needed, name]:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text(text if each == name else EXAMPLES[each])
    assert any(message in each for each in find_faults(tmp_path))


def test_a_fault_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\nrm $1\n")
    (tmp_path / "other.sh").write_text("#!/bin/sh\n")
    assert checks.main(tmp_path) == 1
    said = capsys.readouterr().out
    assert re.search(r"(?m)^FAULT +shell +run.sh$", said)
    assert re.search(r"(?m)^ok +shell +other.sh$", said)
    assert said.endswith("1 fault\n")


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("infra/compose.yaml", "- a\n"), ("infra/docker/pools.yaml", "type: docker\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert checks.main(tmp_path) == 1
    assert "KeyError: 'variables'" in capsys.readouterr().out


def test_terraform_without_its_provider_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that can't be made is no fault; the output says so."""
    (tmp_path / "main.tf").write_text("")
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    assert checks.main(tmp_path) == 0
    assert "skipped     terraform   .: there is no terraform" in capsys.readouterr().out


@needs_helm
@pytest.mark.parametrize(
    ("pattern", "fault", "message"),
    [
        ("{name: HOME,", "{name: DO_NOT_TRACK,", "a container has a variable twice: Deployment server: DO_NOT_TRACK"),
        ("image:", "imag:", "'imag' was unexpected"),
        ("image: .*", "image: {{ .Values.nothing.tag }}", "nil pointer"),
    ],
)
def test_a_fault_in_what_a_chart_renders_is_found(
    pattern: str, fault: str, message: str, charts: Path, tmp_path: Path
) -> None:
    write_examples(tmp_path)
    path = tmp_path / "infra" / "kubernetes" / "server-values.yaml"
    assert [*checks.check_chart(path)] == []
    template = charts / "prefect-server" / "templates" / "deployment.yaml"
    template.write_text(re.sub(pattern, fault, CHART, count=1))
    assert any(message in each for each in checks.check_chart(path))


@needs_helm
def test_charts_that_cannot_be_had_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_examples(tmp_path)
    monkeypatch.delenv("HOLDFAST_HELM_CHARTS")
    monkeypatch.setattr(checks.charts, "REPOSITORY", "http://127.0.0.1:9/charts")
    with pytest.raises(checks.Skipped, match="HOLDFAST_HELM_CHARTS"):
        next(checks.check_chart(tmp_path / "infra" / "kubernetes" / "server-values.yaml"))


def test_without_helm_the_charts_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    with pytest.raises(checks.Skipped, match="there is no helm"):
        next(checks.check_chart(tmp_path / "server-values.yaml"))


REAL = [
    pytest.param(name, check, path, id=f"{name} {path.relative_to(ROOT)}")
    for name, check, path in checks.find_files(ROOT)
    if path.relative_to(ROOT).parts[0] in ("infra", ".ci", ".github")
]


@pytest.mark.parametrize(("name", "check", "path"), REAL)
def test_a_fault_in_a_file_of_the_repository_is_found(
    name: str, check: "checks.Check", path: Path, tmp_path: Path
) -> None:
    """`make check-infra` checks that the files have no fault before."""
    if (tool := {"terraform": "terraform", "chart": "helm", "prometheus": "promtool"}.get(name)) and not shutil.which(
        tool
    ):
        pytest.skip(f"there is no {tool}")
    copied = tmp_path / path.name
    if path.is_dir():
        shutil.copytree(path, copied, ignore=shutil.ignore_patterns(".terraform"))
    else:
        shutil.copy(path, copied)
    if name == "ignored":
        shutil.copy(path.with_suffix(""), tmp_path)
    planted = 0
    for target in sorted(copied.glob("*.tf")) or [copied]:
        text = target.read_text("utf-8")
        for pattern, fault in FITTING[name]:
            if re.search(pattern, text):
                target.write_text(re.sub(pattern, fault, text, count=1))
                planted += 1
                try:
                    assert next(check(copied), ""), (pattern, fault)
                except checks.Skipped as reason:
                    pytest.skip(str(reason))
        target.write_text(text)
    assert planted


COMPOSED = [path for name, _, path in checks.find_files(ROOT) if name == "compose"]


@pytest.mark.parametrize("path", COMPOSED, ids=lambda path: path.name)
def test_each_service_needs_its_healthcheck(path: Path, tmp_path: Path) -> None:
    services = yaml.safe_load(path.read_text("utf-8"))["services"]
    checked = [name for name, service in services.items() if "test" in service.get("healthcheck", {})]
    assert checked
    for name in checked:
        composed = yaml.safe_load(path.read_text("utf-8"))
        del composed["services"][name]["healthcheck"]
        (tmp_path / path.name).write_text(yaml.safe_dump(composed))
        assert f"service {name} has no healthcheck" in next(checks.check_compose(tmp_path / path.name))


def test_the_settings_of_jobs_are_prefects_and_dockers() -> None:
    from docker.models.containers import RUN_CREATE_KWARGS, RUN_HOST_CONFIG_KWARGS
    from prefect_docker.worker import DockerWorkerJobConfiguration
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    kinds = {"docker": DockerWorkerJobConfiguration, "kubernetes": KubernetesWorkerJobConfiguration}
    assert {kind: {*each.model_fields} for kind, each in kinds.items()} == checks.SETTINGS
    assert {*RUN_CREATE_KWARGS, *RUN_HOST_CONFIG_KWARGS} - checks.SETTINGS["docker"] == checks.DOCKER_ARGUMENTS


def test_make_runs_the_checks() -> None:
    assert ".venv/tools/bin/python infra/check.py" in (ROOT / "Makefile").read_text("utf-8")
    assert "make check-infra" in (ROOT / ".ci" / "run").read_text("utf-8")
