"""Tests of flow runs whose process was killed: the run's next command, or make up, sets them to Crashed."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.client.schemas.objects import FlowRun

from holdfast.testing.faults import fault
from tasks import lost_runs
from tasks.processes import began_at
from tests.conftest import Driver


@pytest.mark.slow
@pytest.mark.server
def test_flow_runs_of_a_killed_command_are_crashed_before_the_next_one_begins(
    driver: Driver, prefect_api: dict[str, str], tmp_path: Path
) -> None:
    import prefect.settings as names
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags

    run = f"lost-{os.getpid()}"
    done = driver.run(f"run={run}", **fault("commit-recorded", 2, "self", tmp_path / "struck"))
    assert done.returncode == -signal.SIGKILL
    assert driver.run(f"run={run}").returncode == 0
    settings = {getattr(names, name): value for name, value in prefect_api.items() if name != "PREFECT_HOME"}
    own = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:{run}"]))
    with names.temporary_settings(settings), get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=own)
    states = sorted((each.name, each.state_name) for each in found)
    ended = [(run, "Completed"), (run, "Crashed"), (f"{run} attempt 1", "Crashed"), (f"{run} attempt 2", "Completed")]
    assert states == ended
    messages = [each.state.message or "" for each in found if each.state and each.state_name == "Crashed"]
    assert all("is gone and reported no end: it was killed" in message for message in messages)


def make_run(label: str) -> FlowRun:
    return SimpleNamespace(labels={lost_runs.PROCESS_LABEL: label} if label else {})  # type: ignore[return-value]


def test_only_a_process_of_this_machine_can_be_known_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    began, place = began_at(os.getpid()), lost_runs._name_place()
    assert not lost_runs.is_lost(make_run(f"{place}|{os.getpid()}|{began}"))
    assert lost_runs.is_lost(make_run(f"{place}|{os.getpid()}|{began.split()[0]} 1.00"))  # the id of an earlier process
    assert lost_runs.is_lost(make_run(f"{place}|{os.getpid()}|another-boot 1.00"))
    for label in ("", "x", f"{place}|x|1", f"{place}|{os.getpid()}|", f"other|{os.getpid()}|another-boot 1.00"):
        assert not lost_runs.is_lost(make_run(label)), label
