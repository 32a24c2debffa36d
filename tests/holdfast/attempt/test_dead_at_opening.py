"""Ranks that die while an attempt opens its run: new ones take their place, and the attempt keeps its number."""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import RETRIES, Attempt, life, live, started_ahead
from holdfast.config import ChunkLength, Compute, Log, RunConfig
from holdfast.errors import HoldfastError, NoProgress, OutOfMemory, RankDied, RecipeError, RecipeFailed
from holdfast.journal import Commit, Journal
from holdfast.keeping.verification import verify_run
from holdfast.rank.launching import Ranks
from holdfast.rank.spawn import start_process
from holdfast.store import open_store
from holdfast.testing.faults import fault
from tests.conftest import Engine
from tests.support.lives import Lives, ranks_of
from tests.support.vanishing import FAULTS

VANISHING = 'recipe="tests.support.vanishing:vanishing"'
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def make_config(folder: Path, recipe: str = "vanishing", compute: Compute | None = None) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.vanishing:{recipe}", run="run", store=str(folder), epochs=1, chunk=ChunkLength(steps=3),
        log=Log(folder=str(folder / "logs")), compute=compute or Compute(device="cpu"),
    )  # fmt: skip


def journal_of(config: RunConfig) -> Journal:
    return Journal(open_store(config.store), config.run)


# ---- each place where a rank may die


