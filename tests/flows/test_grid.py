"""Tests of the configurations of a sweep, and of its best checkpoint."""

import math

import pytest

from flows.grid import expand, find_best
from holdfast.config import KeepBest, RunConfig
from holdfast.errors import ConfigError
from holdfast.journal import Journal, record_name
from holdfast.store.memory import MemoryStore
from tests.support.makers import make_commit

CONFIG = RunConfig(recipe="m:f", run="toy", settings={"lr": 1.0})


def test_a_sweep_has_one_run_for_each_combination() -> None:
    configs = expand(CONFIG, {"settings.lr": [0.1, 0.01], "seed": [1, 2]})
    assert [(each.settings["lr"], each.seed) for each in configs] == [(0.1, 1), (0.1, 2), (0.01, 1), (0.01, 2)]
    assert [each.run for each in configs] == [
        "toy-lr-0.1-seed-1", "toy-lr-0.1-seed-2", "toy-lr-0.01-seed-1", "toy-lr-0.01-seed-2",
    ]  # fmt: skip


def test_a_sweep_sets_tables_that_are_missing() -> None:
    (config,) = expand(CONFIG, {"retention.keep_best": [{"metric": "loss"}]})
    assert config.retention.keep_best is not None
    assert config.run == "toy-keep_best-metric-loss"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "needs at least one setting"),
        ({"seed": []}, "needs at least one setting"),
        ({"sede": [1]}, "unknown key sede"),
        ({"epochs": [0]}, "epochs = 0"),
        ({"seed": [1, 1]}, "toy-seed-1 twice"),
        ({"seed.x": [1]}, "seed is a single value, so it has no keys"),
    ],
)
def test_a_wrong_grid_is_refused(grid: dict[str, list[object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(CONFIG, grid)


def make_run(store: MemoryStore, name: str, values: list[float]) -> Journal:
    """Return a run with a commit for each value of the metric ``x``; a commit without a value comes first."""
    journal = Journal(store, name)
    journal.begin("m:f")
    for number, value in enumerate([None, *values], start=1):
        commit = make_commit(number, metrics={} if value is None else {"x": value})
        journal.store.create(record_name("commits", number), commit.to_bytes())
    return journal


def test_the_best_checkpoint_of_a_sweep_is_there_and_has_the_best_value() -> None:
    store = MemoryStore("sweep-best")
    runs = [make_run(store, "a", [3.0, 1.0, 5.0]), make_run(store, "b", [math.nan, 2.0, 5.0])]

    def best(mode: str) -> tuple[str, int] | None:
        found = find_best(runs, KeepBest.model_validate({"metric": "x", "mode": mode}))
        return found and (found[0].run, found[1].number)

    assert (best("min"), best("max")) == (("a", 3), ("a", 4))
    runs[0].store.create(record_name("pruned", 3), b"{}")
    runs[0].quarantine(4, "damaged", 1)
    assert (best("min"), best("max")) == (("b", 3), ("b", 4))
    assert find_best(runs, KeepBest(metric="y")) is None
