"""Of the ranks that are left, exactly one saves. The ranks here are processes that only have heartbeats."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import HEARTBEATS_VARIABLE, Heartbeats
from holdfast.machine.processes import is_running
from holdfast.rank import survivor
from holdfast.rank.survivor import await_turn
from tests.support.waiting import await_equal

# Stands as its argument says until its standard input has another standing.
RANK = """
import sys
from holdfast.machine.heartbeats import RankStanding, join, stand
join()
stand(RankStanding[sys.argv[1]])
for line in sys.stdin:
    stand(RankStanding[line.strip()])
"""
Rank = subprocess.Popen[str]
Start = Callable[..., list[Rank]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a process for each standing, as the ranks before this one; this process is the last rank."""
    ranks: list[Rank] = []

    def start(*standings: str) -> list[Rank]:
        beats = Heartbeats(len(standings) + 1)
        environment = os.environ | {HEARTBEATS_VARIABLE: str(beats.path)}
        for number, standing in enumerate(standings):
            command = [sys.executable, "-c", RANK, standing]
            ranks.append(
                subprocess.Popen(command, env=environment | {"RANK": str(number)}, stdin=subprocess.PIPE, text=True)
            )
        monkeypatch.setattr(heartbeats, "_own", heartbeats.Heartbeat(beats.path, len(standings)))
        await_equal(
            lambda: [beat.standing.name for rank, beat in beats.read().items() if rank < len(standings)],
            [*standings],
        )
        beats.close()
        return ranks

    yield start
    for each in ranks:
        each.kill()
        each.communicate()


def test_a_rank_saves_at_once_if_those_before_it_are_dead(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed rank stays a zombie until torchrun asks for its end."""
    monkeypatch.setattr(survivor, "NOTICES_WITHIN_S", 600)
    ranks = start("TRAINING", "LEAVING")
    for each in ranks:
        each.send_signal(signal.SIGKILL)
    await_equal(lambda: [is_running(each.pid) for each in ranks], [False, False])
    assert await_turn(2)


def test_an_earlier_rank_that_saves_goes_first(start: Start) -> None:
    (first,) = start("LEAVING")
    assert first.stdin is not None
    first.stdin.write("SAVED\n")
    first.stdin.flush()
    assert not await_turn(1)


def test_the_next_rank_saves_if_the_one_before_it_ends_without(start: Start) -> None:
    (first,) = start("LEAVING")
    assert first.stdin is not None
    first.stdin.close()
    assert await_turn(1)


def test_a_rank_that_notices_nothing_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a third rank, which waits for this one."""
    monkeypatch.setattr(survivor, "NOTICES_WITHIN_S", 0.1)
    start("TRAINING")
    assert await_turn(1)


def test_no_rank_saves_what_another_one_refuses(start: Start) -> None:
    (first,) = start("REFUSED")
    first.kill()
    assert not await_turn(1)


def test_a_rank_whose_standing_nobody_sees_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "_own", None)
    assert not await_turn(0)