@pytest.fixture(scope="module")
def content_id(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> str:
    """Return the content id at the end of a run that nothing interrupts."""
    engine = Engine(tmp_path_factory.mktemp("straight"), {}, nursery=nursery)
    return train(engine, 2).checkpoint_sha256


def train(engine: Engine, ranks: int, **environment: str) -> Commit:
    """Train a run to its end and return its last commit."""
    done = engine.run(*list_settings(ranks), **environment)
    assert done.returncode == 0, done.stderr
    newest = engine.journal().newest()
    assert newest is not None
    return newest


def list_settings(ranks: int) -> list[str]:
    return [VANISHING, f"compute.ranks={ranks}", "compute.virtual_ranks=2", 'compute.device="cpu"', "epochs=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "killed"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("place", ["import", "build"])
def test_a_rank_that_is_killed_before_the_run_is_claimed_is_replaced(
    engine: Engine, content_id: str, place: str, ranks: int, killed: int
) -> None:
    struck = engine.folder / "struck"
    newest = train(engine, ranks, **{FAULTS: json.dumps([(place, 0, killed, str(struck))])})
    assert struck.exists(), "the fault has missed"
    assert newest.checkpoint_sha256 == content_id
    assert [ending.reason for ending in engine.journal().endings()] == ["completed"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "killed"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_that_is_killed_in_a_restore_is_replaced(
    engine: Engine, content_id: str, ranks: int, killed: int
) -> None:
    """The attempt has claimed the run already, and recorded that the one before it is lost. It does neither again."""
    engine.run(*list_settings(ranks), **fault("commit-recorded", 1, "both", engine.folder / "dead"))
    struck = engine.folder / "struck"
    newest = train(engine, ranks, **{FAULTS: json.dumps([("restore", 0, killed, str(struck))])})
    assert struck.exists(), "the fault has missed"
    assert newest.checkpoint_sha256 == content_id
    journal = engine.journal()
    assert [ending.reason for ending in journal.endings()] == ["vanished", "completed"]
    assert journal.read_attempt(2).lineage["continues"]["commit"] == 1
    assert verify_run(journal).ok


@pytest.mark.slow
def test_one_of_two_ranks_that_is_killed_while_they_build_is_replaced(
    forked_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other rank loses the connection inside the recipe's own code, which isn't to blame."""
    monkeypatch.setenv(FAULTS, json.dumps([("build", 0, 1, str(tmp_path / "struck"))]))
    config = make_config(tmp_path, "waiting", Compute(ranks=2, device="cpu"))
    assert live(config).complete
    assert (tmp_path / "struck").exists(), "the fault has missed"
    (warning,) = (each.message for each in caplog.records if "new ranks" in each.message)
    assert warning.startswith("the ranks ended: rank 1: signal 9 (SIGKILL)")
    assert journal_of(config).attempts() == 1


# ---- ranks that never live: processes that need no torch


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every rank be a process that kills itself at once; return the list of their ids."""
    pids: list[int] = []

    def spawn(command: Any, environment: dict[str, str], log: Any) -> Any:
        process = start_process([sys.executable, "-c", DIES, "holdfast.rank"], environment, log)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(Ranks, "spawn", staticmethod(spawn))
    monkeypatch.setattr(life, "RETRY_AFTER_S", 0.0)
    return pids


def test_ranks_that_die_each_time_end_the_command_as_one_death_did(tmp_path: Path, spawned: list[int]) -> None:
    config = make_config(tmp_path)
    with pytest.raises(RankDied) as raised:
        live(config)
    assert len(spawned) == 1 + RETRIES
    assert str(raised.value) == "the ranks ended: signal 9 (SIGKILL)"
    assert (raised.value.exit_code, raised.value.reason) == (3, "rank_crashed")
    assert not journal_of(config).attempts(), "the run was never claimed"
    assert not ranks_of(os.getpid())


def test_ranks_that_were_started_ahead_and_have_died_are_replaced(tmp_path: Path, spawned: list[int]) -> None:
    config = make_config(tmp_path)
    with started_ahead(config), pytest.raises(RankDied):
        live(config)
    assert len(spawned) == 1 + RETRIES, "those that were started ahead count as the first"


class Signalled(BaseException):
    """An exception that a signal's handler raises."""


@pytest.fixture
def sigterm_raises() -> Iterator[None]:
    def handle(number: int, frame: object) -> None:
        raise Signalled

    before = signal.signal(signal.SIGTERM, handle)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm_raises")
def test_a_signal_ends_the_pause_before_new_ranks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawned: list[int]
) -> None:
    is_pausing = threading.Event()
    pause_s = 300.0
    monkeypatch.setattr(life, "RETRY_AFTER_S", pause_s)

    class Noticing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "new ranks replace these ranks" in record.getMessage():
                is_pausing.set()

    def send() -> None:
        is_pausing.wait()
        time.sleep(0.2)  # it may come before the pause, too, which changes nothing
        os.kill(os.getpid(), signal.SIGTERM)

    handler = Noticing()
    monkeypatch.setattr(life.log, "handlers", [handler])
    thread, began = threading.Thread(target=send, daemon=True), time.monotonic()
    thread.start()
    with pytest.raises(Signalled):
        live(make_config(tmp_path))
    thread.join()
    assert len(spawned) == 1
    assert time.monotonic() - began < pause_s


# ---- errors that new ranks can't help


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[HoldfastError], list[int]]:
    """Return a function that opens a run whose ranks report an error, and returns how often they were started."""

    def open_with(error: HoldfastError) -> list[int]:
        starts: list[int] = []

        def fail(ranks: Any, newest: Any) -> None:
            starts.append(1)
            raise error

        monkeypatch.setattr("holdfast.attempt.ranks.AttemptRanks.build", fail)
        monkeypatch.setattr(life, "RETRY_AFTER_S", 0.0)
        attempt = Attempt(make_config(tmp_path))
        with pytest.raises(HoldfastError) as raised:
            life.open_attempt(attempt)
        starts.append(type(raised.value))  # type: ignore[arg-type]
        return starts

    return open_with


@pytest.mark.parametrize(
    ("error", "starts", "raised"),
    [
        (RecipeError("can't be built"), 1, RecipeError),
        (RecipeFailed("training failed in step 0", step=0), 1, RecipeFailed),
        (OutOfMemory("the kernel killed a rank"), 2, NoProgress),
        (RankDied("the ranks ended"), 1 + RETRIES, RankDied),
    ],
)
def test_only_what_new_ranks_can_help_is_tried_again(
    opened: Callable[[HoldfastError], list[int]], error: HoldfastError, starts: int, raised: type[HoldfastError]
) -> None:
    assert opened(error) == [*[1] * starts, raised]


@pytest.mark.slow
def test_a_recipe_whose_code_fails_while_it_builds_ends_the_command_at_once(engine: Engine) -> None:
    done = engine.run(VANISHING, **{FAULTS: json.dumps([("fail", 0, 0, "")])})
    assert done.returncode == 1
    assert "can't be built" in done.stderr
    assert "new ranks" not in done.stderr
