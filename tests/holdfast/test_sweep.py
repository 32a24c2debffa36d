"""Tests of the configurations of a sweep."""

import pytest

from holdfast.config import RunConfig
from holdfast.errors import ConfigError
from holdfast.sweep import expand

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
        ({"seed.x": [1]}, "seed is a value, not a table"),
    ],
)
def test_a_wrong_grid_is_refused(grid: dict[str, list[object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(CONFIG, grid)
