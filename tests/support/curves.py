"""Curves of the run ``toy``: written to a sink, and read from it as its users read them."""

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

from holdfast.extensions.sinks.classes import make_sink
from holdfast.looking.sinks import Facts, Point
from holdfast.store import open_store
from tests.support.makers import make_commit, make_line

# The steps and values of each name, in the order in which they were drawn.
Curves = dict[str, list[tuple[int, float]]]


def read_tensorboard(folder: Path) -> Curves:
    """Read event files with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / "toy"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_trackio(folder: Path) -> Curves:
    """Read the project's database."""
    (database,) = (folder / "trackio").glob("holdfast.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
        assert connection.execute("SELECT COUNT(DISTINCT run_id) FROM metrics").fetchone() == (1,)
    connection.close()
    return _turn((step, json.loads(metrics)) for step, metrics in rows)


def read_wandb(*folders: Path) -> Curves:
    """Read all files of the offline mode with W&B's own reader, in order of time, as `wandb sync` takes them."""
    rows, ids = [], set()
    for path in [path for folder in folders for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        rows += [record["history"]["item"] for record in records if record["type"] == "history"]
        ids |= {record["run"]["run_id"] for record in records if record["type"] == "run"}
    assert len(ids) == 1
    return _turn((row["_step"], {name: row[name] for name in row if not name.startswith("_")}) for row in rows)


def read_mlflow(url: str, run_id: str) -> Curves:
    """Read the run with this id of Holdfast's from the tracking server."""
    run, curves = find_run(url, run_id), {}
    for name in [each["key"] for each in run["data"]["metrics"]]:
        query = f"metrics/get-history?run_id={run['info']['run_id']}&metric_key={name}"
        found = ask(url, query)["metrics"]
        curves[name] = sorted((int(each["step"]), float(each["value"])) for each in found)
    return curves


def find_run(url: str, run_id: str) -> dict[str, Any]:
    """Return the only run on MLflow's server with this id of Holdfast's."""
    experiment = ask(url, "experiments/get-by-name?experiment_name=holdfast")["experiment"]["experiment_id"]
    query = {"experiment_ids": [experiment], "filter": f"tags.`holdfast.run` = '{run_id}'"}
    (run,) = ask(url, "runs/search", query)["runs"]
    return dict(run)


def ask(url: str, path: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask MLflow's server."""
    data = json.dumps(fields).encode() if fields else None
    request = urllib.request.Request(f"{url}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def make_curve(last_step: int) -> list[tuple[int, float]]:
    """Return the curve that `write_here` writes; the second value is no number."""
    return [(step, math.nan if step == 2 else 1 / step) for step in range(1, last_step + 1)]


def write_here(name: str, folder: Path, last_step: int, forgets: bool, dies: bool) -> None:
    """Write the steps up to one to a sink of the run ``toy``.

    Args:
        forgets: the sink takes itself for empty, as after a write whose answer was lost.
        dies: kill this process before the sink is closed.
    """
    store = open_store(str(folder))
    journal = make_line(store, "toy").journal
    sink = make_sink(name, Facts(journal, "the-id", "holdfast", {"lr": 0.1}, folder, journal.attempts()))
    sink.open()
    sink.step *= not forgets
    commit = make_commit(1, step=last_step)
    note = "attempt 1 begins the run"
    points = [
        Point(step, 1e9 + step, {"train/loss": value}, note * (step == 1)) for step, value in make_curve(last_step)
    ]
    sink.write(commit, [point for point in points if point.step > sink.step])
    sink.step = last_step
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    sink.close(True)


def _turn(rows: Any) -> Curves:
    curves: Curves = defaultdict(list)
    for step, values in rows:
        for name, value in values.items():
            curves[name].append((step, float(value)))
    return dict(curves)
