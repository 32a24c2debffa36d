"""The main loop of a rank: build the recipe, then execute one order after the other."""

import contextlib
import faulthandler
import functools
import gc
import sys
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

from holdfast import checkpoint
from holdfast.checkpoint import Metadata, NearReader, Payload
from holdfast.errors import (
    CheckpointDamaged,
    GateTripped,
    HoldfastError,
    RankDied,
    StateError,
)
from holdfast.journal import Commit
from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import Phase, RankStanding
from holdfast.provenance import opened_files as opened
from holdfast.provenance.canonical import spell_floats
from holdfast.rank.agreeing import check_same_store, check_same_training
from holdfast.rank.describing import describe_training
from holdfast.rank.events import Events
from holdfast.rank.failure import describe_failure
from holdfast.rank.holding import wait_to_proceed
from holdfast.rank.messages import (
    Begin,
    Begun,
    Damaged,
    Evaluate,
    Evaluated,
    Examine,
    Examined,
    Failed,
    Finished,
    Import,
    Imported,
    Keep,
    Observe,
    Observed,
    Proceed,
    Progress,
    Rehearse,
    Rehearsed,
    Restore,
    Restored,
    Skipped,
    Train,
    Tripped,
)
from holdfast.rank.nodes import Nodes, end_torchrun
from holdfast.rank.orders import Orders
from holdfast.rank.process import read_environment
from holdfast.rank.record import CodeRecord, read_recorded
from holdfast.rank.surviving import RankChunk, Survivor
from holdfast.store import Store, open_store
from holdfast.training import (
    StepObserver,
    Training,
    begin_from,
    begin_from_folder,
    begin_save,
    begin_save_between,
    evaluate_recipe,
    find_forgotten,
    find_shards,
    find_wanted,
    list_events,
    measure_probe,
    move_in,
    read_lines,
    read_shards,
    resume,
    run_program,
    set_skipped,
    steps,
)

# The phase of the rank's heartbeat while it executes an order. In addition, each step of a `Train` begins its own
# phase.
PHASES: dict[type, Phase] = {
    Proceed: Phase.WAITING,
    Restore: Phase.RESTORING,
    Begin: Phase.RESTORING,
    Import: Phase.RESTORING,
    Keep: Phase.SAVING,
    Evaluate: Phase.EVALUATING,
    Examine: Phase.EVALUATING,
    Train: Phase.SAVING,
    Rehearse: Phase.SAVING,
    Observe: Phase.SAVING,
}


def serve(
    training: Training, events: Events, record: CodeRecord | None, survivor: Survivor
) -> Generator[None, None, None]:
    """Report the built training, then execute orders until an order to end or stop. Yield before each training step."""
    orders = Orders(training, events.send)
    ready = describe_training(training, record)
    if training.config.compute.has_nodes:
        check_same_training(training, ready.environment)
    events.send(ready)
    try:
        yield from obey(training, orders, events, record, ready.environment, survivor)
        orders.check()
    except BaseException:
        # The save in progress may take long. First tell the other ranks that this rank trains no further, because they
        # may wait for it.
        heartbeats.stand(RankStanding.LEAVING)
        raise
    finally:
        if training.saver.between is not None:
            with contextlib.suppress(Exception):  # ignore a failure, because no commit depends on this save
                training.saver.between.wait()
        training.saver.wait()
    if orders.is_orphaned and training.config.compute.has_rendezvous and training.accelerator.is_main_process:
        end_torchrun()
    if training.config.compute.has_rendezvous and not orders.is_ended:
        # Without this error torchrun would restart the ranks of all nodes, and wait for a node that was told to end.
        events.send(Failed.of(RankDied("the ranks have stopped: a node has joined, or was told to end")))


