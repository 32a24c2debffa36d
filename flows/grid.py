"""Sweeps: one configuration for each combination of settings."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.config import KeepBest, RunConfig, parse_config, set_field
from holdfast.errors import ConfigError
from holdfast.journal import Commit, Journal

LONGEST_NAME = 100


def expand(config: RunConfig, grid: Mapping[str, Sequence[Any]]) -> list[RunConfig]:
    """Return the configurations of a sweep. Each configuration has its own run, whose name contains the changed
    settings.

    Args:
        grid: the values to try, by dotted name: ``{"settings.lr": [0.1, 0.01], "seed": [1, 2]}`` gives four
            configurations.

    Raises:
        ConfigError: a name is unknown, a value is out of range, or two runs would have the same name.
    """
    if not grid or not all(grid.values()):
        raise ConfigError("a sweep needs at least one setting with at least one value", hint='{"settings.lr": [0.1]}')
    configs = []
    for values in itertools.product(*grid.values()):
        changes = dict(zip(grid, values, strict=True))
        fields = config.model_dump(mode="json")
        for name, value in changes.items():
            set_field(fields, name, value)
        fields["run"] = name_run(config.run, changes)
        configs.append(parse_config(fields, where="the sweep"))
    names = [each.run for each in configs]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"the sweep's values would train run {double} twice", hint="give each value once")
    return configs


def name_run(run: str, changes: Mapping[str, Any]) -> str:
    """Return a run's name with its changed settings, such as ``language-lr-0.001-seed-2``, cut to 100 characters."""
    parts = [f"{name.rpartition('.')[2]}-{value}" for name, value in changes.items()]
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join([run, *parts]))[:LONGEST_NAME].strip("-")


def find_best(journals: Sequence[Journal], rule: KeepBest) -> tuple[Journal, Commit] | None:
    """Return the run and the commit with the best value of the metric that ``rule`` names; None if no commit has one.

    Of equally good commits, the newest commit of the first run is returned. Pruned and quarantined commits don't count.
    """
    found = [(journal, commit) for journal in journals for commit in journal.candidates()]
    valued = [(value, pair) for pair in found if (value := pair[1].metrics.get(rule.metric)) is not None]
    valued.sort(key=lambda each: each[0], reverse=rule.mode == "max")
    return valued[0][1] if valued else None
