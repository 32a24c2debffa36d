"""Sweeps: one run for each combination of settings, started in the UI, from Python or by a schedule."""

import logging
import time
from typing import Any

import tasks.untracked  # noqa: F401

from prefect import flow, runtime
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import FlowRun
from pydantic import PositiveInt

from flows.grid import expand, find_best
from flows.train import train
from holdfast.config import KeepBest, RunConfig
from holdfast.errors import ConfigError, HoldfastError, RunStopped
from holdfast.extending import find_view
from holdfast.journal import Commit, Journal
from holdfast.journal.reading import read_all
from holdfast.ledger.standing import read_standing
from holdfast.store import open_store
from tasks import pool
from tasks.liveness import ProcessWatch
from tasks.reporting import key_of

log = logging.getLogger("holdfast.sweep")


@flow(name="sweep", flow_run_name="sweep {config.run}", retries=0, persist_result=False)
def sweep(
    config: RunConfig, grid: dict[str, list[Any]], at_once: PositiveInt = 2, pin_best: bool = False
) -> list[dict[str, Any]]:
    """Train one run for each combination of settings. If you start the sweep again, all its runs continue.

    Args:
        config: The settings that all runs share. With `where = "here"` the runs train one after the other.
        grid: The values to try, by dotted name, for example {"settings.lr": [0.1, 0.01], "seed": [1, 2]}.
        at_once: How many runs train at the same time on a work pool.
        pin_best: When all runs are complete, pin the best of all their checkpoints, by the metric of
            retention.keep_best.

    Raises:
        ConfigError: the grid is wrong, or pin_best has no metric.
        RunStopped: some runs are not complete. All other runs are.
    """
    configs = expand(config, grid)
    if pin_best and config.retention.keep_best is None:
        raise ConfigError(
            "the sweep has pin_best, but no metric that says which checkpoint is the best",
            hint="set retention.keep_best.metric, for example to avg_loss",
        )
    failed = _train_here(configs) if config.where == "here" else _train_on_pool(configs, at_once)
    rows = read_all(_make_row, configs, [grid] * len(configs))
    if pin_best and config.retention.keep_best is not None and not failed:
        mark_pinned(rows, pin_best_commit(configs, config.retention.keep_best))
    create_table_artifact(rows, f"{key_of(config.run)}-sweep", f"sweep of {config.run}")
    write_report(config, configs)
    for row in rows:
        log.info("%s", "  ".join(f"{name} {value}" for name, value in row.items()))
    if failed:
        named = "; ".join(f"{run}: {reason}" for run, reason in failed.items())
        raise RunStopped(f"{len(failed)} of {len(configs)} runs are not complete: {named}")
    return rows


def _train_here(configs: list[RunConfig]) -> dict[str, str]:
    failed = {}
    for config in configs:
        try:
            train(config)
        except HoldfastError as error:
            failed[config.run] = str(error)
    return failed


def _train_on_pool(configs: list[RunConfig], at_once: int) -> dict[str, str]:
    """Train each run in its own flow run of `train`. Return the reason for each failure, by the run's name."""
    waiting, live, failed = list(configs), list[tuple[RunConfig, FlowRun, ProcessWatch]](), dict[str, str]()
    while waiting or live:
        while waiting and len(live) < at_once:
            config = waiting.pop(0)
            live.append((config, pool.start_train(config, key=f"{runtime.flow_run.id}:{config.run}"), ProcessWatch()))
        time.sleep(pool.WATCH_EVERY_S)
        for each in list(live):
            config, flow_run, watch = each
            state = pool.refresh(flow_run, watch).state
            if state is not None and state.is_final():
                live.remove(each)
                if not state.is_completed():
                    failed[config.run] = state.message or state.name or ""
    return failed


def write_report(config: RunConfig, configs: list[RunConfig]) -> None:
    """Write ``<run>-sweep.html`` into the store: the curves, settings and results of the sweep's runs."""
    compare_runs = find_view("comparison")
    if compare_runs is None:
        return
    store = open_store(config.store)
    journals = [journal for each in configs if (journal := Journal(store, each.run)).exists()]
    try:
        page = compare_runs(journals)
        store.replace(f"{config.run}-sweep.html", page.encode())
    except HoldfastError as error:  # a missing report doesn't harm the runs
        log.warning("the report of the sweep can't be written: %s", error)
    else:
        log.info("report  %s/%s-sweep.html", store.url, config.run)


def pin_best_commit(configs: list[RunConfig], rule: KeepBest) -> tuple[str, Commit] | None:
    """Pin the best checkpoint of all runs, so that retention never deletes it. Return its run and its commit."""
    store = open_store(configs[0].store)
    found = find_best([Journal(store, each.run) for each in configs], rule)
    if found is None:
        log.warning("no checkpoint has the metric %s, so none is pinned", rule.metric)
        return None
    journal, commit = found
    journal.pin(commit.number)
    log.info(
        "best  %s  %s %.6g  commit %d is pinned", journal.run, rule.metric, commit.metrics[rule.metric], commit.number
    )
    return journal.run, commit


def mark_pinned(rows: list[dict[str, Any]], best: tuple[str, Commit] | None) -> None:
    """Add a column to the sweep's table that names the best checkpoint, which is pinned."""
    for row in rows:
        is_best = best is not None and row["run"] == best[0]
        row["pinned"] = f"commit {best[1].number}" if best and is_best else ""


def _make_row(config: RunConfig, grid: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a run's row in the sweep's table: its changed settings and its results."""
    fields = config.model_dump(mode="json")
    row: dict[str, Any] = {"run": config.run}
    for name in grid:
        value: Any = fields
        for part in name.split("."):
            value = value[part]
        row[name] = value
    journal = Journal(open_store(config.store), config.run)
    if not journal.exists():
        return row | {"step": 0}
    standing = read_standing(journal)
    numbers = {"loss": standing.avg_loss, **standing.metrics}
    shown = {name: f"{value:.4f}" for name, value in numbers.items() if value is not None}
    return row | {"step": standing.step, **shown, "content id": standing.checkpoint_sha256[:12]}