def obey(
    training: Training,
    orders: Orders,
    events: Events,
    record: CodeRecord | None,
    ran_on: dict[str, Any],
    survivor: Survivor,
) -> Generator[None, None, None]:
    """Execute the orders in turn. Yield before each training step.

    Args:
        record: the record of code and files of a node's first rank; None in the other ranks.
        ran_on: the ``environment`` for the metadata of each checkpoint.
    """
    folder = open_store(training.config.store).inside(training.config.run).existing()
    is_checked = not training.config.compute.has_nodes
    for order in orders:
        heartbeats.begin(PHASES[type(order)])
        if isinstance(order, Restore | Begin):
            survivor.chunk = None
        if not is_checked and isinstance(order, Restore | Begin | Train):
            check_same_store(training)
            is_checked = True
        if isinstance(order, Train | Rehearse | Observe):
            set_skipped(training, order.skip)
        match order:
            case Proceed():
                pass  # nothing to do: this order only ends the wait before the recipe is built
            case Restore():
                restore_commit(training, folder, order, events)
                survivor.lived.restart(training.progress.step)
            case Begin():
                _load_ancestor(training, order, events)
            case Import():
                events.send(Imported(**vars(move_in(training, order.source, order.step, order.names))))
            case Keep():
                shared = share_environment(training, record, ran_on)
                keep = functools.partial(begin_save, training, folder, order.fingerprint, shared, origin=order.origin)
                orders.begin_save(keep, is_urgent=True)
            case Evaluate():
                report_evaluation(training, events)
            case Examine():
                report_examination(training, events)
            case Rehearse():
                if (yield from rehearse(training, order, orders, events)):
                    if order.is_kept:
                        save = Train(stop=training.progress.step, fingerprint=order.fingerprint)
                        yield from train_and_save(training, folder, save, orders, events, record, ran_on, survivor)
                    return
            case Observe():
                yield from observe(training, order, events)
            case Train():
                if (yield from train_and_save(training, folder, order, orders, events, record, ran_on, survivor)):
                    return


def train_and_save(
    training: Training,
    folder: Store,
    order: Train,
    orders: Orders,
    events: Events,
    record: CodeRecord | None,
    ran_on: dict[str, Any],
    survivor: Survivor,
) -> Generator[None, None, bool]:
    """Train until the order's last step.

    Begin a save there, and at each step at which a `Save` or a `Stop` asks for a save.

    Yield before each step, as `holdfast.training.steps` does.

    Returns:
        True if the rank has to end.
    """
    training.record.is_detailed = order.is_detailed
    into = open_store(order.into) if order.into else folder
    ran_on = share_environment(training, record, ran_on)
    save = functools.partial(begin_save, training, into, order.fingerprint, ran_on)
    began = 0.0

    def report(step: int, loss: float | None, steps_per_s: float) -> None:
        events.send(Progress(step=step, loss=loss, steps_per_s=steps_per_s))

    def is_pausing() -> bool:
        if orders.is_pausing():
            return True
        if is_due_between(training) and not order.into:
            heartbeats.begin(Phase.SAVING)
            if record is not None:
                record.complete(ran_on)
            begin_save_between(training, folder, order.fingerprint, ran_on, train_s=time.monotonic() - began)
            orders.note_wait()
        return False

    while training.progress.step < order.stop or training.record.has_new_steps:
        began = time.monotonic() - training.record.unsaved_s
        if training.can_survive and not order.into:
            survivor.chunk = RankChunk(training, folder, order.fingerprint, ran_on, began)
        yield from steps(training, order.stop, is_pausing, report)
        train_s = time.monotonic() - began
        if record is not None:
            record.complete(ran_on)  # add the modules that the steps have imported
        heartbeats.begin(Phase.SAVING)
        is_stopping = orders.is_stopping()
        if training.record.has_new_steps:
            training.record.unsaved_s = 0.0
            orders.begin_save(functools.partial(save, train_s=train_s), is_urgent=is_stopping)
            if not order.into:
                survivor.lived.note_save(training.progress.step)
        if is_stopping:
            return True
    return False


def is_due_between(training: Training) -> bool:
    """Return whether to save now, between two commits. `near.every_steps` asks for these saves, into `near.folder`."""
    every = training.config.near.every_steps if training.saver.between is not None else 0
    return bool(every) and training.progress.step % every == 0 and training.record.has_new_steps


