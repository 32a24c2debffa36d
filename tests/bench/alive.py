"""Attempts that are alive without training: ``python -m tests.bench.alive FIRST COUNT STORE``; see `fleet`.

Each run has its `train` and its attempt, as flow runs of the configured server. They run the flows, tasks, hooks,
heartbeats and watchers of this repository in threads of this process. Only three things are simulated: steps are
seconds that pass, an attempt has no ranks, and no worker starts the flow runs.

A line ``begin`` on the standard input begins a measurement. A line ``end`` ends it, and prints one line of JSON.
"""

import contextlib
import contextvars
import json
import logging
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tasks.untracked  # noqa: F401

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker
from prefect.flow_engine import run_flow
from prefect.logging.configuration import setup_logging
from prefect.settings import PREFECT_LOGGING_TO_API_MAX_LOG_SIZE, temporary_settings
from prefect.states import Pending

import flows.attempt
from flows.train import train
from holdfast.attempt import Acts, AttemptView, Chunk, Observer, Proposal
from holdfast.attempt.observers import Observers
from holdfast.checkpoint import Saved
from holdfast.config import RunConfig
from holdfast.ledger.standing import Outcome
from holdfast.machine.preemption import Notice, Source, watch
from holdfast.rank.messages import Progress
from holdfast.store import open_store
from tasks import pool
from tests.support.makers import make_line, save_next

STEP_S = 1.0
CHUNK = 60  # steps
EPOCHS = 1000
# Seconds between two requests of a worker for work, as of `python -m deployments.worker`.
WORKER_ASKS_EVERY_S = 10.0
BEGIN_EVERY_S = 0.3

SLOT: contextvars.ContextVar[int] = contextvars.ContextVar("slot", default=0)
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")


class Requests:
    """The requests of this process to the server, by kind, with their seconds."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        send, send_async = httpx.HTTPTransport.handle_request, httpx.AsyncHTTPTransport.handle_async_request

        def handle(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
            with self._noted(request):
                return send(transport, request)

        async def handle_async(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
            with self._noted(request):
                return await send_async(transport, request)

        httpx.HTTPTransport.handle_request = handle  # type: ignore[method-assign]
        httpx.AsyncHTTPTransport.handle_async_request = handle_async  # type: ignore[method-assign]

    def begin(self) -> None:
        with self._lock:
            self._taken.clear()

    def end(self) -> dict[str, list[float]]:
        with self._lock:
            return {kind: [round(each, 4) for each in taken] for kind, taken in self._taken.items()}

    @contextlib.contextmanager
    def _noted(self, request: httpx.Request) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            kind = f"{request.method} {UUID.sub('{id}', request.url.path.removeprefix('/api'))}"
            with self._lock:
                self._taken[kind].append(time.monotonic() - began)


class Simulated:
    """An attempt that trains by waiting: what `tasks.chunks` needs of a `holdfast.attempt.Attempt`."""

    def __init__(self, config: RunConfig, number: int) -> None:
        self.number = number
        self.told = threading.Event()
        self.line = make_line(open_store(config.store), config.run, epochs=EPOCHS)
        self._config, self._observers = config, Observers(())

    def open(self) -> None:
        """Do nothing: there are no ranks."""

    def observe(self, observers: Sequence[Observer]) -> None:
        self._observers = Observers(observers)

    def tell(self, what: str, step: int, *arguments: Any) -> None:
        view = AttemptView(
            config=self._config, journal=self.line.journal, number=self.number, head=self.line.head, step=step,
            total_steps=EPOCHS * CHUNK, built=None,
        )  # fmt: skip
        self._observers.tell(what, view, *arguments)

    def train_chunk(self, chunk: Chunk) -> Saved:
        """Let the chunk's steps pass, and save its checkpoint."""
        for step in range(chunk.start + 1, chunk.stop + 1):
            self.told.wait(STEP_S)
            self.tell("progressed", step, Progress(step=step, loss=1 / step, steps_per_s=1 / STEP_S))
        return save_next(self.line, chunk.stop - chunk.start)


