"""The error of any of several ranks reaches the caller, and a signal reaches all ranks."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint import Saved
from holdfast.config import Compute, Log, RunConfig
from holdfast.errors import HoldfastError, OutOfMemory, RankDied, RecipeFailed
from holdfast.journal import Journal
from holdfast.proof.result import Proof
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Progress, Ready, Shadowed
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, IN_SOAK, has_not_ended
from tests.support.device import DEVICE
from tests.support.lives import Lives, ranks_of
from tests.support.processes import variables_of

pytestmark = [pytest.mark.slow, pytest.mark.gpus(2)]


def make_config(folder: Path, **settings: object) -> RunConfig:
    return RunConfig(
        recipe="tests.support.failing:failing", run="several", store=str(folder), settings=settings, epochs=9,
        compute=Compute(ranks=2, device=DEVICE), log=Log(every=1, folder=str(folder)),
    )  # fmt: skip


@pytest.fixture
def started() -> Iterator[list[Ranks]]:
    """Yield a list for the ranks that a test starts; end them after the test."""
    ranks: list[Ranks] = []
    yield ranks
    for each in ranks:
        each.signal(signal.SIGKILL)
        each.end()


def train_to_the_end(ranks: Ranks) -> HoldfastError:
    """Train to the end and return the error that ends the ranks."""
    ranks.expect(Ready)
    ranks.train(100, "f" * 64)
    try:
        while True:
            ranks.next_event()
    except HoldfastError as error:
        return error


@pytest.mark.parametrize("rank", [pytest.param(0, marks=IN_SOAK), 1])
def test_the_error_of_any_rank_names_the_recipes_line(tmp_path: Path, started: list[Ranks], rank: int) -> None:
    started.append(Ranks(make_config(tmp_path, how="raise", rank=rank), tmp_path / "ranks.log"))
    error = train_to_the_end(started[0])
    assert isinstance(error, RecipeFailed)
    assert str(error).startswith(
        f"training failed in step 2 of rank {rank}: {Path('tests/support/failing.py').absolute()}:"
    )
    assert "mat1 and mat2 shapes cannot be multiplied" in str(error)


def test_a_rank_killed_by_a_signal_is_named(tmp_path: Path, started: list[Ranks]) -> None:
    """The other rank's lost connection isn't taken for an error of the recipe."""
    started.append(Ranks(make_config(tmp_path, how="kill", rank=1), tmp_path / "ranks.log"))
    error = train_to_the_end(started[0])
    assert isinstance(error, RankDied)
    assert str(error).startswith("the ranks ended: rank 1: signal 9 (SIGKILL)")
    assert "torchrun" not in str(error)
    assert "=====" not in str(error)


def test_a_crash_in_native_code_names_rank_signal_and_line(tmp_path: Path, started: list[Ranks]) -> None:
    started.append(Ranks(make_config(tmp_path, how="crash", rank=1), tmp_path / "ranks.log"))
    error = train_to_the_end(started[0])
    assert isinstance(error, RankDied)
    place = Path("tests/support/failing.py").absolute()
    assert str(error).startswith(f"the ranks ended: rank 1: signal 11 (SIGSEGV) at {place}:")


@IN_SOAK
def test_a_rank_without_memory_is_named(tmp_path: Path, started: list[Ranks]) -> None:
    started.append(Ranks(make_config(tmp_path, how="greed", rank=1), tmp_path / "ranks.log"))
    error = train_to_the_end(started[0])
    assert isinstance(error, OutOfMemory)
    place = Path("tests/support/failing.py").absolute()
    assert str(error).startswith(f"out of memory in step 2 of rank 1: {place}:")


def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path, started: list[Ranks]) -> None:
    Journal(open_store(str(tmp_path)), "several").begin("failing")
    started.append(ranks := Ranks(make_config(tmp_path), tmp_path / "ranks.log"))
    ranks.expect(Ready)
    ranks.train(10_000, "f" * 64)
    ranks.expect(Progress)
    ranks.save()
    while not isinstance(ranks.next_event(), Saved):
        pass
    for _ in range(10):  # the order gave one save, and no more
        last = ranks.expect(Progress).step
    (second,) = (each for each in ranks_of(os.getpid()) if variables_of(each).get("RANK") == "1")
    second.send_signal(signal.SIGTERM)
    while not isinstance(event := ranks.next_event(), Saved):
        assert isinstance(event, Progress)
        last = event.step
    assert event.step == last, "the other rank has trained no further"
    with pytest.raises(RankDied, match="the ranks ended: exit code 0"):
        _read_shadow(ranks)


def test_ranks_with_state_of_their_own_in_the_probe_are_proved(nursery: Lives, tmp_path: Path) -> None:
    """Each rank's probe is compared with its own saved one, and the kills reach all ranks."""
    config = make_config(tmp_path).model_copy(update={"recipe": "tests.support.varied:normalised"})
    done = nursery.call("tests.support.forked:prove_mutated", "", config.model_dump(mode="json"), 6, 1, 3)
    proof = Proof.model_validate_json(done.stdout)
    assert proof.is_proved, str(proof)


