"""Tests of settings in a user's environment or Prefect profile that would change the flows, or lead nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, RunStopped
from tasks.server import free_port
from tests.conftest import ROOT, Driver, Reference, assert_same_bytes

pytestmark = pytest.mark.slow

# Print the retries of each flow and of the task that commits, which a default of the profile must not change.
RETRIES = """
from flows import attempt, audit, evaluate, prune, sweep, train
from tasks.chunks import commit_chunk
flows = [attempt.attempt, audit.audit, evaluate.evaluate, prune.prune, sweep.sweep, train.train]
print({each.retries for each in [*flows, commit_chunk]}, {each.persist_result for each in [*flows, commit_chunk]})
"""


def test_a_server_that_does_not_answer_is_one_clear_error(tmp_path: Path) -> None:
    """The server that the environment or the profile names was ended, or its machine is off."""
    url = f"http://127.0.0.1:{free_port()}/api"
    done = Driver(tmp_path, {"PREFECT_API_URL": url, "PREFECT_HOME": str(tmp_path)}).run()
    assert done.returncode == RunStopped.exit_code
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith(f"error: Prefect's server at {url} doesn't answer: ")
    assert hint.startswith("hint: start it")
    assert "Traceback" not in done.stderr


def test_a_pool_without_a_server_is_one_clear_error(tmp_path: Path) -> None:
    done = Driver(tmp_path, {"PREFECT_HOME": str(tmp_path)}).run("where=gpu")
    assert done.returncode == ConfigError.exit_code
    assert done.stderr.splitlines() == [
        'error: where = "gpu" needs a server with deployments, and PREFECT_API_URL is not set',
        "hint: make up starts one on this machine and prints what to export",
    ]


def test_no_result_is_stored(tmp_path: Path, prefect_api: dict[str, str], reference: Reference) -> None:
    stored = tmp_path / "stored"
    profile = {
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
        "PREFECT_LOCAL_STORAGE_PATH": str(stored),
        "PREFECT_TASKS_REFRESH_CACHE": "true",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
    }
    driver = Driver(tmp_path, prefect_api | profile)
    driver.finish()
    assert_same_bytes(driver, reference)
    assert not [*stored.rglob("*")]


def test_default_retries_do_not_reach_the_flows() -> None:
    profile = {"PREFECT_FLOWS_DEFAULT_RETRIES": "9", "PREFECT_TASKS_DEFAULT_RETRIES": "9"}
    done = subprocess.run(
        [sys.executable, "-c", RETRIES], env=os.environ | profile, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{0} {False}\n"
