"""The main loop of a rank: build the recipe, then execute one order after the other."""

import contextlib
import faulthandler
import functools
import gc
import pkgutil
import sys
import time
import traceback
from collections.abc import Generator
from typing import Any

from holdfast import checkpoint
from holdfast.checkpoint import Metadata, NearReader, Payload, Saved
from holdfast.errors import (
    CheckpointDamaged,
    GateTripped,
    HoldfastError,
    RankDied,
)
from holdfast.journal import Commit
from holdfast.machine import heartbeats
from holdfast.provenance import opened_files as opened
from holdfast.rank.agreeing import check_same_store, check_same_training
from holdfast.rank.describing import describe_training
from holdfast.rank.events import Events
from holdfast.rank.failure import describe_failure
from holdfast.rank.holding import wait_to_proceed
from holdfast.rank.messages import (
    Begin,
    Call,
    Called,
    Damaged,
    End,
    Evaluate,
    Evaluated,
    Examine,
    Examined,
    Failed,
    Finished,
    Keep,
    Observe,
    Proceed,
    Progress,
    Rehearse,
    Rehearsed,
    Restore,
    Restored,
    SavedAside,
    Skipped,
    Train,
    Tripped,
)
from holdfast.rank.nodes import Nodes, end_torchrun
from holdfast.rank.orders import Orders
from holdfast.rank.process import read_environment
from holdfast.rank.record import CodeRecord, read_recorded
from holdfast.rank.shadow import train_shadow
from holdfast.rank.surviving import RankChunk, Survivor
from holdfast.store import Store, open_store
from holdfast.training import (
    Training,
    begin_save,
    begin_save_aside,
    digest_form,
    examine_recipe,
    forget_committed,
    list_events,
    measure_probe,
    repeat_evaluation,
    repeat_last_step,
    resume,
    resume_weights,
    run_program,
    set_skipped,
    spell_lines,
    steps,
    take_up,
)
from holdfast.training.reading import read_state

# The phase of the rank's heartbeat while it executes an order. In addition, each step of a `Train` begins its own
# phase.
PHASES: dict[type, heartbeats.Phase] = {
    Proceed: heartbeats.Phase.WAITING,
    End: heartbeats.Phase.WAITING,
    Restore: heartbeats.Phase.RESTORING,
    Begin: heartbeats.Phase.RESTORING,
    Call: heartbeats.Phase.RESTORING,
    Keep: heartbeats.Phase.SAVING,
    Evaluate: heartbeats.Phase.EVALUATING,
    Examine: heartbeats.Phase.EVALUATING,
    Train: heartbeats.Phase.SAVING,
    Rehearse: heartbeats.Phase.SAVING,
    Observe: heartbeats.Phase.SAVING,
}


