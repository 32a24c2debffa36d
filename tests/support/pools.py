"""A real Prefect server with real workers on two work pools, as ``make up`` makes them, and machines that vanish."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from deployments import local
from deployments.automations import make_automations
from deployments.pools import Kind
from deployments.setup import set_up
from holdfast.journal import Journal
from holdfast.ledger.standing import Standing, read_standing
from holdfast.store import open_store
from tasks.server import choose_port
from tests.conftest import count_shadows, count_trained, kill_tree
from tests.support.forging import plant_shadows
from tests.support.lives import is_rank
from tests.support.waiting import WITHIN_S

ENDS_WITHIN_S = 600.0  # thirty times what it takes on a machine that does nothing else
# Use no proxy, and load no certificates, which takes a client 20 ms each time.
ON_THIS_MACHINE: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": 60}
TRIES_OF_A_REQUEST = 20
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def request(method: str, url: str, auth: tuple[str, str] | None = None, body: Any = None) -> httpx.Response:
    """Send a request to Prefect's server; repeat it, as Prefect's own clients do, while the database is locked."""
    for _ in range(TRIES_OF_A_REQUEST):
        answer = httpx.request(method, url, json=body, auth=auth, **ON_THIS_MACHINE)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        time.sleep(0.5)
    return answer


@dataclass
class Pool:
    """A server with its work pools and workers.

    Attributes:
        environment: variables of the workers, and so of their training processes.
        kind: what a flow run is.
        values: defaults of variables of the job template.
    """

    ledger: local.ProcessLedger
    environment: dict[str, str]
    kind: Kind = "process"
    values: dict[str, Any] = field(default_factory=dict)
    url: str = ""

    @property
    def auth(self) -> tuple[str, str]:
        """The server's user and password."""
        user, _, password = local.own_auth(self.ledger).partition(":")
        return user, password

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request as the UI does, and return the answer."""
        answer = request(method, f"{self.url}{path}", self.auth, body)
        if answer.is_error:
            raise AssertionError(f"{method} {path}: {answer.status_code} {answer.text[:1000]}")
        return answer.json() if answer.content else None

    # ---- workers: machines that come and go

    def start_worker(self, pool: str = "gpu", **environment: str) -> None:
        local.start_worker(self.ledger, pool, self.url, self.environment | environment, self.kind)

    def worker(self, pool: str = "gpu") -> int:
        return int(self.ledger.known[f"worker-{pool}"]["pid"])

    def replace_worker(self, **environment: str) -> None:
        """Kill the machine that trains, and start another one."""
        kill_tree(self.worker())
        self.start_worker(**environment)

    def start_server(self) -> None:
        """Start the server, at its last port if it had one."""
        port = 0 if "server" in self.ledger.known else choose_port()
        self.url = local.start_server(self.ledger, "", port)

    def set_up(self) -> None:
        """Make the work pools, the automations and the deployments on the server."""
        with self.settings():
            set_up(self.kind, self.values)

    def make_up(self) -> None:
        """Do what ``make up`` does after the server has started. Live workers stay."""
        self.set_up()
        self.start_worker("stable")
        self.start_worker("gpu")

    def make_automations(self) -> None:
        with self.settings():
            make_automations()

    def settings(self) -> AbstractContextManager[object]:
        """Let this process's clients use the server while the block lasts."""
        return temporary_settings({PREFECT_API_URL: self.url, PREFECT_API_AUTH_STRING: ":".join(self.auth)})

    def delete_automations(self) -> None:
        """Delete all automations, so that the server watches no flow run."""
        for automation in self.ask("POST", "/automations/filter", {}):
            self.ask("DELETE", f"/automations/{automation['id']}")

    def kill_server(self) -> None:
        kill_tree(self.ledger.known["server"]["pid"])

    # ---- flow runs

    def start(self, deployment: str, **parameters: Any) -> str:
        """Start a flow run as the UI's button does; return its id."""
        known = self.ask("GET", f"/deployments/name/{deployment}")
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return str(self.ask("POST", f"/deployments/{known['id']}/create_flow_run", body)["id"])

    def read(self, flow_run: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/flow_runs/{flow_run}"))

    def await_end(self, flow_run: str, within_s: float = ENDS_WITHIN_S) -> dict[str, Any]:
        """Wait until a flow run has ended; return it."""
        return self._await(flow_run, lambda state: state["type"] in FINAL, "at its end", within_s)

    def await_state(self, flow_run: str, name: str, within_s: float = ENDS_WITHIN_S) -> None:
        """Wait until a flow run's state has this name."""
        self._await(flow_run, lambda state: state["name"] == name, name, within_s)

    def _await(
        self, flow_run: str, is_reached: Callable[[dict[str, Any]], bool], wanted: str, within_s: float
    ) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        while not is_reached((found := self.read(flow_run))["state"]):
            assert time.monotonic() < deadline, f"{found['name']} is still {found['state']['name']}, not {wanted}"
            time.sleep(0.5)
        return found

    def await_crash(self, flow_run: str) -> None:
        """Wait until a killed flow run is Crashed for good.

        Its worker reports the crash once more, a moment after its runner has, and would undo a retry between the two.
        After that it logs its advice.
        """
        self.await_state(flow_run, "Crashed")
        advice = "Check whether the flow run exceeded its memory"
        await_true(lambda: advice in self.logs(flow_run), "its worker has not reported it", ENDS_WITHIN_S)

    def set_state(self, flow_run: str, kind: str, name: str, **details: Any) -> None:
        body = {"state": {"type": kind, "name": name, "state_details": details}, "force": True}
        self.ask("POST", f"/flow_runs/{flow_run}/set_state", body)

    def cancel(self, flow_run: str) -> None:
        """Cancel a flow run as the UI's button does."""
        self.set_state(flow_run, "CANCELLING", "Cancelling")

    def pause(self, flow_run: str) -> None:
        """Suspend a flow run as the UI's button does, so that it leaves its worker."""
        self.set_state(flow_run, "PAUSED", "Suspended", pause_reschedule=True)

    def resume(self, flow_run: str) -> None:
        """Resume a flow run as the UI's button does."""
        self.ask("POST", f"/flow_runs/{flow_run}/resume", {})

    def retry(self, flow_run: str) -> None:
        """Retry a flow run that has ended, as the UI's button does."""
        body = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}}
        self.ask("POST", f"/flow_runs/{flow_run}/set_state", body)

    @contextlib.contextmanager
    def limited(self, deployment: str, collision_strategy: str) -> Iterator[None]:
        """Let a deployment run one flow run at a time while the block lasts."""
        path = f"/deployments/{self.ask('GET', f'/deployments/name/{deployment}')['id']}"
        options = {"collision_strategy": collision_strategy}
        self.ask("PATCH", path, {"concurrency_limit": 1, "concurrency_options": options})
        try:
            yield
        finally:
            self.ask("PATCH", path, {"concurrency_limit": None})

    def schedule(self, deployment: str, at: datetime, **parameters: Any) -> str:
        """Add an hourly schedule to a deployment; return its id."""
        known = self.ask("GET", f"/deployments/name/{deployment}")
        every_hour = {"interval": 3600, "anchor_date": at.isoformat(), "timezone": "UTC"}
        body = [{"active": True, "schedule": every_hour, "parameters": parameters}]
        return str(self.ask("POST", f"/deployments/{known['id']}/schedules", body)[0]["id"])

    def unschedule(self, deployment: str, schedule: str) -> None:
        known = self.ask("GET", f"/deployments/name/{deployment}")
        self.ask("DELETE", f"/deployments/{known['id']}/schedules/{schedule}")

    def find(self, flow: str, run: str, **filters: Any) -> list[dict[str, Any]]:
        """Return the flow runs of a flow that belong to a run, oldest first."""
        body = {
            "flows": {"name": {"any_": [flow]}},
            "flow_runs": {"tags": {"all_": [f"run:{run}"]}, **filters},
            "sort": "EXPECTED_START_TIME_ASC",
        }
        return list(self.ask("POST", "/flow_runs/filter", body))

    def artifacts(self, flow_run: str) -> list[dict[str, Any]]:
        body = {"artifacts": {"flow_run_id": {"any_": [flow_run]}}}
        return list(self.ask("POST", "/artifacts/filter", body))

    def list_running_tasks(self, flow_runs: list[dict[str, Any]]) -> list[str]:
        """Return the names of the tasks of these flow runs that the server shows as Running."""
        state = {"state": {"type": {"any_": ["RUNNING"]}}}
        body = {"flow_runs": {"id": {"any_": [each["id"] for each in flow_runs]}}, "task_runs": state}
        return [task["name"] for task in self.ask("POST", "/task_runs/filter", body)]

    def await_events(self, number: int, name: str, run: str, within_s: float = WITHIN_S) -> list[dict[str, Any]]:
        """Wait for a run's events of this name and return them. The server writes events in batches, seconds later."""
        body = {"filter": {"event": {"name": [name]}, "resource": {"id": [f"holdfast.run.{run}"]}}, "limit": 50}
        deadline = time.monotonic() + within_s
        while len(found := self.ask("POST", "/events/filter", body)["events"]) < number:
            assert time.monotonic() < deadline, f"there are {len(found)} events {name}, not {number}"
            time.sleep(0.5)
        return list(found)

    def states(self, flow_run: str) -> list[dict[str, Any]]:
        """Return all states that a flow run has had."""
        return list(self.ask("GET", f"/flow_run_states/?flow_run_id={flow_run}"))

    def has_logged(self, flow_run: str, line: str) -> bool:
        return line in self.logs(flow_run)

    def logs(self, flow_run: str) -> str:
        body = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC"}
        return "\n".join(line["message"] for line in self.ask("POST", "/logs/filter", body))


