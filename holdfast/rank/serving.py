"""Do as ordered."""

import dataclasses
import functools
import gc
import os
import sys
import time
import traceback
from typing import Any

import torch
from torch.distributed import DistError

from holdfast import checkpoint, opened, training
from holdfast.checkpoint import Metadata, Payload
from holdfast.environment import describe_environment
from holdfast.errors import CheckpointDamaged, GateTripped, HoldfastError, OutOfMemory, RankDied, RecipeFailed
from holdfast.fingerprint import to_plain
from holdfast.journal import Commit
from holdfast.location import describe_error
from holdfast.rank.events import Events
from holdfast.rank.messages import (
    Begin,
    Begun,
    Damaged,
    Evaluate,
    Evaluated,
    Examine,
    Examined,
    Found,
    Progress,
    Ready,
    Restore,
    Restored,
    Skipped,
    Train,
    Tripped,
)
from holdfast.rank.orders import Orders
from holdfast.rank.prefetch import Prefetch
from holdfast.rank.record import Record
from holdfast.recipe import default_settings
from holdfast.store import Store, open_store

# What torch says, in a RuntimeError, where the CPU's memory ends.
CPU_OUT_OF_MEMORY = "can't allocate memory"
# What gloo and NCCL say, in a RuntimeError, where another rank has died.
LOST_CONNECTION = ("gloo/transport", "by peer", "ncclRemoteError", "ncclSystemError")


def serve(run: training.Training, events: Events, prefetch: Prefetch, record: Record | None) -> None:
    """Obey orders until told to end, or to stop."""
    orders = Orders(run, events.send)
    ready = describe(run, record)
    events.send(ready)
    try:
        obey(run, orders, events, prefetch, record, ready.environment)
    finally:
        run.saver.wait()


def obey(
    run: training.Training,
    orders: Orders,
    events: Events,
    prefetch: Prefetch,
    record: Record | None,
    ran_on: dict[str, Any],
) -> None:
    """Obey one order after the other.

    Args:
        record: None in all ranks but the main one.
        ran_on: what each checkpoint has on record as its ``environment``.
    """
    folder = open_store(run.config.store).inside(run.config.run).existing()
    for order in orders:
        match order:
            case Restore():
                restore(run, folder, order, events, prefetch)
            case Begin():
                begin(run, order, events)
            case Evaluate():
                evaluate(run, events)
            case Examine():
                examine(run, events)
            case Train():
                if train(run, folder, order, orders, events, record, ran_on):
                    return


def train(
    run: training.Training,
    folder: Store,
    order: Train,
    orders: Orders,
    events: Events,
    record: Record | None,
    ran_on: dict[str, Any],
) -> bool:
    """Train until a step and begin to save, as often as the orders ask for it; return whether to end."""
    run.is_detailed = order.is_detailed
    into = open_store(order.into) if order.into else folder
    save = functools.partial(training.begin_save, run, into, order.fingerprint, ran_on)

    def report(step: int, loss: float, steps_per_s: float) -> None:
        events.send(Progress(step=step, loss=loss, steps_per_s=steps_per_s))

    while run.progress.step < order.stop:
        first, began = run.progress.step, time.monotonic()
        training.train(run, order.stop, orders.is_pausing, report)
        train_s = time.monotonic() - began
        if record is not None:
            record.complete(ran_on)  # by what the steps have imported
        is_stopping = orders.is_stopping()
        if run.progress.step > first:
            orders.begin_save(functools.partial(save, train_s=train_s), is_urgent=is_stopping)
        if is_stopping:
            return True
    return False


def evaluate(run: training.Training, events: Events) -> None:
    """Run the recipe's evaluation and measure the probe."""
    metrics = training.evaluate(run)
    events.send(
        Evaluated(
            metrics=metrics,
            measured=list(filter(run.recipe.is_measured, metrics)),
            anneals=run.set_anneals(),
            probe=training.measure(run),
        )
    )


def examine(run: training.Training, events: Events) -> None:
    """Report unregistered state, and what happens at which step."""
    found = training.find_unregistered(run.recipe)
    events.send(
        Examined(
            unregistered=[Found(**dataclasses.asdict(each), remedy=each.remedy) for each in found],
            events=training.list_events(run),
            own_steps_per_epoch=run.own_steps_per_epoch,
        )
    )


