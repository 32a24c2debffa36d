"""What a rank does for its attempt: it executes one order after the other, until it has to end."""

import functools
import pkgutil
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from holdfast.checkpoint import Saved
from holdfast.errors import RankDied
from holdfast.machine import heartbeats
from holdfast.rank.description import describe_training
from holdfast.rank.events import Events
from holdfast.rank.messages import (
    Begin,
    Call,
    Called,
    End,
    Evaluate,
    Evaluated,
    Examine,
    Examined,
    Failed,
    Keep,
    Observe,
    Order,
    Proceed,
    Progress,
    Rehearse,
    Rehearsed,
    Restore,
    SavedAside,
    Train,
)
from holdfast.rank.orders import Orders
from holdfast.rank.record import CodeRecord
from holdfast.rank.restore import restore_again, restore_commit
from holdfast.rank.shadow import train_shadow
from holdfast.rank.survivor import RankChunk, Survivor
from holdfast.store import Store, open_store
from holdfast.training import (
    SaveRequest,
    Training,
    begin_save,
    digest_form,
    examine_recipe,
    forget_committed,
    list_events,
    measure_probe,
    repeat_evaluation,
    repeat_last_step,
    set_skipped,
    spell_lines,
    steps,
)

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

# Yields before each step that is trained, as `holdfast.training.steps` does.
Steps = Generator[None, None, None]


