"""Set up a Prefect server for Holdfast: ``python -m deployments.setup docker --store s3://team/runs``.

This creates the work pools, the automations and the deployments. `make up` does this for its own server.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tasks.untracked  # noqa: F401

import yaml
from cyclopts import App
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

from deployments.automations import make_automations
from deployments.ledger import ROOT
from deployments.pools import Assignments, Kind, check_server, make_pools, parse_assignments
from holdfast.errors import RunStopped
from holdfast.terminal.command import run_app

PREFECT_FILE = ROOT / "deployments" / "prefect.yaml"

app = App(name="python -m deployments.setup", help=__doc__.partition("\n")[0], version_flags=[])


@app.default
def main(kind: Kind, /, *, store: str = "", set_: Assignments = None) -> None:
    """Make the work pools, the automations and the deployments on the configured server, or update them.

    Args:
        kind: the kind of the pools, in which a flow run is a process of this repository, a container, or a Job.
        store: the store of the deployments: a folder or URL that every worker can reach; `runs` by default.
        set_: NAME=VALUE: the default of a variable of the job template; VALUE is text or JSON.
    """
    check_server()
    set_up(kind, parse_assignments(set_), store)


def set_up(kind: Kind, values: Mapping[str, Any] = MappingProxyType({}), store: str = "") -> None:
    """Make the work pools, the automations and the deployments on the configured server, or update them.

    Raises:
        ConfigError: a variable isn't in the job template, or the server has a pool of a different kind.
        RunStopped: the server refuses a deployment.
    """
    make_pools(kind, values=values)
    make_automations()
    deploy(store)


def deploy(store: str = "") -> None:
    """Create or update all deployments of ``prefect.yaml`` on the configured server.

    Args:
        store: the store to set in the deployments' parameters, instead of the store in the file.
    """
    known = yaml.safe_load(PREFECT_FILE.read_text("utf-8"))
    with get_client(sync_client=True) as client:
        before = client.read_deployments()
    with tempfile.TemporaryDirectory() as folder:
        file = PREFECT_FILE
        if store:
            file = Path(folder) / PREFECT_FILE.name
            file.write_text(yaml.safe_dump(set_store(known, store)), "utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--prefect-file", str(file), "--all"],
            env=os.environ | describe_access(),
            cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False,
        )  # fmt: skip
    if done.returncode:
        raise RunStopped(f"prefect deploy failed:\n{done.stdout}{done.stderr}".rstrip())
    with get_client(sync_client=True) as client:
        for each in before:
            restore_schedules(client, each)
    print(f"deployments {', '.join(each['entrypoint'].rpartition('.')[2] for each in known['deployments'])}")


def restore_schedules(client: SyncPrefectClient, before: DeploymentResponse) -> None:
    """Turn each schedule of a deployment on or off as a person has left it, and add the person's own schedules again.

    ``prefect deploy`` replaces all schedules of a deployment by those of its file.

    Args:
        before: the deployment, as the server had it before it was deployed.
    """
    there = {each.slug: each for each in client.read_deployment(before.id).schedules if each.slug}
    for each in before.schedules:
        made = there.get(each.slug or "")
        if made is None:
            own = DeploymentScheduleCreate(**each.model_dump(include={*DeploymentScheduleCreate.model_fields}))
            body = own.model_dump(mode="json", exclude_unset=True)
            client.request("POST", "/deployments/{id}/schedules", path_params={"id": str(before.id)}, json=[body])
        elif made.active != each.active:
            client.update_deployment_schedule(before.id, made.id, active=each.active)


def set_store(known: dict[str, Any], store: str) -> dict[str, Any]:
    """Set the store in the parameters of all deployments and of their schedules; return the deployments."""
    for deployment in known["deployments"]:
        for each in (deployment, *deployment.get("schedules", [])):
            parameters = each.get("parameters", {})
            for holder in (parameters.get("config"), parameters if "store" in parameters else None):
                if holder is not None:
                    holder["store"] = store
    return known


def describe_access() -> dict[str, str]:
    """Return the environment of a client of the configured server."""
    known = {"PREFECT_API_URL": PREFECT_API_URL.value(), "PREFECT_API_AUTH_STRING": PREFECT_API_AUTH_STRING.value()}
    return {name: value for name, value in known.items() if value}


if __name__ == "__main__":
    sys.exit(run_app(app))
