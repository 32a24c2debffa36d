"""MLflow: a run on a tracking server, over the server's REST API, so that no version of MLflow has to be installed.

A tag identifies the run, so that every attempt finds it again. A second tag names the last step, and is set in the same
request as the step's metrics. The server stores equal metrics only once, so sending a batch twice changes nothing.
"""

import base64
import json
import math
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from holdfast.journal import Commit
from holdfast.looking.sinks.points import Point
from holdfast.looking.sinks.sink import Sink

RUN_TAG, STEP_TAG = "holdfast.run", "holdfast.step"
TIMEOUT_S = 30
BATCH = 1000  # the most metrics that the server takes in one request
MAX_PARAMS, MAX_PARAM_CHARS = 100, 500
_UNFIT = re.compile(r"[^\w\-. :/]")


class MLflow(Sink):
    """A run in MLflow. MLflow can't delete steps, so steps up to the last step in MLflow are not sent again."""

    hint = "set MLFLOW_TRACKING_URI to a server that answers, and MLFLOW_TRACKING_TOKEN to the token that it asks for"

    def open(self) -> None:
        experiment = self._find_experiment()
        query = {"experiment_ids": [experiment], "filter": f"tags.`{RUN_TAG}` = '{self.facts.id}'", "max_results": 1}
        found = _call("runs/search", query).get("runs", [])
        self._run = found[0] if found else self._create(experiment)
        tags = {tag["key"]: tag["value"] for tag in self._run["data"].get("tags", [])}
        self.step = int(tags.get(STEP_TAG, 0))

    @property
    def _id(self) -> str:
        return str(self._run["info"]["run_id"])

    def _find_experiment(self) -> str:
        name = self.facts.project
        try:
            found = _call(f"experiments/get-by-name?{urllib.parse.urlencode({'experiment_name': name})}")
            return str(found["experiment"]["experiment_id"])
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        return str(_call("experiments/create", {"name": name})["experiment_id"])

    def _create(self, experiment: str) -> dict[str, Any]:
        tags = [{"key": RUN_TAG, "value": self.facts.id}]
        fields = {
            "experiment_id": experiment,
            "run_name": self.facts.run,
            "tags": tags,
            "start_time": _to_ms(time.time()),
        }
        created: dict[str, Any] = _call("runs/create", fields)["run"]
        params = [
            {"key": _UNFIT.sub("_", name), "value": str(value)[:MAX_PARAM_CHARS]}
            for name, value in self.facts.settings.items()
        ]
        _call("runs/log-batch", {"run_id": created["info"]["run_id"], "params": params[:MAX_PARAMS]})
        return created

    def write(self, commit: Commit, points: Sequence[Point]) -> None:
        metrics = [
            {
                "key": _UNFIT.sub("_", name),
                "value": _spell(value),
                "timestamp": _to_ms(point.time),
                "step": point.step,
            }
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), BATCH):
            _call("runs/log-batch", {"run_id": self._id, "metrics": metrics[start : start + BATCH]})
        notes = {f"holdfast.attempt.{commit.attempt}": point.note for point in points if point.note}
        tags = [{"key": key, "value": value} for key, value in {**notes, STEP_TAG: str(commit.step)}.items()]
        _call("runs/log-batch", {"run_id": self._id, "tags": tags})

    def close(self, is_complete: bool) -> None:
        status = {"status": "FINISHED", "end_time": _to_ms(time.time())} if is_complete else {"status": "RUNNING"}
        _call("runs/update", {"run_id": self._id, **status})


def _to_ms(time_s: float) -> int:
    return round(time_s * 1000)


def _spell(value: float) -> float | str:
    """Return a number in MLflow's JSON spelling. At a bare NaN the server would ignore the whole request."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"


def _call(path: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request and return the server's answer: a POST if fields are given, else a GET.

    Raises:
        OSError: the server can't be reached, or it refuses the request.
    """
    url = f"{os.environ['MLFLOW_TRACKING_URI'].rstrip('/')}/api/2.0/mlflow/{path}"
    data = json.dumps(fields).encode() if fields is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **_authorization()})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        answer: dict[str, Any] = json.loads(response.read() or b"{}")
    return answer


def _authorization() -> dict[str, str]:
    """Return the authorization header that MLflow's own client would make from the same environment variables."""
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    name, password = (os.environ.get(f"MLFLOW_TRACKING_{part}", "") for part in ("USERNAME", "PASSWORD"))
    if not name:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}
