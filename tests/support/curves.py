"""What a sink shows of the run ``toy``, read as its users read it: steps and values in their order, by name."""

import json
import sqlite3
import subprocess
import sys
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

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


def read_mlflow(url: str) -> Curves:
    """Read the run from the tracking server."""
    (run,) = ask(url, "runs/search", {"experiment_ids": [experiment_of(url)]})["runs"]
    curves = {}
    for name in [each["key"] for each in run["data"]["metrics"]]:
        query = f"metrics/get-history?run_id={run['info']['run_id']}&metric_key={name}"
        found = ask(url, query)["metrics"]
        curves[name] = sorted((int(each["step"]), float(each["value"])) for each in found)
    return curves


def experiment_of(url: str) -> str:
    return str(ask(url, "experiments/get-by-name?experiment_name=holdfast")["experiment"]["experiment_id"])


def ask(url: str, path: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask MLflow's server."""
    data = json.dumps(fields).encode() if fields else None
    request = urllib.request.Request(f"{url}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _turn(rows: Any) -> Curves:
    curves: Curves = defaultdict(list)
    for step, values in rows:
        for name, value in values.items():
            curves[name].append((step, value))
    return dict(curves)
