"""A run of any kind that is killed in any step and resumed ends on the bytes of an uninterrupted run.

The uninterrupted run loads its data in its own process. Six of the killed ones have loader workers before or after
the kill, to show that workers change nothing either; with ``make soak`` all have. Each two of recipe, optimizer,
schedule and moment of the kill come together; with ``make soak`` all combinations do.
"""

import itertools
from pathlib import Path

import pytest

from holdfast.config import ChunkLength, Compute, Log, RunConfig
from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import IS_SOAK
from tests.support.lives import Lives
from tests.support.varied import EPOCHS, STEPS_PER_EPOCH

RECIPES = ("varied_language", "averaged", "pythonic")
OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("linear", "step", "cosine", "plateau")
KILLS = {
    "first step": 1,
    "mid-epoch": STEPS_PER_EPOCH + 3,
    "last of an epoch": 2 * STEPS_PER_EPOCH,
    "first of the next": 2 * STEPS_PER_EPOCH + 1,
}
CHUNK_STEPS = 4
KILLED = -9

ALL = list(itertools.product(RECIPES, OPTIMIZERS, SCHEDULES))
# Each two of recipe, optimizer and schedule come together, as in ALL.
HALF = [each for each in ALL if (RECIPES.index(each[0]) + OPTIMIZERS.index(each[1]) + SCHEDULES.index(each[2])) % 2]
# With workers: every recipe, optimizer, schedule and moment is among them.
WITH_WORKERS = [(*HALF[number * 7 % len(HALF)], list(KILLS)[number % len(KILLS)]) for number in range(6)]


def _config(
    folder: Path, run: str, recipe: str, workers: int = 0, chunk: int = CHUNK_STEPS, **settings: str
) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.varied:{recipe}", run=run, store=str(folder), epochs=EPOCHS, settings=settings,
        chunk=ChunkLength(steps=chunk), compute=Compute(loader_workers=workers), log=Log(every=1),
    )  # fmt: skip


def _content_id(config: RunConfig) -> str:
    newest = Journal(open_store(config.store), config.run).newest()
    assert newest is not None
    assert newest.step == EPOCHS * STEPS_PER_EPOCH
    return newest.checkpoint_sha256


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "optimizer", "schedule"), ALL if IS_SOAK else HALF)
def test_a_killed_and_resumed_run_ends_on_the_same_bytes(
    nursery: Lives, tmp_path: Path, recipe: str, optimizer: str, schedule: str
) -> None:
    settings = {"optimizer": optimizer, "schedule": schedule}
    straight = _config(tmp_path, "straight", recipe, chunk=EPOCHS * STEPS_PER_EPOCH, **settings)
    assert nursery.run(straight) == 0
    expected = _content_id(straight)
    for moment in _moments((recipe, optimizer, schedule)):
        step = KILLS[moment]
        for before, after in _workers((recipe, optimizer, schedule, moment)):
            killed, resumed = (
                _config(tmp_path, f"killed-{step}-{before}-{after}", recipe, each, **settings)
                for each in (before, after)
            )
            assert nursery.run(killed, kill_at=step) == KILLED, (moment, before, after)
            assert nursery.run(resumed) == 0, (moment, before, after)
            assert _content_id(resumed) == expected, (moment, before, after)


def _moments(combination: tuple[str, str, str]) -> list[str]:
    """Return the moments of a combination's kills: two of them, and with ``make soak`` all."""
    recipe, optimizer, schedule = combination
    number = RECIPES.index(recipe) + OPTIMIZERS.index(optimizer) + SCHEDULES.index(schedule)
    return [
        moment
        for place, moment in enumerate(KILLS)
        if IS_SOAK or (place + number) % 2 or (*combination, moment) in WITH_WORKERS
    ]


def _workers(combination: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the numbers of loader workers before and after the kill."""
    if IS_SOAK:
        return [(0, 0), (0, 2), (2, 0), (2, 2)]
    if combination not in WITH_WORKERS:
        return [(0, 0)]
    return [(0, 2), (2, 0)][WITH_WORKERS.index(combination) % 2 :][:1]


@pytest.mark.slow
@pytest.mark.parametrize(("keeps_position", "workers"), [(True, 0), (False, 0), (True, 2)] + [(False, 2)] * IS_SOAK)
def test_streams_with_and_without_a_position_give_the_same_bytes(
    nursery: Lives, tmp_path: Path, keeps_position: bool, workers: int
) -> None:
    """A kill doesn't change the bytes of a stream, whether it saves its position or not."""
    straight = _config(tmp_path, "straight", "streamed", workers, keeps_position=True)
    assert nursery.run(straight) == 0
    moments = (STEPS_PER_EPOCH + 3, 2 * STEPS_PER_EPOCH + 1)
    for step in moments if IS_SOAK or not workers else moments[:1]:  # workers take seconds to start
        killed = _config(tmp_path, f"killed-{step}", "streamed", workers, keeps_position=keeps_position)
        assert nursery.run(killed, kill_at=step) == KILLED
        assert nursery.run(killed) == 0
        if keeps_position:
            assert _content_id(killed) == _content_id(straight)


def test_the_matrix_is_as_large_as_it_says() -> None:
    assert len(ALL) * len(KILLS) == 96
    chosen = [(*combination, moment) for combination in ALL for moment in _moments(combination)]
    pairs = {frozenset(pair) for each in chosen for pair in itertools.combinations(each, 2)}
    assert pairs == {
        frozenset(pair) for each in itertools.product(RECIPES, OPTIMIZERS, SCHEDULES, KILLS)
        for pair in itertools.combinations(each, 2)
    }  # fmt: skip
    assert {part for combination in WITH_WORKERS for part in combination} == {*RECIPES, *OPTIMIZERS, *SCHEDULES, *KILLS}