def rehearse(training: Training, order: Rehearse, orders: Orders, events: Events) -> Generator[None, None, bool]:
    """Train until the order's last step without a save, and report the trail of these steps. Yield before each step.

    Returns:
        True if the rank was told to end meanwhile.
    """
    training.record.is_detailed, training.record.is_rehearsal = order.is_detailed, not order.is_kept
    first, began, is_stopping = training.progress.step, time.monotonic(), False
    while training.progress.step < order.stop and not is_stopping:
        yield from steps(training, order.stop, orders.is_pausing)
        is_stopping = orders.is_stopping()
    events.send(Rehearsed(lines=spell_lines(training, first), is_ending=is_stopping))
    training.record.is_detailed = training.record.is_rehearsal = False
    training.record.drop_detail()
    orders.note_wait()
    training.record.unsaved_s += time.monotonic() - began
    return is_stopping


def observe(training: Training, order: Observe, events: Events) -> Generator[None, None, None]:
    """Train until the order's step, and report the observations of that step. Yield before each step."""
    observer = StepObserver(training, order.step, order.most)
    first = training.progress.step
    with observer.watching():
        for _ in steps(training, order.step, lambda: False):
            with observer.trained(training.progress.step + 1):
                yield
    lines = spell_lines(training, first)
    heartbeats.begin(Phase.EVALUATING)
    events.send(Observed(lines=lines, **vars(observer.finish())))


def spell_lines(training: Training, after: int) -> list[dict[str, Any]]:
    """Return the trail of the steps after ``after`` that were trained since the last save, in the form for events."""
    return [spell_floats(line) for line in read_lines(training) if line["step"] > after]


def share_environment(training: Training, record: CodeRecord | None, ran_on: dict[str, Any]) -> dict[str, Any]:
    """Return the environment for a checkpoint's metadata, with the main rank's record of code and files.

    Other ranks need that record if one of them may have to save alone. All ranks call this together.
    """
    if not training.can_survive:
        return ran_on
    shared: dict[str, Any] = training.ranks.gather(ran_on if record else None)[0]
    return ran_on if record else shared


def report_evaluation(training: Training, events: Events) -> None:
    """Run the recipe's evaluation and its probe (see `Recipe`), and report the numbers of both."""
    metrics, _ = evaluate_recipe(training)
    events.send(
        Evaluated(
            metrics=metrics,
            measured=list(filter(training.recipe.is_measured, metrics)),
            anneals=training.set_anneals(),
            probe=measure_probe(training),
        )
    )


def report_examination(training: Training, events: Events) -> None:
    """Report the state that no checkpoint contains, and the step of each event, such as the end of a schedule."""
    searched = find_forgotten(training.recipe)
    events.send(
        Examined(
            unregistered=searched.found,
            looked_at=searched.looked_at,
            events=list_events(training),
            own_steps_per_epoch=training.own_steps_per_epoch,
        )
    )


def restore_commit(training: Training, folder: Store, order: Restore, events: Events) -> None:
    """Load a commit's state, check it with the gate, and report `Restored`, `Damaged` or `Tripped`."""
    near = NearReader(training.saver.near, order.commit) if training.saver.near else None
    loaded = _load_checkpoint(training, folder, order.commit, events, near)
    if loaded is None:
        return
    resumed, problem = None, None

    def watch(done: int, total: int) -> None:
        events.send(Skipped(done=done, total=total))

    try:
        payload, metadata = loaded
        resumed = resume(training, payload, metadata, order.gate, watch)
    except GateTripped as error:
        problem = Tripped.of(error)
    problems = training.ranks.gather(problem)
    if any(problems):
        events.send(_name_rank(problems))
    elif resumed is not None:
        events.send(Restored(**vars(resumed), **_describe_near(training, near)))


def _describe_near(training: Training, near: NearReader | None) -> dict[str, Any]:
    """Return the fields of `Restored` about files that were read from node-local copies. All ranks call it together."""
    if near is None:
        return {}
    found = training.ranks.gather((len(near.taken), near.problem))
    return {
        "near": sum(taken for taken, _ in found),
        "near_problem": next(filter(None, (each for _, each in found)), ""),
    }


def _name_rank(problems: list[Tripped | None]) -> Tripped:
    """Return the problem of the first rank that has a problem.

    The text names the rank, unless all ranks have problems.
    """
    rank, problem = next((rank, each) for rank, each in enumerate(problems) if each)
    return problem if all(problems) else problem.model_copy(update={"message": f"rank {rank}: {problem.message}"})