def restore(run: training.Training, folder: Store, order: Restore, events: Events, prefetch: Prefetch) -> None:
    """Load a commit's state and pass the gate; report what came of it."""
    loaded = load(run, folder, order.commit, events, prefetch)
    if loaded is None:
        return
    resumed, problem = None, None
    try:
        payload, metadata = loaded
        resumed = training.resume(run, payload, metadata, order.gate, lambda *skipped: say(events, *skipped))
    except GateTripped as error:
        problem = Tripped.of(error)
    problems = [each for each in run.gather(problem) if each]
    if problems:
        events.send(problems[0])
    elif resumed is not None:
        events.send(Restored(**vars(resumed)))


def say(events: Events, done: int, total: int) -> None:
    """Report how far a stream is that is read again from its beginning."""
    events.send(Skipped(done=done, total=total))


def load(
    run: training.Training, folder: Store, commit: Commit, events: Events, prefetch: Prefetch | None = None
) -> tuple[Payload, Metadata] | None:
    """Return a commit's verified checkpoint; None, on all ranks, if one of them has found damage, which is reported."""
    loaded, problem = None, None
    try:
        taken = prefetch.take(commit) if prefetch else None
        payload = taken or checkpoint.read_payload(folder, commit, run.saver.buffers)
        metadata = checkpoint.read_metadata(folder, commit.path)
        assert metadata is not None
        loaded = payload, metadata
    except CheckpointDamaged as error:
        problem = Damaged.of(error)
    problems = [each for each in run.gather(problem) if each]
    if problems:
        events.send(problems[0])
        return None
    return loaded


def begin(run: training.Training, order: Begin, events: Events) -> None:
    """Give the model the weights of another run's checkpoint; report what came of it."""
    init = run.config.init_from
    assert init is not None
    loaded = load(run, open_store(order.store).inside(order.run), order.commit, events)
    if loaded is not None:
        payload, metadata = loaded
        training.begin_from(run, payload, metadata, init)
        events.send(Begun(anneal_offset=run.progress.anneal_offset))


def describe(run: training.Training, record: Record | None) -> Ready:
    """Return what an attempt has to know of what was built: for the fingerprint, the journal and the person."""
    return Ready(
        settings=run.settings,
        defaults={name: to_plain(value) for name, value in default_settings(run.config.recipe).items()},
        data=describe_data(run),
        steps_per_epoch=run.steps_per_epoch,
        samples_per_step=run.recipe.batch_size * run.recipe.grad_accum,
        sample_size=run.recipe.sample_size,
        unit=run.recipe.unit,
        model_params=training.count_params(run),
        device=str(run.accelerator.device),
        environment=(record.describe() if record else {}) | describe_environment(run.accelerator.device.type),
    )


def describe_data(run: training.Training) -> dict[str, Any]:
    """What of the data is part of the fingerprint: its content, and what decides how it is shared out."""
    if run.order is not None:
        size = {"samples": run.order.samples}
    else:
        size = {"loader_workers": run.config.compute.loader_workers}  # each reads a part of a stream
    content = {"content": dict(run.recipe.content)} if run.recipe.content else {}
    return {"sha256": run.recipe.data_sha256, **size, **content}


def main(prefetch: Prefetch | None = None) -> int:
    """Run one rank to its end; 0 if it ended as it was told to."""
    events = Events()
    prefetch = prefetch or Prefetch()
    run = None
    try:
        before = {*sys.modules}
        with opened.watch() as files:
            run = training.Training(prefetch.config)
        is_main = run.accelerator.is_main_process
        record = Record(run, before, files, prefetch.read_environment()) if is_main else None
        run.saver.buffers = prefetch.buffers
        gc.freeze()  # all that is there by now: to look through it would hold up a step by 0.2 s, now and then
        gc.enable()
        serve(run, events, prefetch, record)
    except HoldfastError as error:
        traceback.print_exc()
        events.send_error(error)
        return error.exit_code
    except Exception as error:
        failed = _failed(run, error)
        if isinstance(failed, RankDied):
            print(failed, file=sys.stderr)  # a traceback would hide that of the rank that it has lost
        else:
            traceback.print_exc()
        events.send_error(failed)
        return failed.exit_code
    return 0


def _failed(run: training.Training | None, error: Exception) -> RecipeFailed | OutOfMemory | RankDied:
    step = run.progress.step if run else 0
    has_others = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if has_others and (isinstance(error, DistError) or any(text in str(error) for text in LOST_CONNECTION)):
        return RankDied(f"rank {os.environ['RANK']} lost the connection to another in step {step}", is_effect=True)
    rank = f" of rank {os.environ['RANK']}" if has_others else ""
    where = f"step {step}{rank}: {describe_error(error)}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_OUT_OF_MEMORY in str(error):
        return OutOfMemory(f"out of memory in {where}", hint="a smaller batch_size with more grad_accum", step=step)
    return RecipeFailed(f"training failed in {where}", step=step)
