"""Tests of the door at which the ranks of another launcher come to their attempt."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import RunConfig
from holdfast.errors import ConfigError, NodesMissing, RankDied, RunStopped
from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import Heartbeat, RankStanding
from holdfast.rank import attached, door, launcher_signals
from holdfast.rank.attached import AttachedProcesses, AttachedRanks
from holdfast.rank.door import Answer, Door, knock, make_door, name_door
from holdfast.rank.launchers import Slot
from tests.support.waiting import WITHIN_S

SLOT = Slot("torchrun", 0, 2, 0, 2, 0, "127.0.0.1:29500")
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Return a name of a door that no other test uses."""
    return f"\0{tmp_path}"


class Guests:
    """Ranks that knock at a door, each in a thread."""

    def __init__(self, name: str, count: int) -> None:
        self.answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._knock, args=(name,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _knock(self, name: str) -> None:
        self.answers.append(knock(name, WITHIN_S))

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(WITHIN_S)


def test_every_rank_gets_the_variables_and_the_pipes(name: str) -> None:
    attempt, (told, tell) = Door(make_door(name), 2, os.getpid()), os.pipe()
    guests = Guests(name, 2)
    assert attempt.let_in({"A": "1"}, [tell, tell, tell], WITHIN_S) == [os.getpid()] * 2
    guests.wait()
    os.close(tell)
    for number, answer in enumerate(guests.answers):
        assert (answer.variables, answer.code) == ({"A": "1"}, None)
        assert not any(map(os.get_inheritable, answer.files))
        os.write(answer.files[0], b"%d" % number)
        for file in answer.files[:3]:
            os.close(file)
    with os.fdopen(told, "rb") as file:
        assert file.read() == b"01"  # and it ends, because nobody else has the other end
    attempt.close(2)
    assert [os.read(answer.files[3], 1) for answer in guests.answers] == [b"\2", b"\2"]


def test_an_attempt_that_has_no_ranks_tells_its_exit_code(name: str) -> None:
    attempt = Door(make_door(name), 2, os.getpid())
    guests = Guests(name, 2)
    attempt.close(1)
    guests.wait()
    assert [answer.code for answer in guests.answers] == [1, 1]


def test_an_attempt_that_dies_is_an_early_end_for_the_rank_that_knocks(name: str) -> None:
    with make_door(name) as listening:
        guests = Guests(name, 1)
        listening.accept()[0].close()
        guests.wait()
    assert [answer.code for answer in guests.answers] == [3]


def test_a_rank_that_does_not_come_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Door(make_door(name), 2, os.getpid())
    guests = Guests(name, 1)
    with pytest.raises(NodesMissing, match="1 of 2 ranks connected to the attempt within 1 s"):
        attempt.let_in({}, [0, 1, 2], 1.0)
    guests.wait()
    with pytest.raises(NodesMissing, match="has not answered within 0 s"):
        knock(f"{name}/another", 0.3)


def test_an_attempt_does_not_wait_for_ranks_of_a_dead_start(name: str) -> None:
    with subprocess.Popen(SLEEP) as first:
        first.kill()
    attempt = Door(make_door(name), 2, first.pid)
    with pytest.raises(RankDied, match="the first rank of this machine has ended"):
        attempt.let_in({}, [0, 1, 2], WITHIN_S)


def test_another_users_process_is_not_answered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Door(make_door(name), 1, os.getpid())
    monkeypatch.setattr(door, "_read_peer", lambda end: (1, os.getuid() + 1))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(name)
        with pytest.raises(NodesMissing):
            attempt.let_in({"A": "secret"}, [0, 1, 2], 1.0)
        assert stranger.recv(1) == b""


def test_another_users_attempt_is_not_believed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_read_peer", lambda end: (1, os.getuid() + 1))
    with make_door(name) as listening:

        def answer() -> None:
            guest, _ = listening.accept()
            with guest, contextlib.suppress(OSError):  # the rank has gone
                guest.send(b'{"variables": {"PYTHONPATH": "/tmp/evil"}}')

        stranger = threading.Thread(target=answer)
        stranger.start()
        with pytest.raises(NodesMissing):
            knock(name, 1.0)
        stranger.join()


def test_a_name_that_is_taken_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "NAME_WITHIN_S", 0.0)
    with (
        make_door(name),
        pytest.raises(ConfigError, match="another launcher on this machine starts ranks with the same"),
    ):
        make_door(name)
    make_door(name).close()  # the name ends with the socket


