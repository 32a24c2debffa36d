"""One training process: ``python -m holdfast.rank``.

It is given its configuration in HOLDFAST_CONFIG, takes orders as JSON lines on its standard input and reports events as
JSON lines on its standard output; whatever the recipe prints goes to its standard error. With several ranks only the
main one is spoken to; it passes the orders on.

=========================================  ===============================================================
order                                      event
=========================================  ===============================================================
(at the start)                             ``ready``: what was built, see `describe`
``restore``: commit, gate                  ``restored``: see `Resumed`; or ``damaged``, or ``tripped``; ``skipped`` now
                                           and then while a stream is read again
``begin``: commit, store, run              ``begun``: the weights are another run's; or ``damaged``
``train``: stop, fingerprint, into         ``progress`` now and then, and ``saved`` at the end
``save``: may come at any time             ``saved`` once the step in hand is done, and training goes on
``evaluate``                               ``evaluated``: metrics, anneals, probe
``stop``: within_s; may come at any time   ``saved`` once the step in hand is done, and the rank ends; where there is
                                           time (``within_s``), in the last moment that is safe
``end``                                    the rank ends
=========================================  ===============================================================

A rank whose parent has died (the end of its standard input) or that gets SIGTERM does as if it were told to stop: it
finishes the step in hand, writes a durable checkpoint and ends. It never commits: the next attempt adopts what it left.
"""

import functools
import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list

from holdfast import checkpoint, errors, training
from holdfast.checkpoint import Metadata, Payload
from holdfast.config import RunConfig
from holdfast.environment import describe_environment
from holdfast.errors import CheckpointDamaged, GateTripped, HoldfastError, OutOfMemory, RecipeFailed
from holdfast.fingerprint import to_plain
from holdfast.journal import Commit
from holdfast.recipe import default_settings
from holdfast.sources import hash_sources
from holdfast.store import Store, open_store

CONFIG_VARIABLE = "HOLDFAST_CONFIG"
# What torch says, in a RuntimeError, where the CPU's memory ends.
CPU_OUT_OF_MEMORY = "can't allocate memory"
# The longest step and the longest save so far, times two, and a second for the commit: then a deadline is kept.
SAFETY = 2.0
MARGIN_S = 1.0

AnySaved = TypeVar("AnySaved")


class Events:
    """The reports of the main rank; those of others, and those that nobody reads any more, go nowhere."""

    def __init__(self) -> None:
        # The recipe may print whatever it likes: nothing but events gets into the pipe.
        self._pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._is_main = os.environ.get("RANK", "0") == "0"

    def send(self, event: str, **fields: Any) -> None:
        if not self._is_main:
            return
        try:
            print(json.dumps({"event": event, **fields}), file=self._pipe, flush=True)
        except BrokenPipeError:
            self._is_main = False  # the attempt has died; what is saved is found on the store