# Names, because few ranks get these orders.
LOAD_ANCESTOR = "holdfast.rank.ancestor:load_ancestor"
OBSERVE = "holdfast.rank.observing:observe"


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
        heartbeats.stand(heartbeats.RankStanding.LEAVING)
        raise
    finally:
        training.saver.wait()
    if orders.is_orphaned and training.config.compute.has_rendezvous and training.accelerator.is_main_process:
        end_torchrun()
    if training.config.compute.has_rendezvous and not orders.is_ended:
        # Without this error torchrun would restart the ranks of all nodes, and wait for a node that was told to end.
        events.send(Failed.of(RankDied("the ranks have stopped, because a node has joined or was told to end")))


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
        record: the record of code and files in a node's first rank; None in all other ranks.
        ran_on: the ``environment`` for the metadata of each checkpoint.
    """
    folder = open_store(training.config.store).inside(training.config.run).existing()
    is_checked = not training.config.compute.has_nodes
    # The last order, if its steps are to be saved when the ranks are told to stop. An `End` saves nothing.
    unsaved: Rehearse | Train | None = None
    # The last step that a commit has, or gets by the save in progress; None if the last order left no such state.
    saved_at: int | None = None
    for order in orders:
        unsaved, saved_at = None, None
        heartbeats.begin(PHASES[type(order)])
        if isinstance(order, Restore | Begin):
            survivor.chunk = None
        if not is_checked and isinstance(order, Restore | Begin | Train):
            check_same_store(training)
            is_checked = True
        if isinstance(order, Train | Rehearse | Observe):
            set_skipped(training, order.skip)
            training.record.ends.saves_first = functools.partial(saves_first, training, orders, order)
        match order:
            case Proceed():
                pass  # nothing to do: this order only ends the wait before the recipe is built
            case Restore():
                if restore_commit(training, folder, order, events):
                    restore = functools.partial(restore_again, training, folder, order, events)
                    training.record.ends.restore_weights = functools.partial(restore, are_weights=True)
                    yield from repeat_last_step(training, restore)
                lines = training.record.lines
                survivor.lived.restart(lines[0]["step"] - 1 if lines else training.progress.step)
            case Begin():
                pkgutil.resolve_name(LOAD_ANCESTOR)(training, order, events)
            case Call():
                function = pkgutil.resolve_name(order.function)
                events.send(Called(values=function(training, **order.arguments)))
            case Keep():
                shared = share_environment(training, record, ran_on)
                keep = functools.partial(begin_save, training, folder, order.fingerprint, shared, origin=order.origin)
                orders.begin_save(keep, is_urgent=True)
            case Evaluate():
                report_evaluation(training, events)
            case Examine():
                report_examination(training, events)
            case Rehearse():
                first = training.progress.step
                is_told = yield from rehearse(training, order, orders, events)
                unsaved = order if order.is_kept else None
                saved_at = first if order.is_kept else None
                if is_told:
                    break
            case Observe():
                yield from pkgutil.resolve_name(OBSERVE)(training, order, events)
            case Train():
                if (yield from train_and_save(training, folder, order, orders, events, record, ran_on, survivor)):
                    return
                unsaved = order if order.aside else None
                saved_at = None if order.aside or order.into else training.progress.step
    if unsaved is not None and training.record.has_new_steps:
        save = Train(stop=training.progress.step, fingerprint=unsaved.fingerprint)
        yield from train_and_save(training, folder, save, orders, events, record, ran_on, survivor)
    elif saved_at is not None and orders.is_stopping():
        yield from train_shadow(training, orders, events, survivor, saved_at)


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

    def report(step: int, loss: float | None, steps_per_s: float) -> None:
        events.send(Progress(step=step, loss=loss, steps_per_s=steps_per_s))

    while training.progress.step < order.stop or training.record.has_new_steps:
        began = time.monotonic() - training.record.unsaved_s
        if training.can_survive and not order.into:
            survivor.chunk = RankChunk(training, folder, order.fingerprint, ran_on, began)
        yield from steps(training, order.stop, orders.is_pausing, report)
        train_s = time.monotonic() - began
        if record is not None:
            record.complete(ran_on)  # add the modules that the steps have imported
        heartbeats.begin(heartbeats.Phase.SAVING)
        is_stopping = orders.is_stopping()
        if order.aside and training.progress.step == order.stop and not is_stopping:
            training.record.unsaved_s = train_s
            save_aside(training, folder.inside(order.aside), order, orders, events, ran_on)
            return False
        if training.record.has_new_steps:
            training.record.unsaved_s = 0.0
            orders.begin_save(functools.partial(save, train_s=train_s), is_urgent=is_stopping)
            if not order.into:
                survivor.lived.note_save(training.progress.step)
        if is_stopping:
            if not order.into:
                yield from train_shadow(training, orders, events, survivor, training.progress.step)
            return True
    return False


def saves_first(training: Training, orders: Orders, order: Train | Rehearse | Observe, end: int) -> bool:
    """Return whether the ranks save now, before a loop's code at the end of the epoch whose last step is ``end``."""
    if isinstance(order, Train) and order.saves_first and order.stop <= end:
        return True
    # If there is an evaluation, it runs before the save in any case, and it may read values that the loop's code
    # changes.
    is_evaluated = training.recipe.evaluate is not None
    return not isinstance(order, Observe) and not is_evaluated and orders.is_stopping_early()


def save_aside(
    training: Training, folder: Store, order: Train, orders: Orders, events: Events, ran_on: dict[str, Any]
) -> None:
    """Begin a save for a rehearsal, and report `SavedAside` once it is durable. If a stop is near, save nothing."""

    def report(saved: Saved | None) -> None:
        events.send(SavedAside(saved=saved))

    if any(training.ranks.gather(orders.has_deadline)):
        report(None)
    else:
        begin_save_aside(training, folder, order.fingerprint, ran_on, report, train_s=training.record.unsaved_s)
    orders.note_wait()