class RankService:
    """A rank's service: it reports the built training, and executes orders.

    Args:
        record: the record of code and files in a node's first rank; None in all other ranks.

    Attributes:
        survivor: saves this rank's state after another rank was lost.
        environment: the ``environment`` for the metadata of each checkpoint.
    """

    def __init__(self, training: Training, events: Events, record: CodeRecord | None, survivor: Survivor) -> None:
        self.training, self.events, self.survivor = training, events, survivor
        self.orders = Orders(training, events.send)
        self.environment: dict[str, Any] = {}
        self._record = record
        # The last order, if its steps are to be saved when the ranks are told to stop. An `End` saves nothing.
        self._unsaved: Rehearse | Train | None = None
        # The last step that a commit has, or gets by the save in progress; None if the last order left no such state.
        self._saved_at: int | None = None

    def serve(self) -> Steps:
        """Report the built training, then execute orders until an order to end or stop."""
        training, compute = self.training, self.training.config.compute
        ready = describe_training(training, self._record)
        self.environment = ready.environment
        if compute.has_nodes:
            from holdfast.rank.rank_checks import check_same_training  # few runs have several nodes

            check_same_training(training, ready.environment)
        self.events.send(ready)
        try:
            yield from self._obey_all()
            self.orders.check()
        except BaseException:
            # The save in progress may take long. First tell the other ranks that this rank trains no further, because
            # they may wait for it.
            heartbeats.stand(heartbeats.RankStanding.LEAVING)
            raise
        finally:
            training.saver.wait()
        if self.orders.is_orphaned and compute.has_rendezvous and training.accelerator.is_main_process:
            from holdfast.rank.nodes import end_torchrun  # few runs have several nodes

            end_torchrun()
        if compute.has_rendezvous and not self.orders.is_ended:
            # Without this error torchrun would restart the ranks of all nodes, and wait for a node that was told to
            # end.
            gone = RankDied("the ranks have stopped, because a node has joined or was told to end")
            self.events.send(Failed.of(gone))

    def _obey_all(self) -> Steps:
        folder = open_store(self.training.config.store).inside(self.training.config.run).existing()
        is_checked = not self.training.config.compute.has_nodes
        for order in self.orders:
            heartbeats.begin(PHASES[type(order)])
            if not is_checked and isinstance(order, Restore | Begin | Train):
                from holdfast.rank.rank_checks import check_same_store  # few runs have several nodes

                check_same_store(self.training)
                is_checked = True
            if (yield from self._obey(order, folder)):
                break
        if self._unsaved is not None and self.training.record.has_new_steps:
            save = Train(stop=self.training.progress.step, fingerprint=self._unsaved.fingerprint)
            yield from self._train(save, folder)
        elif self._saved_at is not None and self.orders.is_stopping():
            yield from self._train_shadow(self._saved_at)

    def _obey(self, order: Order, folder: Store) -> Generator[None, None, bool]:
        """Execute an order. Return whether the rank has to end."""
        training = self.training
        self._unsaved, self._saved_at = None, None
        if isinstance(order, Restore | Begin):
            self.survivor.chunk = None
        if isinstance(order, Train | Rehearse | Observe):
            set_skipped(training, order.skip)
            training.record.ends.saves_first = functools.partial(self._saves_first, order)
        match order:
            case Restore():
                yield from self._restore(order, folder)
            case Begin():
                pkgutil.resolve_name(LOAD_ANCESTOR)(training, order, self.events)
            case Call():
                function = pkgutil.resolve_name(order.function)
                self.events.send(Called(values=function(training, **order.arguments)))
            case Keep():
                environment = self._share_environment()
                self.orders.begin_save(SaveRequest(folder, order.fingerprint, environment, order.origin))
            case Evaluate():
                self._evaluate()
            case Examine():
                self._examine()
            case Observe():
                yield from pkgutil.resolve_name(OBSERVE)(training, order, self.events)
            case Rehearse():
                return (yield from self._rehearse(order))
            case Train():
                return (yield from self._train(order, folder))
        return False  # in particular after a `Proceed`, which only ends the wait before the recipe is built

    # ---- train and save

    def _train(self, order: Train, folder: Store) -> Generator[None, None, bool]:
        """Train until the order's last step.

        Begin a save there, and at each step at which a `Save` or a `Stop` asks for a save.

        Returns:
            True if the rank has to end.
        """
        training, record = self.training, self.training.record
        record.is_detailed = order.is_detailed
        into = open_store(order.into) if order.into else folder
        request = SaveRequest(into, order.fingerprint, self._share_environment())
        while training.progress.step < order.stop or record.has_new_steps:
            began = time.monotonic() - record.unsaved_s
            if training.can_survive and not order.into:
                self.survivor.chunk = RankChunk(training, request, began)
            yield from steps(training, order.stop, self.orders.is_pausing, self._report_progress)
            train_s = time.monotonic() - began
            if self._record is not None:
                self._record.complete(request.environment)  # add the modules that the steps have imported
            heartbeats.begin(heartbeats.Phase.SAVING)
            is_stopping = self.orders.is_stopping()
            if order.aside and training.progress.step == order.stop and not is_stopping:
                record.unsaved_s = train_s
                aside = folder.inside(order.aside)
                self._save_aside(replace(request, folder=aside, is_aside=True, train_s=train_s))
                break
            if record.has_new_steps:
                record.unsaved_s = 0.0
                self.orders.begin_save(replace(request, is_urgent=is_stopping, train_s=train_s))
                if not order.into:
                    self.survivor.lived.note_save(training.progress.step)
            if is_stopping:
                if not order.into:
                    yield from self._train_shadow(training.progress.step)
                return True
        self._unsaved = order if order.aside else None
        self._saved_at = None if order.aside or order.into else training.progress.step
        return False

    def _train_shadow(self, first: int) -> Steps:
        yield from train_shadow(self.training, self.orders, self.events, self.survivor, first)

    def _report_progress(self, step: int, loss: float | None, steps_per_s: float) -> None:
        self.events.send(Progress(step=step, loss=loss, steps_per_s=steps_per_s))

    def _share_environment(self) -> dict[str, Any]:
        """Return the environment for a checkpoint's metadata, with the main rank's record of code and files.

        Other ranks need that record if one of them may have to save alone. All ranks call this together.
        """
        if not self.training.can_survive:
            return self.environment
        shared: dict[str, Any] = self.training.ranks.gather(self.environment if self._record else None)[0]
        return self.environment if self._record else shared

    def _saves_first(self, order: Train | Rehearse | Observe, end: int) -> bool:
        """Return whether the ranks save before a loop's code at the end of the epoch whose last step is ``end``."""
        if isinstance(order, Train) and order.saves_first and order.stop <= end:
            return True
        # If there is an evaluation, it runs before the save in any case, and it may read values that the loop's code
        # changes.
        is_evaluated = self.training.recipe.evaluate is not None
        return not isinstance(order, Observe) and not is_evaluated and self.orders.is_stopping_early()

    # ---- rehearse

    def _save_aside(self, request: SaveRequest) -> None:
        """Begin a save for a rehearsal, and report `SavedAside` once it is durable. If a stop is near, save nothing."""

        def report(saved: Saved | None) -> None:
            self.events.send(SavedAside(saved=saved))

        if any(self.training.ranks.gather(self.orders.has_deadline)):
            report(None)
        else:
            begin_save(self.training, request, report)
        self.orders.note_wait()

    def _rehearse(self, order: Rehearse) -> Generator[None, None, bool]:
        """Train until the order's last step without a save, and report the trail of these steps.

        The line of the last step also has a digest of the state's form; see `digest_form`.

        Returns:
            True if the rank was told to end meanwhile.
        """
        training, record = self.training, self.training.record
        record.is_detailed, record.is_rehearsal = order.is_detailed, order.is_repeated
        first, began, is_stopping = training.progress.step, time.monotonic(), False
        while training.progress.step < order.stop and not is_stopping:
            yield from steps(training, order.stop, self.orders.is_pausing)
            is_stopping = self.orders.is_stopping()
        lines = spell_lines(training, first)
        if lines and order.is_detailed:
            lines[-1]["form"] = digest_form(training)
        self.events.send(Rehearsed(lines=lines, is_ending=is_stopping))
        record.is_detailed = record.is_rehearsal = False
        record.drop_detail()
        self.orders.note_wait()
        record.unsaved_s += time.monotonic() - began
        if order.committed and not is_stopping:
            forget_committed(training, order.committed)
        self._unsaved, self._saved_at = (order, first) if order.is_kept else (None, None)
        return is_stopping

    # ---- restore, evaluate, examine

    def _restore(self, order: Restore, folder: Store) -> Steps:
        training = self.training
        if restore_commit(training, folder, order, self.events):
            restore = functools.partial(restore_again, training, folder, order, self.events)
            training.record.ends.restore_weights = functools.partial(restore, are_weights=True)
            yield from repeat_last_step(training, restore)
        lines = training.record.lines
        self.survivor.lived.restart(lines[0]["step"] - 1 if lines else training.progress.step)

    def _evaluate(self) -> None:
        """Run the recipe's evaluation and its probe (see `Recipe`), and report the numbers of both."""
        training = self.training
        anneals, (metrics, is_pure) = training.set_anneals(), repeat_evaluation(training)
        measured = [name for name in metrics if training.recipe.is_measured(name)]
        probe = measure_probe(training)
        self.events.send(Evaluated(metrics=metrics, measured=measured, anneals=anneals, probe=probe, is_pure=is_pure))

    def _examine(self) -> None:
        """Report the state that no checkpoint contains, and the step of each event, such as the end of a schedule."""
        searched = examine_recipe(self.training.recipe)
        self.events.send(
            Examined(
                unregistered=searched.found,
                looked_at=searched.looked_at,
                events=list_events(self.training),
                own_steps_per_epoch=self.training.own_steps_per_epoch,
            )
        )
