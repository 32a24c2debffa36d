"""A rank for which the others wait is named, with its host; ranks that wait for each other alike are not."""

import contextlib
import multiprocessing
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from holdfast.journal import Journal
from holdfast.machine.heartbeats import Beat, Heartbeat, Heartbeats, Phase, Place, RankStanding
from holdfast.machine.slow_ranks import LEAST_STEPS, SlowRanks
from holdfast.store import open_store
from tests.conftest import IN_SOAK, IS_SOAK
from tests.support.lives import Lives
from tests.support.shares import write_config

BEGUN = Beat(1, 0, Phase.STEP, Place.COMPUTING, 0, 5, RankStanding.TRAINING, MappingProxyType({}), 1.0, 0.5, "node-3")


def after(steps: int, steps_s: float, syncing_s: float) -> Beat:
    return replace(BEGUN, step=BEGUN.step + steps, steps_s=1.0 + steps_s, syncing_s=0.5 + syncing_s)


@pytest.mark.parametrize(
    ("syncing_s", "named"),
    [
        ((5.0, 5.0), None),
        ((6.9, 5.0), None),
        ((7.1, 5.0), 1),
        ((0.0, 5.0, 5.0, 5.0), 0),
        ((5.0, 0.0, 0.0, 5.0), 1),  # two that are slow alike: the first of them
        ((5.0,), None),
    ],
)
def test_the_rank_for_which_the_others_wait_is_named(syncing_s: tuple[float, ...], named: int | None) -> None:
    search = SlowRanks()
    assert search.find(dict.fromkeys(range(len(syncing_s)), BEGUN)) is None
    found = search.find({rank: after(LEAST_STEPS, 10.0, each) for rank, each in enumerate(syncing_s)})
    assert (found and found.rank) == named


def test_few_steps_are_judged_together_with_the_next() -> None:
    search = SlowRanks()
    search.find({0: BEGUN, 1: BEGUN})
    assert search.find({0: after(99, 10.0, 8.0), 1: after(99, 10.0, 0.0)}) is None
    found = search.find({0: after(200, 20.0, 8.0), 1: after(200, 20.0, 0.0)})
    assert str(found) == "the other ranks waited for rank 1 on node-3 for 40% of the time, in steps 5-205"
    assert search.find({0: after(300, 30.0, 8.0), 1: after(300, 30.0, 0.0)}) is None


def test_a_heartbeat_sums_the_time_in_steps_and_the_wait_for_others() -> None:
    beats = Heartbeats(1)
    own = Heartbeat(beats.path, 0)
    beats.close()

    def take_step(number: int) -> None:
        own.begin(Phase.STEP, number)
        time.sleep(0.01)
        own.mark(Place.SYNCING)
        own.mark(Place.SYNCING)
        time.sleep(0.03)
        own.mark(Place.COMPUTING)
        with own.within(Phase.EVALUATING):
            time.sleep(0.05)
            own.mark(Place.SYNCING)

    take_step(1)
    own.begin(Phase.SAVING)
    assert (beats.read()[0].steps_s, beats.read()[0].syncing_s) == (0.0, 0.0)  # the first step doesn't count
    began = time.monotonic()
    take_step(2)
    own.begin(Phase.SAVING)
    beat = beats.read()[0]
    assert 0.03 <= beat.syncing_s <= beat.steps_s - 0.01 < time.monotonic() - began - 0.05
    own.begin(Phase.STEP, 3)
    own.mark(Place.SYNCING)
    own.mark(Place.COMPUTING)
    assert beats.read()[0].syncing_s == beat.syncing_s  # a wait counts when its step has ended


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep so many processor cores busy for the block."""
    processes = [multiprocessing.get_context("fork").Process(target=spin, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def spin() -> None:
    while True:
        pass


def find_named(stderr: str) -> list[str]:
    return re.findall(r"the other ranks waited for rank (\d+ on \S+) for \d+% of the time", stderr)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=IN_SOAK)])
def test_a_rank_that_sleeps_in_its_loss_is_named(nursery: Lives, tmp_path: Path, ranks: int) -> None:
    config = write_config(tmp_path, ranks, 40, chunk_steps=120, how="slow")
    done = nursery.call("tests.support.forked:train", config, [])
    assert done.returncode == 0, done.stderr
    named = find_named(done.stderr)
    assert {*named} == {f"1 on {platform.node()}"}, done.stderr
    recorded = [each.slow_rank for each in Journal(open_store(str(tmp_path)), "r").candidates() if each.slow_rank]
    assert [(each.rank, each.where) for each in recorded] == [(1, platform.node())] * len(named)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "others"), [(2, 2), *[(2, 0), (4, 2)] * IS_SOAK])
def test_equal_ranks_are_not_named(nursery: Lives, tmp_path: Path, ranks: int, others: int) -> None:
    with busy(others):
        done = nursery.call("tests.support.forked:train", write_config(tmp_path, ranks, 40, chunk_steps=120), [])
    assert done.returncode == 0, done.stderr
    assert find_named(done.stderr) == []