AnyPool = TypeVar("AnyPool", bound=Pool)


@dataclass
class PoolRun:
    """A run that is trained on the pool."""

    pool: Pool
    folder: Path
    name: str

    @property
    def store(self) -> str:
        return f"{self.folder}/runs"

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return the configuration that a person fills into the form."""
        known: dict[str, Any] = {
            "recipe": "tests.support.toy:toy", "run": self.name, "epochs": 3, "where": "gpu", "store": self.store,
            "chunk": {"steps": 4}, "log": {"every": 1, "folder": f"{self.folder}/logs"},
            "resume": {"training_probe": False},  # `count_trained` counts losses in training mode
            "proof": {"rehearse": "off"},  # a slow machine's runs take a minute, and would rehearse
        }  # fmt: skip
        return known | changes

    def start(self, **changes: Any) -> str:
        return self.pool.start("train/train", config=self.config(**changes))

    def hurry(self) -> None:
        """Let the toy train without its delay from now on: it has only to be alive until it was struck."""
        hurried = self.pool.ledger.folder / "hurried" / self.name
        hurried.parent.mkdir(exist_ok=True)
        hurried.touch()

    def journal(self) -> Journal:
        return Journal(open_store(self.store), self.name)

    def count_trained(self) -> float:
        """Return how many steps were trained, including lost ones that were trained again, but not a stop's shadow."""
        return count_trained(self.pool.ledger.folder, self.name) - count_shadows(self.journal())

    def standing(self) -> Standing:
        return read_standing(self.journal())

    def attempts(self) -> list[dict[str, Any]]:
        return self.pool.find("attempt", self.name)

    def await_commits(self, number: int, within_s: float = ENDS_WITHIN_S) -> None:
        await_true(lambda: self.journal().newest_number() >= number, f"there was no commit {number}", within_s)

    def await_attempt(self, number: int, within_s: float = ENDS_WITHIN_S) -> None:
        """Wait until an attempt with this number has claimed the run."""
        await_true(lambda: self.journal().attempts() >= number, f"there was no attempt {number}", within_s)

    def processes(self, attempt: int) -> tuple[psutil.Process, list[psutil.Process]]:
        """Return the process of a live attempt, and its ranks."""
        engine = psutil.Process(self.journal().read_attempt(attempt).pid)
        return engine, [child for child in engine.children(recursive=True) if is_rank(child)]

    def reasons(self) -> list[tuple[str, int]]:
        """Return the reason and the step of each attempt's ending."""
        return [(ending.reason, ending.step) for ending in self.journal().endings()]