class Orders:
    """The orders for all ranks, in order. A stop, or a save, doesn't wait for its turn."""

    def __init__(self, run: training.Training) -> None:
        self._training = run
        self._several = run.accelerator.num_processes > 1
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stop_at = math.inf  # of time.monotonic()
        self._saving = threading.Event()
        self._last_pause = math.inf
        self._step_s = self._save_s = 0.0  # the longest
        self.last_save_s = 0.0
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        if run.accelerator.is_main_process:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # Unbuffered: the lock of sys.stdin, held by this thread, would abort the interpreter when the rank ends.
        with open(0, "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                order = json.loads(line)
                if order["do"] == "save":
                    self._saving.set()
                elif order["do"] != "stop":
                    self._queue.put(order)
                elif order["within_s"] is None:
                    break
                else:
                    self._stop_at = min(self._stop_at, time.monotonic() + order["within_s"])
        self._stop()

    def _stop(self) -> None:
        self._stop_at = 0.0
        self._queue.put(None)

    def is_stopping(self) -> bool:
        """Whether to stop after this step; all ranks get the same answer."""
        return self._ask_all(self._is_last_moment())

    def is_pausing(self) -> bool:
        """Whether to save after this step, be it to stop; asked after each, and all ranks get the same answer."""
        now = time.monotonic()
        self._step_s, self._last_pause = max(self._step_s, now - self._last_pause), now
        return self._ask_all(self._is_last_moment() or self._saving.is_set())

    def time_save(self, save: Callable[[], AnySaved]) -> AnySaved:
        """What a save returns; it takes so long before a deadline."""
        self._saving.clear()
        began = time.monotonic()
        saved = save()
        self.last_save_s = time.monotonic() - began
        self._save_s = max(self._save_s, self.last_save_s)
        self._last_pause = math.inf  # what follows is no step
        return saved

    def _is_last_moment(self) -> bool:
        # Before the first save nobody knows how long one takes.
        needed = SAFETY * (self._save_s + self._step_s) + MARGIN_S if self._save_s else math.inf
        return time.monotonic() >= self._stop_at - needed if math.isfinite(self._stop_at) else False

    def _ask_all(self, answer: bool) -> bool:
        return any(self._training.gather(answer)) if self._several else answer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (order := self._next()) is not None and order["do"] != "end":
            yield order

    def _next(self) -> dict[str, Any] | None:
        orders = [self._queue.get() if self._training.accelerator.is_main_process else None]
        if self._several:
            broadcast_object_list(orders)
        return orders[0]


def serve(run: training.Training, events: Events) -> None:
    """Do as ordered until told to end, or to stop."""
    folder = open_store(run.config.store).inside(run.config.run)
    orders = Orders(run)
    described = describe(run)
    ran_on = {"sources": described["sources"], **described["environment"]}
    events.send("ready", **described)
    for order in orders:
        if order["do"] == "restore":
            restore(run, folder, order, events)
        elif order["do"] == "begin":
            begin(run, order, events)
        elif order["do"] == "evaluate":
            metrics = training.evaluate(run)
            events.send(
                "evaluated", metrics=metrics, anneals=run.set_anneals(), probe=training.measure(run).model_dump()
            )
        elif order["do"] == "train":
            into = open_store(order["into"]) if order["into"] else folder
            save = functools.partial(training.save, run, into, order["fingerprint"], ran_on)
            while run.progress.step < order["stop"]:
                first = run.progress.step
                training.train(run, order["stop"], orders.is_pausing, lambda fields: events.send("progress", **fields))
                if run.progress.step > first and (saved := orders.time_save(save)) is not None:
                    events.send("saved", **saved.model_dump() | {"save_s": orders.last_save_s})
                if orders.is_stopping():
                    return


def restore(run: training.Training, folder: Store, order: dict[str, Any], events: Events) -> None:
    """The commit's state is in this process, and has passed the gate; or why not is reported."""
    loaded = load(run, folder, order, events)
    if loaded is None:
        return
    resumed, problem = None, None
    try:
        resumed = training.resume(run, *loaded, training.Gate(**order["gate"]), lambda *skipped: say(events, *skipped))
    except GateTripped as error:
        problem = errors.to_json(error)
    problems = [each for each in run.gather(problem) if each]
    if problems:
        events.send("tripped", **problems[0])
    elif resumed is not None:
        events.send("restored", **vars(resumed))


def say(events: Events, done: int, total: int) -> None:
    """A stream is being read again from its head, and has come so far."""
    events.send("skipped", done=done, total=total)


def load(
    run: training.Training, folder: Store, order: dict[str, Any], events: Events
) -> tuple[Payload, Metadata] | None:
    """A commit's verified checkpoint; None, on all ranks, if one of them has found it damaged, which is reported."""
    commit = Commit.model_validate(order["commit"])
    loaded, problem = None, None
    try:
        payload = checkpoint.read_payload(folder, commit)
        metadata = checkpoint.read_metadata(folder, commit.path)
        assert metadata is not None
        loaded = payload, metadata
    except CheckpointDamaged as error:
        problem = errors.to_json(error)
    problems = [each for each in run.gather(problem) if each]
    if problems:
        events.send("damaged", **problems[0])
        return None
    return loaded


def begin(run: training.Training, order: dict[str, Any], events: Events) -> None:
    """The model has the weights of another run's checkpoint; or how that is damaged is reported."""
    init = run.config.init_from
    assert init is not None
    loaded = load(run, open_store(order["store"]).inside(order["run"]), order, events)
    if loaded is not None:
        training.begin_from(run, *loaded, init)
        events.send("begun", anneal_offset=run.progress.anneal_offset)


def describe(run: training.Training) -> dict[str, Any]:
    """What an attempt has to know of what was built: for the fingerprint, the journal and the person."""
    return {
        "settings": run.settings,
        "defaults": {name: to_plain(value) for name, value in default_settings(run.config.recipe).items()},
        "data": describe_data(run),
        "steps_per_epoch": run.steps_per_epoch,
        "samples_per_step": run.recipe.batch_size * run.recipe.grad_accum,
        "sample_size": run.recipe.sample_size,
        "unit": run.recipe.unit,
        "model_params": training.count_params(run),
        "device": str(run.accelerator.device),
        "sources": hash_sources([run.config.recipe.partition(":")[0], *run.recipe.sources]),
        "environment": describe_environment(run.accelerator.device.type),
    }


def describe_data(run: training.Training) -> dict[str, Any]:
    """What of the data is part of the fingerprint: its content, and what decides how it is shared out."""
    if run.order is not None:
        size = {"samples": run.order.samples}
    else:
        size = {"loader_workers": run.config.compute.loader_workers}  # each reads a part of a stream
    content = {"content": dict(run.recipe.content)} if run.recipe.content else {}
    return {"sha256": run.recipe.data_sha256, **size, **content}


def main() -> int:
    """Run one rank to its end; 0 if it ended as it was told to."""
    events = Events()
    run = None
    try:
        run = training.Training(RunConfig.model_validate_json(os.environ[CONFIG_VARIABLE]))
        serve(run, events)
    except HoldfastError as error:
        traceback.print_exc()
        events.send("error", **errors.to_json(error))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        events.send("error", **errors.to_json(_failed(run, error)))
        return RecipeFailed.exit_code
    return 0


def _failed(run: training.Training | None, error: Exception) -> RecipeFailed | OutOfMemory:
    step = run.progress.step if run else 0
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"step {step}: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_OUT_OF_MEMORY in str(error):
        return OutOfMemory(f"out of memory in {where}", hint="a smaller batch_size with more grad_accum", step=step)
    return RecipeFailed(f"training failed in {where}", step=step)


if __name__ == "__main__":
    sys.exit(main())
