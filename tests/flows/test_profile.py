"""Tests of settings in a user's environment or Prefect profile that would change the flows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Driver, Reference, assert_same_bytes

pytestmark = pytest.mark.slow

# Print the retries of each flow and of the task that commits, which a default of the profile must not change.
RETRIES = """
from flows import attempt, audit, drill, evaluate, prune, sweep, train
from tasks.chunks import commit_chunk
flows = [attempt.attempt, audit.audit, drill.drill, evaluate.evaluate, prune.prune, sweep.sweep, train.train]
print({each.retries for each in [*flows, commit_chunk]}, {each.persist_result for each in [*flows, commit_chunk]})
"""


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
