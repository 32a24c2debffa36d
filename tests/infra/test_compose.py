"""Tests of infra/compose.yaml with Docker Compose: on what `make up-compose` starts, a run ends on the right bytes,
though its worker is killed and everything is stopped meanwhile."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.ledger import ProcessLedger
from tasks.server import free_port
from tests.conftest import ROOT
from tests.support.containers import IMAGE, engine_up, find_engine
from tests.support.pools import Pool, PoolRun, clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.pool]

# From registries, unless they are here already.
FOREIGN = ("postgres", "redis", "store")
STEPS = 4 * 500  # small ones, and long enough to strike twice
SMALL = {"context": 16, "layers": 1, "heads": 1, "width": 16, "batch_size": 4, "grad_accum": 1, "sample_bytes": 0}
ENDS_WITHIN_S = 900.0
# Kills the container's worker, after which its first process ends, and Docker starts the container again.
KILL_WORKER = "import os; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), 9)"


class Composed(Pool):
    """The containers of `make up-compose`, from a copy of `infra`, under a name and at ports of their own."""

    folder: Path
    variables: dict[str, str]

    @property
    def secrets(self) -> dict[str, str]:
        """Read the variables in `infra/.env`, which `make up-compose` writes."""
        lines = (self.folder / "infra" / ".env").read_text().splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    @property
    def auth(self) -> tuple[str, str]:
        user, _, password = self.secrets["PREFECT_AUTH"].partition(":")
        return user, password

    def make(self, target: str) -> None:
        done = subprocess.run(
            ["make", target],
            cwd=self.folder,
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def compose(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        known = ["--file", "infra/compose.yaml", "--env-file", "infra/.env"]
        return subprocess.run(
            [*self.variables["COMPOSE"].split(), *known, *arguments],
            cwd=self.folder, env=os.environ | self.variables, capture_output=True, text=True, check=False,
        )  # fmt: skip


class ComposedRun(PoolRun):
    """A run of a recipe that the image has."""

    @property
    def store(self) -> str:
        return "s3://runs"

    def config(self, **changes: Any) -> dict[str, Any]:
        known: dict[str, Any] = {
            "recipe": "holdfast.recipes.language:language", "settings": SMALL | {"steps_per_epoch": STEPS // 4},
            "run": self.name, "epochs": 4, "where": "gpu", "store": self.store, "chunk": {"steps": 50},
            "determinism": {"threads": 1},
        }  # fmt: skip
        return known | changes


@pytest.fixture
def composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Composed]:
    docker = find_engine(dict(os.environ))
    if subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{docker} has no compose")
    with engine_up(tmp_path):
        pass  # the image is there, with this code
    folder = tmp_path / "copy"
    shutil.copytree(ROOT / "infra", folder / "infra", ignore=shutil.ignore_patterns(".env"))
    shutil.copy(ROOT / "Makefile", folder)
    pool = Composed(ProcessLedger(tmp_path), {})
    ports = {name: str(free_port()) for name in ("PORT", "STORE_PORT", "CONSOLE_PORT")}
    name = f"holdfast-{uuid.uuid4().hex[:12]}"
    pool.folder, pool.url = folder, f"http://127.0.0.1:{ports['PORT']}/api"
    pool.variables = ports | {"COMPOSE": f"{docker} compose", "COMPOSE_PROJECT_NAME": name, "IMAGE": IMAGE}
    pool.make("infra/.env")
    pulled = pool.compose("pull", "--policy", "missing", *FOREIGN)
    if pulled.returncode:
        pytest.skip(f"an image can't be pulled: {pulled.stderr.strip().splitlines()[-1]}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ports['STORE_PORT']}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "holdfast")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", pool.secrets["STORE_PASSWORD"])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with clean_environment():
        try:
            pool.make("up-compose")
            yield pool
        finally:
            pool.compose("down", "--volumes", "--timeout", "10")


def test_a_run_ends_on_the_right_bytes_whatever_ends_meanwhile(composed: Composed, tmp_path: Path) -> None:
    straight, struck = ComposedRun(composed, tmp_path, "straight"), ComposedRun(composed, tmp_path, "struck")
    # A busy server may call a live flow run lost for a moment, and its attempt too: see deployments/automations.py.
    composed.await_state(straight.start(), "Completed", ENDS_WITHIN_S)

    struck.start()
    struck.await_commits(1, ENDS_WITHIN_S)
    composed.compose("exec", "worker-gpu", "python", "-c", KILL_WORKER)
    struck.await_attempt(2, ENDS_WITHIN_S)  # on the container that Docker has started again
    before = struck.journal().newest_number()
    struck.await_commits(before + 1, ENDS_WITHIN_S)
    composed.make("down-compose")
    assert composed.compose("ps", "--all", "--quiet").stdout == ""

    composed.make("up-compose")
    assert struck.reasons()[-1][0] == "preempted"
    composed.await_state(struck.start(), "Completed", ENDS_WITHIN_S)
    standing = struck.standing()
    assert (standing.step, standing.checkpoint_sha256) == (STEPS, straight.standing().checkpoint_sha256)
    assert struck.reasons()[-1] == ("completed", STEPS)