def rehearse(training: Training, order: Rehearse, orders: Orders, events: Events) -> Generator[None, None, bool]:
    """Train until the order's last step without a save, and report the trail of these steps. Yield before each step.

    The line of the last step also has a digest of the state's form; see `digest_form`.

    Returns:
        True if the rank was told to end meanwhile.
    """
    training.record.is_detailed, training.record.is_rehearsal = order.is_detailed, order.is_repeated
    first, began, is_stopping = training.progress.step, time.monotonic(), False
    while training.progress.step < order.stop and not is_stopping:
        yield from steps(training, order.stop, orders.is_pausing)
        is_stopping = orders.is_stopping()
    lines = spell_lines(training, first)
    if lines and order.is_detailed:
        lines[-1]["form"] = digest_form(training)
    events.send(Rehearsed(lines=lines, is_ending=is_stopping))
    training.record.is_detailed = training.record.is_rehearsal = False
    training.record.drop_detail()
    orders.note_wait()
    training.record.unsaved_s += time.monotonic() - began
    if order.committed and not is_stopping:
        forget_committed(training, order.committed)
    return is_stopping


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
    anneals, (metrics, is_pure) = training.set_anneals(), repeat_evaluation(training)
    measured = [name for name in metrics if training.recipe.is_measured(name)]
    probe = measure_probe(training)
    events.send(Evaluated(metrics=metrics, measured=measured, anneals=anneals, probe=probe, is_pure=is_pure))


def report_examination(training: Training, events: Events) -> None:
    """Report the state that no checkpoint contains, and the step of each event, such as the end of a schedule."""
    searched = examine_recipe(training.recipe)
    events.send(
        Examined(
            unregistered=searched.found,
            looked_at=searched.looked_at,
            events=list_events(training),
            own_steps_per_epoch=training.own_steps_per_epoch,
        )
    )


def restore_commit(training: Training, folder: Store, order: Restore, events: Events) -> bool:
    """Load a commit's state, check it with the gate, and report `Restored`, `Damaged` or `Tripped`.

    Returns:
        True if all ranks have restored the state.
    """
    near = NearReader(training.saver.near, order.commit) if training.saver.near and not order.aside else None
    folder = folder.inside(order.aside) if order.aside else folder
    loaded = load_checkpoint(training, folder, order.commit, events, near)
    if loaded is None:
        return False
    resumed, problem = None, None

    def watch(done: int, total: int) -> None:
        events.send(Skipped(done=done, total=total))

    try:
        payloads, metadata = [loaded[0]], loaded[1]
        loaded = None
        resumed = resume(training, payloads.pop(), metadata, order.gate, watch)  # `resume` frees the payload
        if order.aside:
            take_up(training, folder, order.commit.path, metadata)
    except GateTripped as error:
        problem = Tripped.of(error)
    problems = training.ranks.gather(problem)
    if any(problems):
        events.send(_name_rank(problems))
    elif resumed is not None:
        events.send(Restored(**vars(resumed), **_describe_near(training, near)))
        return True
    return False


def restore_again(
    training: Training, folder: Store, order: Restore, events: Events, *, are_weights: bool = False
) -> None:
    """Load a commit's state a second time, after `restore_commit` has loaded and checked it.

    Args:
        are_weights: whether to restore only weights and an optimizer's moments, because the first step has begun; see
            `resume_weights`.

    Raises:
        CheckpointDamaged: the checkpoint was damaged meanwhile.
        GateTripped: the state can't be restored exactly after a step.
    """
    folder = folder.inside(order.aside) if order.aside else folder
    loaded = load_checkpoint(training, folder, order.commit, events)
    if loaded is None:
        raise CheckpointDamaged(f"{order.commit.path} can't be read again")
    if are_weights:
        resume_weights(training, loaded[0])
    else:
        payloads, metadata = [loaded[0]], loaded[1]
        loaded = None
        resume(training, payloads.pop(), metadata, order.gate, lambda done, total: None)


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


def load_checkpoint(
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
        payload = read_state(training, folder, commit, near)
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
        heartbeats.stand(heartbeats.RankStanding.LEAVING)
    except Exception as error:
        if survivor.is_shadow:  # the save is durable, and no step of this process will be saved any more
            traceback.print_exc()
            return 0
        failed = describe_failure(built[0] if built else None, error)
        if failed is error:
            heartbeats.stand(heartbeats.RankStanding.REFUSED)
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