def _load_checkpoint(
    training: Training, folder: Store, commit: Commit, events: Events, near: NearReader | None = None
) -> tuple[Payload, Metadata] | None:
    """Return a commit's verified checkpoint.

    If any rank finds damage, report it and return None on all ranks.

    Args:
        near: the reader of this node's local copies, which are tried before the store; None if the run has no near
            folder.
    """
    loaded, problem = None, None
    try:
        shards = find_shards(training.recipe)
        if len({*training.ranks.gather(bool(shards))}) > 1:
            raise StateError(
                "some ranks hold sharded tensors, and others hold none, so they can't read a checkpoint together",
                hint="shard each model in all ranks in the same way: docs/layouts.md",
            )
        wanted = find_wanted(training)
        if shards or wanted is not None:
            training.saver.wait()
            payload = read_shards(training.ranks.exchange, shards, folder, commit, training.saver.buffers, near, wanted)
        else:
            payload = checkpoint.read_payload(folder, commit, training.saver.buffers, near)
        metadata = checkpoint.read_metadata(folder, commit.path)
        if metadata is None:  # the checkpoint was deleted after its payload was read
            raise CheckpointDamaged(f"{commit.path} has no metadata.json any more")
        loaded = payload, metadata
    except CheckpointDamaged as error:
        problem = Damaged.of(error)
    problems = [each for each in training.ranks.gather(problem) if each]
    if problems:
        events.send(problems[0])
        return None
    return loaded


def _load_ancestor(training: Training, order: Begin, events: Events) -> None:
    """Give the model the weights of another run's checkpoint; report `Begun` or `Damaged`."""
    init = training.config.init_from
    assert init is not None
    if order.commit is None:
        begin_from_folder(training, Path(order.store), init)
        events.send(Begun(anneal_offset=training.progress.anneal_offset))
        return
    loaded = _load_checkpoint(training, open_store(order.store).inside(order.run), order.commit, events)
    if loaded is not None:
        payload, metadata = loaded
        begin_from(training, payload, metadata, init)
        events.send(Begun(anneal_offset=training.progress.anneal_offset))


def main() -> int:
    """Run one rank to its end. Return its exit code, which is 0 if an order ended the rank."""
    events = Events()
    wait_to_proceed()
    faulthandler.enable(file=2)  # so that a crash in native code writes its stack into the log
    config, commit = read_environment()
    built: list[Training] = []
    nodes: Nodes | None = None
    survivor = Survivor()
    before, watching = {*sys.modules}, contextlib.ExitStack()
    files = watching.enter_context(opened.record_opened_files())

    def begin(training: Training) -> Generator[None, None, None]:
        watching.close()
        built.append(training)
        heartbeats.note_device(str(training.accelerator.device))
        is_first = training.accelerator.is_local_main_process
        record = CodeRecord(training, before, files, read_recorded(config, commit)) if is_first else None
        training.record.note_lines = survivor.lived.add
        gc.freeze()  # a garbage collection that includes all existing objects would stall a step by 0.2 s
        gc.enable()
        return serve(training, events, record, survivor)

    def fail(error: HoldfastError) -> int:
        events.send_error(nodes.share(error) if nodes else error)
        return error.exit_code

    try:
        if config.compute.has_rendezvous:
            nodes = Nodes(config.compute, events)  # sets this rank's number, which later calls read
        heartbeats.join()
        run_program(config, begin)
        if built and built[0].progress.step >= built[0].total_steps:
            events.send(Finished())
        heartbeats.stand(RankStanding.LEAVING)
    except Exception as error:
        failed = describe_failure(built[0] if built else None, error)
        if failed is error:
            heartbeats.stand(RankStanding.REFUSED)
            traceback.print_exc()
        elif isinstance(failed, RankDied):
            # print no traceback, because it would hide the traceback of the rank that died
            print(failed, file=sys.stderr)
            survivor.save()
        else:
            traceback.print_exc()
        return fail(failed)
    finally:
        if nodes is not None:
            nodes.leave()
        events.close()
    return 0
