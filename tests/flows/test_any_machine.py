"""Tests on unusual machines: proxies, locales, time zones, folders with spaces, no home folder; the same bytes."""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import pytest
from prefect.settings import PREFECT_HOME, temporary_settings
from prefect.utilities.processutils import command_from_string

from deployments.ledger import began_at
from deployments.pools import describe_process
from holdfast import Recipe
from holdfast.errors import ConfigError
from tasks.server import bypass_proxy, server
from tests.conftest import COMMAND_WITHIN_S, ROOT, Engine, MakeHome, Reference, assert_same_bytes, kill_tree
from tests.support.metadata_server import metadata_server
from tests.support.toy import toy

NOBODY = "http://127.0.0.1:9"
PROXIES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOBODY)
# The variables that a training operator sets in a pod.
LAUNCHER = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
# Python uses UTF-8 in the C locale unless these are set. No other locale without UTF-8 may be installed.
LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TERMINAL = {"COLUMNS": "20", "LINES": "5", "TERM": "dumb", "FORCE_COLOR": "1"}
TIME = {"TZ": "Pacific/Apia"}
ANOTHER_MACHINE = PROXIES | LAUNCHER | LOCALE | TERMINAL | TIME | {"OMP_NUM_THREADS": "3", "MKL_DYNAMIC": "TRUE"}


def lettered() -> Recipe:
    """Build the toy recipe, after checking that the machine decodes a text file correctly."""
    text = Path(os.environ["TOY_TEXT"])
    with text.open() as lines:  # in the default encoding, as recipes do
        assert lines.read() == "gr\u00f6\u00dfer \u2265 0"
    return toy()


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the user an HTTP proxy that reaches only the internet."""
    for name, value in {**PROXIES, "NO_PROXY": "", "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("proxied")
@pytest.mark.parametrize("exempt", ["", "example.org", "example.org, localhost"])
def test_requests_to_this_machine_bypass_the_proxy(monkeypatch: pytest.MonkeyPatch, exempt: str) -> None:
    monkeypatch.setenv("no_proxy", exempt)
    with metadata_server() as here:
        with pytest.raises(httpx.ConnectError):
            httpx.get(here.url)
        assert not here.asked
        bypass_proxy()
        httpx.get(here.url)
        assert here.asked
    assert urllib.request.proxy_bypass("127.0.0.1:4200")
    assert not urllib.request.proxy_bypass("a-cloud.com")
    assert urllib.request.proxy_bypass("example.org") == ("example.org" in exempt)
    once = os.environ["NO_PROXY"]
    bypass_proxy()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == once


@pytest.mark.usefixtures("proxied")
def test_no_proxy_for_all_hosts_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    bypass_proxy()
    assert os.environ["no_proxy"] == "*"


def test_a_process_is_recognized_in_another_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this failed, make down would not find the processes of make up."""
    found = set()
    for zone in ("UTC", "Asia/Kolkata", "XYZ+11"):
        monkeypatch.setenv("TZ", zone)
        found.add(began_at(os.getpid()))
    assert len(found) == 1
    assert "" not in found


def test_a_worker_starts_flow_runs_in_a_folder_with_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/home/me/my models/.venv/bin/python")
    command = describe_process()["variables"]["properties"]["command"]["default"]
    assert command_from_string(command) == [sys.executable, "-m", "tasks.engine"]


def test_a_home_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = temporary_settings({PREFECT_HOME: tmp_path / "file" / ".prefect"})
    refused = pytest.raises(ConfigError, match=r"Prefect can't write to its folder .*\.prefect: Not a directory")
    with settings, refused as caught, server():
        pass
    assert "PREFECT_HOME" in caught.value.hint


@pytest.mark.slow
def test_a_run_on_an_unusual_machine_ends_on_the_same_bytes(
    engine: Engine, reference: Reference, tmp_path: Path, make_home: MakeHome
) -> None:
    """Train with a temporary server, a loader worker, a long TMPDIR with spaces, and a strict umask."""
    temporary = tmp_path / ("f\u00fcr alle " * 12)
    temporary.mkdir()
    text = tmp_path / "text"
    text.write_text("gr\u00f6\u00dfer \u2265 0", "utf-8")
    places = {"TMPDIR": str(temporary), "PREFECT_HOME": str(make_home(tmp_path / "prefect")), "TOY_TEXT": str(text)}
    config = engine.config.read_text("utf-8").replace("tests.support.toy:toy", f"{__name__}:lettered")
    engine.config.write_text(config, "utf-8")
    trained = run("flows.train", str(engine.config), "--set", "compute.loader_workers=1", **places)
    assert trained.returncode == 0, trained.stderr
    standing = engine.standing()
    assert f"checkpoint      {standing.checkpoint_sha256}\n" in trained.stdout
    assert f"stored in       {engine.run_folder}/epoch-0003\n" in trained.stdout
    assert_same_bytes(engine, reference)
    verified = run("holdfast.cli", "verify", str(engine.run_folder))
    assert (verified.returncode, verified.stderr.count("Traceback")) == (0, 0)
    assert f"{standing.checkpoint_sha256}  epoch-0003\n" in verified.stdout


def run(module: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end in the environment of another user on another machine."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=os.environ | ANOTHER_MACHINE | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, umask=0o077, encoding="utf-8", errors="replace",
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=COMMAND_WITHIN_S)
    finally:
        kill_tree(process.pid)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
