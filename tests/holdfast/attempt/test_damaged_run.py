"""Attempts at damaged runs: they go on from what is whole, or end with the reason; and none waits for ever."""

import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.attempt import live, opening
from holdfast.attempt.opening import Known, await_completed
from holdfast.config import ChunkLength, Log, RunConfig
from holdfast.errors import ConfigDrift, Unreadable
from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.ledger.standing import read_standing
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from tests.support.makers import make_line, train


def make_config(folder: Path, epochs: int = 2, run: str = "run", seed: int = 1) -> RunConfig:
    return RunConfig(
        recipe="tests.support.toy:toy", run=run, store=str(folder), epochs=epochs, seed=seed,
        chunk=ChunkLength(epochs=1), log=Log(folder=str(folder / "logs"), report_every_s=0),
    )  # fmt: skip


def journal_of(folder: Path, run: str = "run") -> Journal:
    return Journal(open_store(str(folder)), run)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_last_save_that_fails_ends_the_attempt(tmp_path: Path) -> None:
    live(make_config(tmp_path, epochs=1))
    folders = tmp_path / "run" / "folders"
    shutil.move(folders, tmp_path / "kept")
    folders.symlink_to(folders)
    with pytest.raises(Unreadable, match="folders is a symbolic link"):
        live(make_config(tmp_path))
    folders.unlink()
    shutil.move(tmp_path / "kept", folders)
    assert live(make_config(tmp_path)).complete
    assert live(make_config(tmp_path, run="straight")).complete
    ends = [read_standing(journal_of(tmp_path, run)).checkpoint_sha256 for run in ("run", "straight")]
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("what", ["commit", "metadata"])
def test_records_of_a_run_with_other_settings_are_passed_over(tmp_path: Path, what: str) -> None:
    live(make_config(tmp_path))
    live(make_config(tmp_path, run="other", seed=2))
    journal = journal_of(tmp_path)
    commit = journal.read_commit(2)
    name = "commits/00000002.json" if what == "commit" else f"{commit.path}/metadata.json"
    path = tmp_path / "run" / name
    path.chmod(0o644)
    shutil.copy(tmp_path / "other" / name, path)
    with pytest.raises(ConfigDrift, match="seed: saved 1, now 2"):  # changed settings are still refused
        live(make_config(tmp_path, epochs=3, seed=2))
    assert live(make_config(tmp_path, epochs=3)).complete
    assert journal.numbers("quarantine") == [2]
    assert live(make_config(tmp_path, epochs=3, run="straight")).complete
    ends = [read_standing(journal_of(tmp_path, run)).checkpoint_sha256 for run in ("run", "straight")]
    assert ends[0] == ends[1]


# ---- an attempt that is about to end


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits until its input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def claim(folder: Path, host: str, pid: int, number: int = 1) -> Journal:
    journal = journal_of(folder)
    journal.begin("m:f")
    journal.claim_attempt(number, "fresh", host, pid, {})
    return journal


def test_an_attempt_that_still_does_its_upkeep_is_waited_for(
    tmp_path: Path, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = claim(tmp_path, platform.node(), process.pid)
    looked = threading.Event()
    monkeypatch.setattr(opening.time, "sleep", lambda seconds: looked.set())

    def end() -> None:
        looked.wait()
        journal.end_attempt(1, Ending("completed"))

    ending = threading.Thread(target=end)
    ending.start()
    assert await_completed(journal_of(tmp_path), 1)
    ending.join()


def test_a_dead_attempt_is_not_waited_for(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    journal = claim(tmp_path, platform.node(), process.pid)
    process.kill()
    process.wait()
    assert not await_completed(journal, 1)


def test_another_machines_attempt_is_not_waited_for(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    assert not await_completed(claim(tmp_path, "elsewhere", process.pid), 1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_second_command_claims_no_run_that_is_being_finished(
    tmp_path: Path, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    live(make_config(tmp_path, epochs=1))
    journal = journal_of(tmp_path)
    record = journal.read_attempt(1).model_copy(update={"pid": process.pid})
    journal.store.replace("attempts/00000001.json", record.to_bytes())
    ended = journal.store.read("endings/00000001.json")
    journal.store.delete("endings/00000001.json")
    sleep = opening.time.sleep

    def end(seconds: float) -> None:
        if not journal.store.exists("endings/00000001.json"):
            journal.store.create("endings/00000001.json", ended)
        sleep(seconds)

    monkeypatch.setattr(opening.time, "sleep", end)
    assert live(make_config(tmp_path, epochs=1)).complete
    assert journal.attempts() == 1


def test_an_attempt_that_still_runs_here_is_superseded_and_all_others_have_vanished(
    tmp_path: Path, process: "subprocess.Popen[bytes]"
) -> None:
    """A later attempt may begin beside it: a person starts the command twice. It is no lost machine."""
    for host, pid, reason in (
        (platform.node(), process.pid, "superseded"),
        ("elsewhere", process.pid, "vanished"),
        (platform.node(), 2**22, "vanished"),
    ):
        folder = tmp_path / f"{host}-{pid}"
        journal = claim(folder, host, pid)
        Known.read(journal).record_lost_attempts(journal, 2)
        ending = journal_of(folder).read_ending(1)
        assert ending
        assert ending.reason == reason


def test_a_lost_attempt_ended_with_its_last_commit(tmp_path: Path) -> None:
    """The next attempt's ranks are built while the living one commits: it isn't fenced off before the claim."""
    line = make_line(LocalStore(str(tmp_path)))
    train(line)
    known = Known.read(line.journal)
    last = train(line)
    line.journal.claim_attempt(2, "continued", "host", 1, {})
    known.record_lost_attempts(line.journal, 2)
    ending = line.journal.read_ending(1)
    assert ending
    assert ending.step == last.step
