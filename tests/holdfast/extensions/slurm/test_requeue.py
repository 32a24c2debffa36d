"""Which endings queue a Slurm job again: a table. The queue itself is tested on a real Slurm."""

import contextlib
import threading
from pathlib import Path

import pytest

from holdfast.attempt import surrounded
from holdfast.attempt.lineage import describe_job
from holdfast.config import Compute, RunConfig, load_config
from holdfast.config.slurm import SlurmJob
from holdfast.errors import (
    ConfigError,
    GateTripped,
    HoldfastError,
    NodesMissing,
    RankDied,
    RunGone,
    StoreDenied,
    StoreError,
    Superseded,
)
from holdfast.extensions.slurm import requeue
from holdfast.extensions.slurm.requeue import find_refusal
from holdfast.extensions.slurm.table import Slurm
from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.store import open_store
from tests.support import slurm
from tests.support.waiting import await_equal

JOB = SlurmJob("7", restarts=0, nodes=1, is_step=True, tasks=(1,), address="n0:15217")


def make_journal(folder: Path, *reasons: str) -> Journal:
    """Return the journal of a run whose attempts ended so, none with a committed step."""
    journal = Journal(open_store(str(folder)), "r")
    journal.begin("m:f")
    for number, reason in enumerate(reasons, 1):
        journal.claim_attempt(number, "test", "host", 1, {}, {}, "")
        if reason:
            journal.end_attempt(number, Ending(reason))
    return journal


def make_config(folder: Path, **supervision: int) -> RunConfig:
    return RunConfig.model_validate(
        {"recipe": "m:f", "run": "r", "store": str(folder), "supervision": supervision, "resume": {"stop_within_s": 1}}
    )


@pytest.mark.parametrize(
    ("before", "reasons", "error", "refusal"),
    [
        (0, ["preempted"], SystemExit(143), None),
        (0, ["preempted"], None, None),  # after a notice
        (0, ["rank_crashed"], RankDied("gone"), None),
        (2, ["preempted"] * 3, SystemExit(143), None),
        (0, [], SystemExit(143), None),  # told to end before it had claimed the run
        (0, [], NodesMissing("no node came"), None),
        (0, [""], StoreError("the ending can't be recorded"), None),
        (0, ["completed"], None, ""),
        (1, ["completed"], None, ""),  # nothing was left to train
        (0, ["completed"], SystemExit(143), ""),
        (0, ["preempted"], KeyboardInterrupt(), "Ctrl-C"),
        (0, [], ConfigError("wrong"), "settings or code changed"),
        (0, ["settings"], ConfigError("wrong"), "settings or code changed"),
        (0, ["refused"], GateTripped("other weights"), "the gate"),
        (0, [""], Superseded("by attempt 2"), "owns the run"),  # the ending is another attempt's affair
        (1, [""], Superseded("claimed a moment ago"), "owns the run"),
        (0, [""], RunGone("moved"), "moved or deleted"),
        (2, ["rank_crashed"] * 3, RankDied("gone"), "3 attempts in a row failed, and committed no step"),
        (0, ["superseded"], RankDied("gone"), "owns the run"),
    ],
)
def test_a_job_is_queued_again_if_another_attempt_may_help(
    tmp_path: Path, before: int, reasons: list[str], error: BaseException | None, refusal: str | None
) -> None:
    found = find_refusal(make_config(tmp_path), Slurm(), make_journal(tmp_path, *reasons), before, JOB, error)
    assert found == refusal or (refusal and found and refusal in found)


def test_lost_machines_have_the_budget_of_supervision(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, "preempted", "preempted")
    assert find_refusal(make_config(tmp_path, max_preemptions=2), Slurm(), journal, 1, JOB, SystemExit(143)) is None
    found = find_refusal(make_config(tmp_path, max_preemptions=1), Slurm(), journal, 1, JOB, SystemExit(143))
    assert found
    assert "the run has lost 2 machines, and supervision.max_preemptions allows 1" in found


@pytest.mark.parametrize(
    ("began", "restarts", "refusal"),
    [
        (None, 1, None),
        (None, 2, "3 times in a row the job began no attempt"),
        ({"name": "7", "restarts": 48}, 50, None),  # its attempts before count as little as those of other jobs
        ({"name": "7", "restarts": 48}, 51, "3 times in a row"),
        ({"name": "6", "restarts": 0}, 2, "3 times in a row"),
    ],
)
def test_a_job_that_never_begins_is_not_queued_for_ever(
    tmp_path: Path, began: dict[str, object] | None, restarts: int, refusal: str | None
) -> None:
    job = SlurmJob("7", restarts, nodes=2, is_step=True, tasks=(1,), address="n0:15217")
    journal = make_journal(tmp_path, *["preempted"] * 5)
    journal.claim_attempt(6, "test", "host", 1, {}, {"job": began} if began else {}, "")
    journal.end_attempt(6, Ending("preempted"))
    found = find_refusal(make_config(tmp_path), Slurm(), journal, 6, job, NodesMissing("none"))
    assert found == refusal or (found and refusal and refusal in found)