def await_true(is_so: Callable[[], bool], otherwise: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@contextlib.contextmanager
def pool_up(folder: Path, **environment: str) -> Iterator[Pool]:
    """Run everything that ``make up`` starts while the block lasts.

    Flow runs work in a folder whose modules they must not import.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (working := folder / "working").mkdir()
    environment |= {"TOY_TRAINED": str(folder), "TOY_HURRIED": f"{folder}/hurried"}
    with served(
        Pool(local.ProcessLedger(folder), environment, values={"working_dir": str(plant_shadows(working))})
    ) as pool:
        pool.make_up()
        yield pool


@contextlib.contextmanager
def served(pool: AnyPool) -> Iterator[AnyPool]:
    """Run a pool's server while the block lasts. Afterwards kill everything that the pool has started."""
    with clean_environment():
        try:
            pool.start_server()
            yield pool
        finally:
            for process in pool.ledger.processes:
                if process.poll() is None:
                    kill_tree(process.pid)
            for process in pool.ledger.processes:
                process.wait(timeout=30)


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """Hide the servers of other fixtures while the block lasts, and let servers check schedules every 5 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.delenv("PREFECT_API_AUTH_STRING", raising=False)
        patch.delenv("PREFECT_HOME", raising=False)
        patch.setenv("PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS", "5")
        yield


def strike(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