@pytest.mark.gpus(3)
def test_three_ranks_add_in_one_order_from_their_first_step_on(nursery: Lives, tmp_path: Path) -> None:
    """A sum of two numbers has no order; the place of a gradient in its bucket decides that of three."""
    changes = {"recipe": "tests.support.numbered:numbered", "settings": {"notes": str(tmp_path / "notes")}}
    config = make_config(tmp_path).model_copy(update=changes | {"compute": Compute(ranks=3, device=DEVICE)})
    done = nursery.call("tests.support.forked:prove_mutated", "", config.model_dump(mode="json"), 12, 2, 9)
    proof = Proof.model_validate_json(done.stdout)
    assert proof.is_proved, str(proof)


def test_a_kill_reaches_every_rank_and_none_listens_for_others(tmp_path: Path, started: list[Ranks]) -> None:
    started.append(ranks := Ranks(make_config(tmp_path), tmp_path / "ranks.log"))
    ranks.expect(Ready)
    ranks.train(10_000, "f" * 64)
    ranks.expect(Progress)
    processes = ranks_of(os.getpid())
    assert len(processes) == 3, "the process that starts the ranks, and two ranks"
    listening = [each for process in processes for each in process.net_connections("inet") if each.status == "LISTEN"]
    assert {each.laddr.ip for each in listening} <= {"127.0.0.1"}
    ranks.signal(signal.SIGKILL)
    deadline = time.monotonic() + COMMAND_WITHIN_S
    while any(map(has_not_ended, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not list(tmp_path.glob("several/*/metadata.json")), "none has saved one more step"


@IN_SOAK
def test_end_waits_for_the_ranks_if_their_starter_has_died(tmp_path: Path, started: list[Ranks]) -> None:
    started.append(ranks := Ranks(make_config(tmp_path), tmp_path / "ranks.log"))
    ranks.expect(Ready)
    ranks.train(10_000, "f" * 64)
    ranks.expect(Progress)
    processes = [process for process in ranks_of(os.getpid()) if process.pid != ranks.pid]
    os.kill(ranks.pid, signal.SIGKILL)
    deadline = time.monotonic() + COMMAND_WITHIN_S
    while ranks.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks.end()
    assert not [process for process in processes if has_not_ended(process)]


@IN_SOAK
def test_end_waits_for_a_rank_that_has_lost_its_mark(
    tmp_path: Path, started: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes an exiting process's environment away before its memory and its open files."""
    started.append(ranks := Ranks(make_config(tmp_path), tmp_path / "ranks.log"))
    ranks.expect(Ready)
    processes = [process for process in ranks_of(os.getpid()) if process.pid != ranks.pid]
    seen = iter([ranks._find_others()])
    monkeypatch.setattr(ranks, "_find_others", lambda: next(seen, []))
    os.kill(ranks.pid, signal.SIGKILL)
    ranks.end()
    assert not [process for process in processes if has_not_ended(process)]


def _read_shadow(ranks: Ranks) -> None:
    while isinstance(ranks.next_event(), Shadowed):
        pass