def test_an_attempt_has_its_job_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_job(Compute()) == {}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert describe_job(Compute()) == {"job": {"name": "7", "restarts": 2}}
    several = Compute(nodes=2, rendezvous="node0:29500")
    assert describe_job(several)["nodes"] == "2"


@pytest.mark.parametrize(
    ("error", "refusal"), [(StoreError("no answer"), None), (StoreDenied("access denied"), "access denied")]
)
def test_a_store_that_does_not_answer_may_do_so_in_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError, refusal: str | None
) -> None:
    journal = make_journal(tmp_path)

    def fail() -> int:
        raise error

    monkeypatch.setattr(journal, "attempts", fail)
    assert find_refusal(make_config(tmp_path), Slurm(), journal, 0, JOB, error) == refusal


@pytest.fixture
def slurms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a squeue and a scontrol of our own on the path; return the file where scontrol notes a change to a job."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(requeue, "TRY_AGAIN_S", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "asked"


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def train_and_stop(folder: Path, **fields: object) -> None:
    config = RunConfig.model_validate({"recipe": "m:f", "run": "r", "store": str(folder), "resume": fields})
    with contextlib.suppress(HoldfastError, SystemExit), surrounded(config):
        raise SystemExit(143)


@pytest.mark.parametrize(
    ("state", "is_queued"),
    [
        ("RUNNING|None|", True),
        ("RUNNING|Preempted|", True),
        ("COMPLETING|TimeLimit|", True),
        ("COMPLETING|None|", False),  # scancel
        ("COMPLETING|NodeDown|", False),  # Slurm queues it again by itself
        ("CANCELLED|None|", False),
        ("", False),
    ],
)
def test_the_state_of_the_job_decides(slurms: Path, tmp_path: Path, state: str, is_queued: bool) -> None:
    install(tmp_path, "squeue", f"echo '{state}'")
    install(tmp_path, "scontrol", f'[ "$1" = show ] || echo "$@" > {slurms}')
    train_and_stop(tmp_path)
    assert slurms.exists() is is_queued
    assert not is_queued or slurms.read_text() == "requeue 7\n"


def test_requeue_off_asks_nothing(slurms: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(tmp_path, "squeue", "echo 'RUNNING|None|'")
    install(tmp_path, "scontrol", f'[ "$1" = show ] || echo asked > {slurms}')
    caplog.set_level("INFO")
    train_and_stop(tmp_path, requeue="off")
    assert not slurms.exists()
    assert 'job 7 is not queued again: extensions.slurm.requeue = "off"' in caplog.text


def test_the_setting_of_earlier_versions_is_read_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.toml"
    file.write_text('recipe = "m:f"\nrun = "a"\nresume.requeue = "off"\n')
    assert load_config(file).extensions == {"slurm": {"requeue": "off"}}
    assert caplog.messages == [f"{file}: resume.requeue is now extensions.slurm.requeue"]
    every_record = {"recipe": "m:f", "run": "a", "resume": {"requeue": "auto"}}
    assert RunConfig.model_validate(every_record) == RunConfig(recipe="m:f", run="a")


@pytest.mark.parametrize("broken", ["squeue", "scontrol"])
def test_a_slurm_that_refuses_is_one_warning(
    slurms: Path, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, "squeue", "echo 'RUNNING|None|'")
    install(tmp_path, "scontrol", f'[ "$1" = show ] || echo asked > {slurms}')
    install(tmp_path, broken, "echo 'disabled for this job' >&2; exit 1")
    train_and_stop(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "disabled for this job" in caplog.text
    assert not slurms.exists()


@pytest.mark.slow
@pytest.mark.pool
@pytest.mark.skipif(bool(slurm.find_missing()), reason="Slurm is not installed")
@pytest.mark.parametrize(
    ("tracking", "said"),
    [
        ("linuxproc", ""),
        ("cgroup", "the steps since the last chunk's end would be lost; chunk.steps sets a chunk's length"),
    ],
)
def test_a_slurm_that_kills_the_ranks_with_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tracking: str, said: str
) -> None:
    """The controller of a real Slurm answers. Nodes that track by cgroups would need root, so there are none."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    config = make_config(tmp_path / "runs")
    with slurm.slurm_cluster(tmp_path / "slurm", 1, tracking=tracking, is_up=False) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.conf)
        await_equal(requeue.tracks_by_cgroups, tracking == "cgroup")
        caplog.set_level("INFO")
        with surrounded(config):
            await_equal(lambda: any(each.name == "slurm" for each in threading.enumerate()), False)
    lines = [each for each in caplog.messages if "cgroups" in each]
    told = "this Slurm tracks processes by cgroups: a kill of this command also kills the ranks before they can save"
    assert lines == ([f"{told}, so {said}"] if said else [])


def test_without_scontrol_nothing_is_known_of_the_tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not requeue.tracks_by_cgroups()
