"""The watch over ranks finds those that hang, and no others. The ranks here are processes that only have heartbeats."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.extensions.hangs.watch import LEAST_TIMES, Watch
from holdfast.machine.heartbeats import HEARTBEATS_VARIABLE, Heartbeats, Phase
from holdfast.machine.processes import STOPPED, read_process
from tests.support.waiting import await_equal

HUNG_AFTER_S = 0.5
# Trains two steps, so that one is measured, and then does what its argument says.
RANK = """
import sys, threading, time
from holdfast.machine.heartbeats import Phase, Place, begin, join, mark, note_device, within
def spin():
    while True:
        pass
join()
if sys.argv[1].startswith("gpu"):
    note_device("cuda:0")
if sys.argv[1] != "first":
    for step in (1, 2):
        begin(Phase.STEP, step)
        time.sleep(0.001)
begin(Phase.STEP, 3)
if sys.argv[1] == "syncs":
    mark(Place.SYNCING)
if sys.argv[1] == "loads":
    mark(Place.LOADING)
if sys.argv[1] == "waits":
    begin(Phase.WAITING)
if sys.argv[1] == "saves":
    begin(Phase.SAVING)
if sys.argv[1] == "gpu, polled":
    threading.Thread(target=spin, daemon=True).start()
if sys.argv[1] == "gpu, awaited":
    mark(Place.DEVICE)
if sys.argv[1] in ("computes", "gpu, computes", "gpu, awaited"):
    spin()
while sys.argv[1] == "gpu, fed":
    ended = time.thread_time() + 0.005
    while time.thread_time() < ended:
        pass
    time.sleep(0.1)
time.sleep(1000)
"""
Start = Callable[..., tuple[Watch, list[int]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process for each rank, which ends after the test; return the watch over them, and their ids."""
    ranks: list[subprocess.Popen[bytes]] = []

    def start(*does: str, patience: float = 1.0, has_others: bool = False) -> tuple[Watch, list[int]]:
        heartbeats = Heartbeats(len(does))
        for rank, each in enumerate(does):
            own = os.environ | {HEARTBEATS_VARIABLE: str(heartbeats.path), "RANK": str(rank)}
            with (tmp_path / "ranks.log").open("ab") as log:
                ranks.append(subprocess.Popen([sys.executable, "-c", RANK, each], env=own, stderr=log))
        phases = 1 if "first" in does else 3
        await_equal(lambda: [each.phases >= phases for each in heartbeats.read().values()], [True] * len(does))
        heartbeats.close()
        return Watch(heartbeats, HUNG_AFTER_S, patience, has_others=has_others), [each.pid for each in ranks]

    yield start
    for each in ranks:
        each.kill()
        each.wait()


def look_until_late(watch: Watch) -> list[int]:
    """Look until all ranks have been at their places for twice the bound; return the ranks that hang.

    The bound follows from the longest step, which takes a second where other processes have the cores.
    """
    while True:
        hung, seen = watch.find_hung(), watch._seen.values()
        longest_s = max(each.beat.longest_s.get(Phase.STEP, 0.0) for each in seen)
        if hung or min(each.still_s for each in seen) > 2 * max(HUNG_AFTER_S, LEAST_TIMES * longest_s):
            return [*hung]
        time.sleep(0.05)


def test_the_rank_that_the_others_wait_for_hangs(start: Start, tmp_path: Path) -> None:
    watch, pids = start("syncs", "loads", "syncs")
    assert look_until_late(watch) == [1]
    error = watch.diagnose(watch.find_hung(), tmp_path / "ranks.log")
    assert f"rank 1 (process {pids[1]} on {os.uname().nodename}) hangs in step 3, loading data" in str(error)
    log = (tmp_path / "ranks.log").read_text()
    assert log.count("---- rank") == log.count("most recent call first") == 3


def test_a_rank_that_computes_does_not_hang(start: Start) -> None:
    assert look_until_late(start("computes")[0]) == []


def test_ranks_that_wait_for_one_that_computes_do_not_hang(start: Start) -> None:
    assert look_until_late(start("syncs", "computes")[0]) == []


@pytest.mark.parametrize(
    ("does", "hangs"),
    [
        ("gpu, polled", True),  # a thread of NCCL polls, and the thread that trains waits
        ("gpu, awaited", True),  # it is known to wait for its GPU, and spins
        ("gpu, fed", False),  # it launches an evaluation's work, and waits most of the time
        ("gpu, computes", False),
    ],
)
def test_a_rank_that_waits_for_its_gpu_does_not_compute(start: Start, does: str, hangs: bool) -> None:
    assert look_until_late(start(does)[0]) == ([0] if hangs else [])


@pytest.mark.parametrize("does", ["gpu, polled", "gpu, awaited"])
def test_a_gpu_may_wait_for_other_machines(start: Start, does: str) -> None:
    assert look_until_late(start(does, has_others=True)[0]) == []


@pytest.mark.parametrize("does", ["first", "waits", "saves"])
def test_what_is_not_measured_has_longer_bounds(start: Start, does: str) -> None:
    assert look_until_late(start(does)[0]) == []


@pytest.mark.parametrize("does", ["waits", "saves"])
def test_a_stopped_rank_hangs_in_every_phase(start: Start, tmp_path: Path, does: str) -> None:
    watch, pids = start(does, does)
    os.kill(pids[0], signal.SIGSTOP)
    await_equal(lambda: read_process(pids[0])[0], STOPPED)
    assert look_until_late(watch) == [0]
    assert "its process is stopped" in str(watch.diagnose(watch.find_hung(), tmp_path / "ranks.log"))


def test_a_watch_that_was_suspended_counts_no_time(start: Start) -> None:
    """Otherwise a machine that wakes up would lose every run on it."""
    watch, _ = start("loads")
    watch.find_hung()
    watch._looked_at -= 1000.0
    watch.find_hung()
    assert watch._seen[0].still_s < 10.0


def test_a_hang_that_was_none_gives_the_next_ranks_more_time(start: Start) -> None:
    watch, _ = start("loads", patience=100.0)
    assert look_until_late(watch) == []


def test_a_bound_is_never_below_three_times_the_longest_step(start: Start) -> None:
    watch, _ = start("loads")
    watch.find_hung()
    longest_s = max(watch._seen[0].beat.longest_s.values())
    watch._hung_after_s = longest_s / 100
    bound_s = watch._bound(watch._seen[0].beat.phase, first_s=0.0)
    assert bound_s == pytest.approx(3 * longest_s)
