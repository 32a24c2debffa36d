"""Make or update work pools on the configured Prefect server, for example:
``python -m deployments.pools docker --set image=holdfast:worker``.

The kinds `docker` and `kubernetes` are described by ``infra/<kind>/pools.yaml``.
"""

import copy
import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import tasks.untracked  # noqa: F401

import httpx
import yaml
from cyclopts import App, Parameter
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL
from prefect.workers.process import ProcessWorker

from deployments.ledger import ROOT
from holdfast.errors import ConfigError, RunStopped
from holdfast.terminal.command import run_app
from tasks.server import bypass_proxy, check_access

POOLS = {
    "stable": "For flows that only watch and tidy up: train, prune and sweep.",
    "gpu": "For flows that use the GPU: attempt, evaluate, audit.",
}
# A server that was just started answers after ten seconds, or later on a busy machine.
ANSWERS_WITHIN_S = 60.0
Template = dict[str, Any]
Kind = Literal["process", "docker", "kubernetes"]
Assignments = Annotated[list[str] | None, Parameter(name="--set", negative="")]

app = App(name="python -m deployments.pools", help=__doc__.partition("\n\n")[0], version_flags=[])


@app.default
def main(
    kind: Kind, /, *, pool: Annotated[list[str] | None, Parameter(negative="")] = None, set_: Assignments = None
) -> None:
    """Make the work pools of a kind on the configured server, or update them.

    Args:
        kind: the kind of the pools, in which a flow run is a process of this repository, a container, or a Job.
        pool: make only this pool, `stable` or `gpu`; both by default.
        set_: NAME=VALUE: the default of a variable of the job template; VALUE is text or JSON.
    """
    check_server()
    make_pools(kind, pool or POOLS, parse_assignments(set_))


def check_server() -> None:
    """Wait until the configured server answers, and check that it accepts the configured secret.

    Raises:
        ConfigError: no server is configured, or it refuses the secret.
        RunStopped: the server did not answer in time.
    """
    bypass_proxy()
    url = PREFECT_API_URL.value()
    if not url:
        raise ConfigError(
            "PREFECT_API_URL is not set", hint="make up prints its value; or give the URL of your own server"
        )
    await_answer(url)
    check_access(url)


def await_answer(url: str) -> None:
    """Wait until a server answers at its API's URL, with any status.

    Raises:
        RunStopped: the server did not answer in time.
    """
    deadline = time.monotonic() + ANSWERS_WITHIN_S
    is_told = False
    while True:
        try:
            httpx.get(f"{url}/health")
            return
        except httpx.TransportError as error:
            if time.monotonic() > deadline:
                raise RunStopped(
                    f"Prefect's server at {url} did not answer within {ANSWERS_WITHIN_S:.0f} s: {error}",
                    hint="start it, or set PREFECT_API_URL to the URL of another one",
                ) from None
        if not is_told:
            print(f"waiting for Prefect's server at {url}", flush=True)
            is_told = True
        time.sleep(0.5)


def make_pools(kind: Kind, names: Iterable[str] = POOLS, values: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Make the work pools of a kind on the configured server, or update them.

    Args:
        values: defaults of the job template's variables, for each of these pools.
    """
    templates = describe_pools(kind)
    for name in names:
        if name not in templates:
            raise ConfigError(f"there is no pool {name!r}", hint=f"the pools are {', '.join(templates)}")
        make_pool(name, kind, set_defaults(templates[name], values))


def describe_pools(kind: str) -> dict[str, Template]:
    """Return the base job template of each pool of a kind, by the pool's name."""
    if kind == "process":
        return dict.fromkeys(POOLS, describe_process())
    known = yaml.safe_load((ROOT / "infra" / kind / "pools.yaml").read_text("utf-8"))
    template = {"variables": known["variables"], "job_configuration": known["job_configuration"]}
    return {name: set_defaults(template, defaults) for name, defaults in known["pools"].items()}


def describe_process() -> Template:
    """Return the base job template of a pool whose flow runs are processes of this repository on this machine.

    The template names the command, so that a worker starts it at once. Without a command, a worker first prepares a
    workspace, which takes seconds.
    """
    template = ProcessWorker.get_default_base_job_template()
    command = f"{shlex.quote(sys.executable)} -m tasks.engine"
    return set_defaults(template, {"command": command, "working_dir": str(ROOT)})


def set_defaults(template: Template, values: Mapping[str, Any]) -> Template:
    """Return a base job template with new defaults of its variables.

    Raises:
        ConfigError: the template has no such variable.
    """
    changed = copy.deepcopy(template)
    variables = changed["variables"]["properties"]
    for name, value in values.items():
        if name not in variables:
            raise ConfigError(
                f"the job template has no variable {name!r}", hint=f"its variables are {', '.join(variables)}"
            )
        variables[name]["default"] = value
    return changed


def parse_assignments(assignments: Iterable[str] | None) -> dict[str, Any]:
    """Return the values of NAME=VALUE texts, by name. A value that is not JSON is taken as text.

    Raises:
        ConfigError: a text has no name or no "=".
    """
    values: dict[str, Any] = {}
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not (name and equals):
            raise ConfigError(f"--set takes NAME=VALUE, not {assignment!r}", hint="such as --set image=holdfast:worker")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def make_pool(name: str, kind: str, template: Template) -> None:
    """Make a work pool, or update its base job template.

    Raises:
        ConfigError: the server has a pool of this name and of a different kind.
    """
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(
                WorkPoolCreate(name=name, type=kind, base_job_template=template, description=POOLS[name])
            )
        except ObjectAlreadyExists:  # the pool was made earlier, or just now by a worker, which makes its missing pool
            known = client.read_work_pool(name)
            if known.type != kind:
                raise ConfigError(
                    f"work pool {name} is of type {known.type}, not {kind}",
                    hint=f"prefect work-pool delete {name}, then try again; it also deletes its queued flow runs",
                ) from None
            client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
    print(f"work pool   {name}")


if __name__ == "__main__":
    sys.exit(run_app(app))