def live(
    config: RunConfig,
    observers: Sequence[Observer] = (),
    acts: Acts | None = None,
    *,
    number: int,
    sources: Sequence[Source] = (),
    **_: Any,
) -> Outcome:
    """Take the place of `holdfast.attempt.live`: the same tasks, observers and sources of notices, without ranks."""
    acts = acts or Acts()
    attempt = Simulated(config, number)
    attempt.observe(observers)

    def tell(notice: Notice) -> None:
        logging.getLogger("holdfast.bench").warning("%s", notice)
        attempt.told.set()

    with watch(sources, tell):
        acts.open(attempt)  # type: ignore[arg-type]
        attempt.tell("opened", 0)
        step = 0
        while not attempt.told.is_set():
            chunk = Chunk(step // CHUNK + 1, step, step + CHUNK)
            saved = acts.train_chunk(attempt, chunk)  # type: ignore[arg-type]
            assert saved is not None
            commit = acts.publish(attempt.line, Proposal(saved, "chunk"))
            attempt.tell("committed", commit.step, commit)
            step = chunk.stop
    attempt.tell("ended", step)
    return Outcome(complete=False)


def own_events_worker(client_type: Any = None) -> EventsWorker:
    """Return the events worker of the current slot: in a real fleet each attempt has a process with one connection."""
    options = (("checkpoint_every", 700 + SLOT.get()),)
    return super(EventsWorker, EventsWorker).instance(client_type or PrefectEventsClient, options)


class Fleet:
    """Starts runs, each with its `train`, its attempt and a worker's requests."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._start_attempt = pool.start_attempt
        pool.start_attempt = self.start_attempt
        flows.attempt.live = live  # type: ignore[assignment]
        EventsWorker.instance = staticmethod(own_events_worker)  # type: ignore[method-assign, assignment]

    def start(self, slot: int) -> None:
        config = RunConfig(recipe="m:f", run=f"fleet-{slot:04d}", epochs=EPOCHS, where="gpu", store=self._store)
        self._thread(2 * slot, self._begin, train, lambda: pool.start_train(config, config.run))

    def start_attempt(self, *arguments: Any) -> FlowRun:
        """Start an attempt as `tasks.pool.start_attempt`, and then carry out what a worker does with it."""
        flow_run = self._start_attempt(*arguments)
        slot = SLOT.get() + 1
        self._thread(slot, self._begin, flows.attempt.attempt, lambda: flow_run)
        self._thread(slot, self._ask_for_work)
        return flow_run

    def _thread(self, slot: int, call: Any, *arguments: Any) -> None:
        def run() -> None:
            SLOT.set(slot)
            # A size of its own gives a flow run its own thread that sends logs, as its own process would.
            with temporary_settings({PREFECT_LOGGING_TO_API_MAX_LOG_SIZE: 1_000_000 - slot}):
                call(*arguments)

        threading.Thread(target=contextvars.Context().run, args=(run,), daemon=True).start()

    def _begin(self, flow: Any, start: Any) -> None:
        flow_run = start()
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Pending())
            flow_run = client.read_flow_run(flow_run.id)
        run_flow(flow, flow_run=flow_run, return_type="state")

    def _ask_for_work(self) -> None:
        with get_client(sync_client=True) as client:
            while True:
                client._client.post("/work_pools/gpu/get_scheduled_flow_runs", json={"work_queue_names": ["none"]})
                time.sleep(WORKER_ASKS_EVERY_S)


def main(first: int, count: int, store: str) -> None:
    setup_logging()
    requests, fleet = Requests(), Fleet(store)

    def start() -> None:
        for slot in range(first, first + count):
            fleet.start(slot)
            time.sleep(BEGIN_EVERY_S)

    threading.Thread(target=start, daemon=True).start()
    for line in sys.stdin:
        if line.strip() == "begin":
            requests.begin()
        elif line.strip() == "end":
            print(json.dumps(requests.end()), flush=True)
    os._exit(0)  # the flow runs are gone at once, as with their machine


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), str(Path(sys.argv[3])))
