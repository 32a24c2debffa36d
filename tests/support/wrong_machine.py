"""Runs that a machine has trained which computes wrongly from a step on, and audits of them on other hosts."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.journal import Journal
from holdfast.machine.host import VARIABLE
from holdfast.store import open_store
from tests.conftest import Engine
from tests.support.lives import Lives

# Commits end with steps 10, 20 and 30. A rehearsal compares steps 11 to 14, so that a flip comes after them.
OPTIONS = ("recipe=tests.support.flipping:flipping", "chunk.steps=10", "retention.keep_last=99")
FLIPS_AT = 16


def train_on(folder: Path, nursery: Lives, host: str, **variables: str) -> Engine:
    engine = Engine(folder, {VARIABLE: host} | variables, nursery=nursery)
    engine.finish(*OPTIONS)
    return engine


def copy_run(engine: Engine, folder: Path) -> Engine:
    """Return an engine with a copy of a run, for a test that adds audits to it."""
    found = Engine(folder, engine.environment, nursery=engine.nursery)
    shutil.copytree(engine.run_folder, found.run_folder)
    return found


def journal_of(engine: Engine) -> Journal:
    return Journal(open_store(engine.store), "toy")


def audit_on(engine: Engine, host: str, *options: str, commit: int = 2, **variables: str) -> dict[str, Any]:
    """Return the verdict after an audit on a host, as JSON."""
    command = ("audit", str(engine.run_folder), "--commit", str(commit), "--json", *options)
    done = engine.command(*command, **{VARIABLE: host}, **variables)
    assert done.returncode in (0, 2), done.stderr
    (found,) = json.loads(done.stdout)
    return dict(found["judged"])


@contextmanager
def deployed_audit(prefect_api: dict[str, str]) -> Iterator[Any]:
    """Deploy the audit without a worker; yield a function that returns the flow runs that wait, oldest first."""
    import prefect.settings as names
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId

    settings = {getattr(names, name): value for name, value in prefect_api.items() if name != "PREFECT_HOME"}
    with names.temporary_settings(settings), get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow_from_name("audit"), "audit")
        only = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
        try:
            yield lambda: sorted(client.read_flow_runs(deployment_filter=only), key=lambda each: each.created)
        finally:
            client.delete_deployment(deployment)