def test_starts_of_a_launcher_have_different_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name_door(SLOT), name_door(Slot("torchrun", 2, 4, 0, 2, 1, SLOT.address)), name_door(Slot())}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    names.add(name_door(SLOT))
    assert len(names) == 4
    assert name_door(SLOT) == name_door(Slot("torchrun", 1, 2, 1, 2, 0, SLOT.address))


def test_ranks_are_not_started_a_second_time(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttachedRanks, "door", attempt := Door(make_door(name), 0, os.getpid()))
    attempt.close(0)
    with pytest.raises(RunStopped, match="only their launcher can start new ones"):
        AttachedRanks(RunConfig(recipe="m:f", run="r"), tmp_path / "log")


@pytest.fixture
def sleepers() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Yield two processes that stand for ranks."""
    started = [subprocess.Popen(SLEEP) for _ in range(2)]
    yield started
    for each in started:
        each.kill()
        each.wait()


def test_a_rank_that_stays_alone_is_killed(
    sleepers: list["subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "ALONE_WITHIN_S", 0.5)
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdout, os.fdopen(writer, "w") as stdin:
        processes = AttachedProcesses([each.pid for each in sleepers], stdin, stdout)
        assert processes.poll() is None
        sleepers[1].kill()
        assert sleepers[0].wait(WITHIN_S) == -signal.SIGKILL
        assert processes.first_gone == [sleepers[1].pid]
        assert processes.poll() == 0


def make_ranks(
    config: RunConfig, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[AttachedRanks, Answer]:
    """Return the ranks of an attempt, and what one of them was told."""
    monkeypatch.setattr(AttachedRanks, "door", Door(make_door(name), 1, os.getpid()))
    guests = Guests(name, 1)
    ranks = AttachedRanks(config, tmp_path / "log")
    guests.wait()
    return ranks, guests.answers[0]


@pytest.mark.parametrize(
    ("standing", "is_dead", "problem"),
    [
        (RankStanding.TRAINING, True, "the ranks ended: rank 0 died"),
        (RankStanding.TRAINING, False, "because their launcher told them to"),
        (RankStanding.LEAVING, True, "because their launcher told them to"),
    ],
)
def test_the_ranks_that_died_are_named(
    standing: RankStanding,
    is_dead: bool,
    problem: str,
    tmp_path: Path,
    name: str,
    sleepers: list["subprocess.Popen[bytes]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, answer = make_ranks(RunConfig(recipe="m:f", run="r"), tmp_path, name, monkeypatch)
    ranks._process.pids = [sleepers[0].pid]
    beat = Heartbeat(Path(answer.variables["HOLDFAST_HEARTBEATS"]), 0)
    beat._numbers[0] = sleepers[0].pid
    beat.stand(standing)
    ranks._is_built = True
    if is_dead:
        sleepers[0].kill()
        sleepers[0].wait()
    for file in answer.files:
        os.close(file)
    with pytest.raises(RankDied, match=problem):
        ranks.next_event(WITHIN_S)


@pytest.mark.parametrize(("given", "own", "code"), [(b"\0", 0, 0), (b"\1", 0, 1), (b"", 0, 3), (b"", 1, 1)])
def test_a_rank_ends_with_the_attempts_exit_code(
    given: bytes, own: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launcher_signals.await_code(own) == own  # a rank that no other launcher has started
    reader, writer = os.pipe()
    os.write(writer, given)
    os.close(writer)
    monkeypatch.setenv(launcher_signals.END_VARIABLE, str(reader))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launcher_signals.await_code(own) == code
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(reader)


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_stop_is_passed_on_once_unless_a_rank_has_died(is_dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    kill: Callable[[int, int], Any] = lambda pid, number: told.append((pid, number))  # noqa: E731
    monkeypatch.setattr(launcher_signals.os, "kill", kill)
    monkeypatch.setattr(launcher_signals, "_told", [])
    launcher_signals.pass_on_stop()
    assert told == []  # not the first rank of its machine
    monkeypatch.setenv(launcher_signals.BESIDE_VARIABLE, "4242")
    monkeypatch.setattr(heartbeats, "read_beats", lambda: {0: _Beat(os.getpid()), 1: _Beat(2**22 if is_dead else 1)})
    launcher_signals.pass_on_stop()
    launcher_signals.pass_on_stop()
    assert told == ([] if is_dead else [(4242, signal.SIGTERM)])


class _Beat:
    """A heartbeat's process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
