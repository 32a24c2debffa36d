"""Tests of ``make up`` and ``make down``: both are safe to repeat, and no process is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.automations import describe_automations
from deployments.ledger import began_at
from deployments.postgres import find_postgres
from holdfast.errors import ConfigError
from tests.conftest import IN_SOAK, ROOT, kill_tree
from tests.support.pools import ON_THIS_MACHINE, request
from tests.support.processes import variables_of
from tests.support.waiting import await_equal

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.pool, pytest.mark.timeout(1500)]


class Local:
    """The commands, with a state folder of their own."""

    def __init__(self, folder: Path, before: tuple[str, ...] = (), **environment: str) -> None:
        """
        Args:
            before: a command that runs the commands.
        """
        self.folder = folder
        self.before = before
        self.environment = environment

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        own = {"HOLDFAST_STATE": str(self.folder), "PREFECT_HOME": f"{self.folder}/client"}
        return subprocess.run(
            [*self.before, sys.executable, "-m", "deployments.local", *arguments],
            env=environment | own | self.environment,
            cwd=ROOT, capture_output=True, text=True, timeout=500,
        )  # fmt: skip

    def started(self) -> dict[str, Any]:
        path = self.folder / "started.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def pids(self) -> dict[str, int]:
        return {name: entry["pid"] for name, entry in self.started().items()}

    def ask(self, path: str) -> Any:
        """Return the server's answer to a request with the secret."""
        user, _, password = (self.folder / "auth").read_text().partition(":")
        url = self.started()["server"]["url"]
        return request("POST", f"{url}{path}", (user, password), {}).json()

    def ids_of_pools(self) -> set[str]:
        return {pool["id"] for pool in self.ask("/work_pools/filter")}


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    local = Local(tmp_path / "state")
    yield local
    for pid in local.pids().values():
        kill_tree(pid)


def test_up_and_down_can_be_repeated(local: Local) -> None:
    up = local.run("up")
    assert up.returncode == 0, up.stderr
    pids = local.pids()
    assert set(pids) == {"server", "worker-stable", "worker-gpu"}
    url = local.started()["server"]["url"]
    assert up.stdout.startswith(f"server      {url.removesuffix('/api')}   starts\n")
    assert f"UI          {url.removesuffix('/api')}" in up.stdout
    again = local.run("up")
    assert again.returncode == 0, again.stderr
    assert local.pids() == pids
    assert (local.folder.stat().st_mode & 0o777, (local.folder / "auth").stat().st_mode & 0o777) == (0o700, 0o600)
    assert httpx.post(f"{url}/automations/filter", json={}, **ON_THIS_MACHINE).status_code == httpx.codes.UNAUTHORIZED
    automations = local.ask("/automations/filter")
    assert sorted(each["name"] for each in automations) == sorted(each.name for each in describe_automations())
    pool_ids = local.ids_of_pools()
    for pid in (pids["worker-stable"], pids["worker-gpu"]):  # unlike a shell's background
        ignored = int(Path(f"/proc/{pid}/status").read_text().partition("SigIgn:\t")[2].split()[0], 16)
        assert not ignored >> (signal.SIGINT - 1) & 1
    for pid in (pids["worker-stable"], pids["worker-gpu"]):
        assert variables_of(psutil.Process(pid))["HOLDFAST_ALLOWED_RECIPES"] == f"holdfast.recipes, {ROOT}/"
    secret = (local.folder / "auth").read_bytes()
    assert secret.decode() not in up.stdout + up.stderr + again.stdout
    for path in (path for path in local.folder.rglob("*") if path.is_file() and path.name != "auth"):
        assert secret not in path.read_bytes(), path  # the secret is neither in the job templates nor in a log
    other = local.run("up", "--postgres")
    assert other.returncode == 1
    assert (
        "a Prefect server is already running; its database is a file, and this command would use Postgres"
        in other.stderr
    )
    before = local.started()
    kill_tree(pids["server"])
    kill_tree(pids["worker-gpu"])
    assert local.run("up").returncode == 0  # make up restarts dead processes on the same data
    after = local.started()
    assert after["server"]["url"] == url
    assert after["server"]["pid"] != pids["server"]
    assert after["worker-stable"] == before["worker-stable"]
    assert local.ids_of_pools() == pool_ids
    pids |= local.pids()
    down = local.run("down")
    assert down.returncode == 0
    assert [line.split()[1] for line in down.stdout.splitlines()] == ["worker-stable", "worker-gpu", "server"]
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid) and began_at(pid)]
    assert local.run("down").stdout == "no process of make up runs on this machine\n"


@IN_SOAK
def test_up_with_postgres(local: Local) -> None:
    try:
        find_postgres()
    except ConfigError as error:
        pytest.skip(str(error))
    up = local.run("up", "--postgres")
    assert up.returncode == 0, up.stderr
    pids = local.pids()
    assert local.ask("/deployments/count") == 7
    assert not list(local.folder.rglob("*.db"))
    assert local.run("down").returncode == 0
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid) and began_at(pid)]


@pytest.fixture
def slim(tmp_path: Path) -> Iterator[Local]:
    """Yield the commands as a user who is not root has them, on a machine without any program on its PATH."""
    with tempfile.TemporaryDirectory() as folder:  # no other user may enter pytest's own folders
        before: tuple[str, ...] = ()
        if os.geteuid() == 0:
            before = (find_setpriv(), "--reuid", "65534", "--regid", "65534", "--clear-groups")
            if not is_open_to_all(Path(sys.executable).resolve()):  # let the user read, but not write, what root owns
                before += ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
            os.chown(folder, 65534, 65534)
        (tmp_path / "bin").mkdir()
        temporary = Path(folder) / "tmp"
        (temporary / "runner_storage").mkdir(parents=True)  # root's, as after a worker of root's
        temporary.chmod(0o1777)
        local = Local(Path(folder) / "state", before, PATH=str(tmp_path / "bin"), HOME=folder, TMPDIR=str(temporary))
        yield local
        for pid in local.pids().values():
            kill_tree(pid)


def find_setpriv() -> str:
    found = shutil.which("setpriv")
    if found is None:
        pytest.skip("root needs setpriv to become another user")
    return found


def is_open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o5 == 0o5 for folder in (path, *path.parents))


@IN_SOAK
def test_up_needs_neither_root_nor_ps(slim: Local) -> None:
    """It starts a worker for each of two GPUs, too, without nvidia-smi."""
    up = slim.run("up", "--gpus", "2")
    assert up.returncode == 0, up.stderr
    pids = slim.pids()
    assert set(pids) == {"server", "worker-stable", "worker-gpu-0", "worker-gpu-1"}
    assert 0 not in {psutil.Process(pid).uids().effective for pid in pids.values()}
    workers = [psutil.Process(pids[f"worker-gpu-{number}"]) for number in range(2)]
    assert [variables_of(worker)["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["0", "1"]
    await_equal(lambda: [worker["status"] for worker in slim.ask("/work_pools/gpu/workers/filter")], ["ONLINE"] * 2)
    down = slim.run("down")
    assert down.returncode == 0, down.stderr
    ended = [line.split()[1] for line in down.stdout.splitlines()]
    assert ended == ["worker-stable", "worker-gpu-0", "worker-gpu-1", "server"]
    assert not [pid for pid in pids.values() if began_at(pid)]
