"""Rehearsals: new ranks start from a checkpoint, and must train the next steps exactly as the living ranks do.

The living ranks (the ranks that trained up to the checkpoint) have the program's whole state, even state that no
checkpoint contains. They train a few more steps, with a checksum of each component. New ranks restore the checkpoint,
pass the gate and train the same steps. If both trails (a line for each step) are equal, a resume from that step is
exact. Otherwise the run stops, before a wrong step can be committed.

A rehearsal starts at a commit, or from a checkpoint inside a chunk that is saved for the rehearsal alone; see
`holdfast.attempt.phases` and `holdfast.attempt.aside`.

New ranks are also compared with earlier ranks that have died or stopped; see `holdfast.attempt.earlier`.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.attempt.aside import Aside
from holdfast.attempt.difference import GO_ON, Differences, describe_difference, list_suspects
from holdfast.attempt.due import SHORT, Due
from holdfast.attempt.earlier import EarlierSteps
from holdfast.attempt.line import Line
from holdfast.attempt.observers import CheckpointVerdict
from holdfast.attempt.phases import AFTER_END, count_rehearsed, describe_steps, find_end
from holdfast.attempt.ranks import AttemptRanks, Renew
from holdfast.checkpoint.departure import find_departure
from holdfast.checkpoint.found import Found, find_unkept
from holdfast.config import ProofSettings
from holdfast.errors import (
    CheckpointDamaged,
    HoldfastError,
    Inexact,
    OutOfMemory,
    RankDied,
    RankHung,
    RecipeError,
    RecipeFailed,
    StateError,
)
from holdfast.journal import Commit, Journal
from holdfast.journal.records import RehearsalKind
from holdfast.machine import faults
from holdfast.rank.messages import Rehearsed, SavedAside

log = logging.getLogger(__name__)

# The new ranks start this many seconds before the rehearsal's start, so that they have imported torch by then.
AHEAD_S = 15.0
# New ranks beside living ranks have this many times the living ranks' own time to start and to restore, and to train
# the steps; and at least `LEAST_S` for each.
PATIENCE, LEAST_S = 4.0, 60.0


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal that the living ranks have been ordered to begin.

    Attributes:
        kind: where it starts; see `RehearsedSteps`.
        start: the step of the checkpoint from which new ranks start.
        committed: the last step of the chunk if the rehearsal goes across it, so that it is committed meanwhile;
            otherwise 0.
        stop: the last step that the living and the new ranks both train.
        is_beside: whether the living ranks wait while new ranks rehearse. The run then continues in the living ranks.
        ends_before: whether its steps begin inside an epoch and end before that epoch's end, which is in the same
            chunk. New ranks may then lack what the program has summed up in the epoch, and no compared step shows that.
        began: when the living ranks had trained the step ``start``, on the clock of `time.monotonic`.
    """

    kind: RehearsalKind
    start: int
    committed: int
    stop: int
    is_beside: bool
    ends_before: bool
    began: float

    @property
    def stops(self) -> list[int]:
        """Return the last step of each order to the ranks. A commit between two steps needs two orders."""
        return [self.committed, self.stop] if self.committed else [self.stop]

    def fits(self, head: Commit | None, aside: Aside) -> bool:
        """Return whether new ranks can start for a run with this newest commit."""
        if head is None or self.kind == "commit" or self.committed:
            return head is not None and head.step == (self.committed or self.start)
        return aside.saved is None or aside.saved.metadata.previous_checkpoint_sha256 == head.checkpoint_sha256


class Rehearsals:
    """The rehearsals of one attempt: decide when one is due, run it, and record its result.

    Attributes:
        due: decides when a rehearsal is due.
    """

    def __init__(
        self,
        journal: Journal,
        number: int,
        ranks: AttemptRanks,
        tell: Callable[[CheckpointVerdict], object] = lambda _: None,
        has_notice: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            tell: a function that is called with the verdict of each comparison.
            has_notice: returns whether this machine will be taken away, so that there is no time for a rehearsal.
        """
        self._ranks, self._tell = ranks, tell
        self._differences = Differences(journal, number, ranks.config)
        self.due = Due(ranks)
        self.earlier = EarlierSteps(journal, ranks, self._differences, self.due, tell, has_notice)
        self._has_notice = has_notice
        self._aside = Aside(journal.store, number)
        # the kind and the step of the start for which the living ranks have an order to save aside, and their chunk's
        # last step
        self._planned: tuple[RehearsalKind, int, int] | None = None
        self._tried = 0  # the last step of the last chunk for which a start was planned
        self._pending: Rehearsal | None = None
        self._lived: list[Rehearsed] = []  # the steps that the living ranks have trained for the rehearsal
        self._lived_at = 0.0  # when the living ranks had trained these steps, on the clock of `time.monotonic`
        self._is_alone = False  # whether the program can't run twice at once
        # the trail of living ranks that a rehearsal has ended, while new ranks train the same steps
        self.left: list[dict[str, Any]] = []

    @property
    def _settings(self) -> ProofSettings:
        return self._ranks.config.proof

    @property
    def is_at_commit(self) -> bool:
        """Return whether the living ranks have begun a rehearsal that starts at the commit which they are saving."""
        return self._pending is not None and self._pending.kind == "commit"

    @property
    def is_begun(self) -> bool:
        """Return whether the living ranks have all orders of a rehearsal, so that `finish` can be called."""
        return self._pending is not None and not self._is_owed

    @property
    def _is_owed(self) -> bool:
        """Return whether the steps after a commit inside the rehearsal aren't ordered yet."""
        return self._pending is not None and bool(self._pending.committed) and self._planned is not None

    # ---- when a rehearsal is due

    def may_follow(self, line: Line, stops: tuple[int, int, int], next_s: float) -> bool:
        """Return whether a rehearsal may begin inside the chunk in progress, or at its end.

        Args:
            stops: the last steps of this chunk, of the next chunk and of the run.
            next_s: the seconds that this chunk takes.
        """
        if self._planned is not None or self._pending is not None:
            return True
        kind, step = self.due.choose(line, *stops, next_s, self._may_wait)
        return bool(step) and (kind == "commit" or not self.due.steps_per_s)

    def plan(self, line: Line, start: int, stop: int, total: int, trained_s: float) -> tuple[int, str]:
        """Choose where a rehearsal starts inside the chunk ``(start, stop]``, if one is due.

        Args:
            total: the run's last step.
            trained_s: the seconds that the chunk before took.

        Returns:
            the step after which the ranks save for the rehearsal, and the folder of this save; (0, "") for none.
        """
        is_unknown = not self.due.steps_per_s and self._settings.rehearse is None
        if self._planned or self._tried >= stop or not start or is_unknown:
            return 0, ""
        if self.due.is_short(total - start):
            line.note_unrehearsed(SHORT)
            return 0, ""
        kind, step = self.due.choose(line, start, stop, total, trained_s, self._may_wait)
        if kind == "commit" or not step or not self.due.has_same_code(line):
            return 0, ""
        self._tried, self._planned = stop, (kind, step, stop)
        return step, self._aside.begin()

    def is_start(self, step: int) -> bool:
        """Return whether the ranks save at this step for a rehearsal, and wait for an order."""
        return self._pending is None and self._planned is not None and step == self._planned[1]

    def start_ahead(self, step: int, stops: tuple[int, int], steps_per_s: float) -> None:
        """Start the new ranks, which import torch and wait, if the living ranks will soon begin a rehearsal.

        Args:
            step: the step that was trained last.
            stops: the last step of the chunk, and the last step of the run.
        """
        stop = self._planned[1] if self._planned else stops[0]
        self.due.steps_per_s = steps_per_s or self.due.steps_per_s
        if stop - step < AHEAD_S * steps_per_s and not self.due.is_short(stops[1] - stop):
            self._ranks.start_ahead()

    def begin_inside(self, total: int, steps_per_s: float, *, is_stopping: bool) -> bool:
        """Order the living ranks to begin the rehearsal for which they save.

        Return False if there is no time for it; see also `_order`.

        Args:
            total: the run's last step.
            steps_per_s: the speed of the ranks; 0 if it is unknown.
        """
        assert self._planned is not None
        kind, start, chunk_end = self._planned
        self.due.steps_per_s = steps_per_s or self.due.steps_per_s
        if is_stopping or self.due.is_short(total - start):
            self._planned = None
            return False
        count = count_rehearsed(self._ranks.restart_s, self.due.steps_per_s)
        end = find_end(start, chunk_end, self._ranks.built.steps_per_epoch) if kind == "across" else 0
        stop = min(max(start + count, end + AFTER_END), total - 1)
        if end != chunk_end:
            stop, end = min(stop, chunk_end), 0
        is_ordered = self._order(kind, start, end, stop, chunk_end)
        if not end or not is_ordered:
            self._planned = None
        return is_ordered

    def begin(self, line: Line, step: int, stops: tuple[int, int], trained_s: float, steps_per_s: float) -> bool:
        """Order the living ranks to begin a rehearsal at the end of a chunk, if one is due. Return whether it is due.

        Args:
            step: the last step of the chunk.
            stops: the last step of the next chunk, and the last step of the run.
            trained_s: the seconds that the chunk's steps took.
            steps_per_s: the speed of the ranks; 0 if it is unknown.
        """
        self.due.steps_per_s = steps_per_s or self.due.steps_per_s
        if self._pending is not None:
            return self._order_rest(stops[0])
        # Don't rehearse the run's last step: after that step a user's loop would end, and the code after the loop would
        # run.
        stop = min(step + count_rehearsed(self._ranks.restart_s, self.due.steps_per_s), stops[0], stops[1] - 1)
        kind, start = self.due.choose(line, step, *stops, trained_s, self._may_wait)
        if self.due.is_short(stops[1] - step):
            line.note_unrehearsed(SHORT)
        elif start and kind != "commit":
            return False  # `plan` orders the ranks to save for it, and they may be started ahead already
        elif start and stop > step and self.due.has_same_code(line):
            self._tried = stops[0]
            if self._order("commit", step, 0, stop, stops[0]):
                return True
        self._ranks.ahead.end()
        return False

    def _may_wait(self) -> bool:
        return self._settings.beside and not self._is_alone and self._ranks.has_room()

    def _order(self, kind: RehearsalKind, start: int, committed: int, stop: int, chunk_end: int) -> bool:
        """Order the living ranks to train a rehearsal's steps, up to a commit inside it.

        Return False, and order nothing, if the living ranks can't wait any more and new ranks may not continue the run.
        """
        per_epoch = self._ranks.built.steps_per_epoch
        begins_anew = kind == "commit" and start % per_epoch == 0
        ends_before = not begins_anew and stop < find_end(start, chunk_end, per_epoch)
        is_beside = self._may_wait()
        if ends_before and not is_beside:
            return False
        self._ranks.start_ahead()
        self._pending, self._lived = (
            Rehearsal(kind, start, committed, stop, is_beside, ends_before, time.monotonic()),
            [],
        )
        self._order_living(self._pending.stops[0])
        if committed:
            self._ranks.own.train(committed, self._ranks.present.fingerprint)
        return True

    def _order_rest(self, chunk_end: int) -> bool:
        """Order the living ranks to train the rehearsal's steps after the commit inside it."""
        assert self._pending is not None
        self._planned, self._tried = None, chunk_end  # the rehearsal trains steps of this chunk
        self._pending = replace(self._pending, stop=min(self._pending.stop, chunk_end))
        self._order_living(self._pending.stop)
        return True

    def _order_living(self, stop: int) -> None:
        assert self._pending is not None
        is_repeated = not self._pending.is_beside and stop != self._pending.committed
        self._ranks.own.rehearse(stop, self._ranks.present.fingerprint, is_kept=True, is_repeated=is_repeated)

    def note(self, event: Rehearsed | SavedAside) -> None:
        """Keep a report of the living ranks about the rehearsal, for `finish`."""
        if isinstance(event, SavedAside):
            self._aside.note(event.saved)
        else:
            self._lived.append(event)
            self._lived_at = time.monotonic()

    def is_inside(self, chunk_end: int) -> bool:
        """Return whether a rehearsal has begun that starts and ends in the chunk up to a step."""
        pending = self._pending
        return pending is not None and not pending.committed and pending.start < chunk_end

    def is_lived(self, chunk_end: int) -> bool:
        """Return whether the living ranks have trained and saved for a rehearsal inside the chunk up to a step."""
        is_done = bool(self._lived) and (self._aside.is_known or self._lived[-1].is_ending)
        return is_done and self.is_inside(chunk_end)

    def forget(self) -> None:
        """Abandon the rehearsal that has begun, because its ranks have ended or must stop."""
        if self._pending is not None:
            self._pending, self._planned, self._lived = None, None, []
            if self._aside.is_known:  # if the ranks are still writing the checkpoint, it stays
                self._aside.clear()

    def reset(self) -> None:
        """Abandon the rehearsal, and the order to save for one, because the ranks have ended.

        If the rehearsal hadn't begun, new ranks of this chunk may begin it.
        """
        if self._planned is not None and self._pending is None:
            self._tried = 0
        self._pending, self._planned, self._lived, self.left = None, None, [], []
        self._aside.clear()
        self.earlier.forget()

    # ---- the comparison

    def finish(self, line: Line, renew: Renew) -> None:
        """Finish a rehearsal that the living ranks have begun: train its steps in new ranks, and compare the trails.

        Afterwards one of the two sets of ranks continues the run. Do nothing if no rehearsal has begun.

        Raises:
            Inexact: the trails differ.
            HoldfastError: the ranks ended, or can't be started.
        """
        rehearsal, self._pending = self._pending, None
        try:
            if rehearsal is not None and self._ranks.running is not None and self._await_lived(line, rehearsal):
                faults.reach("rehearsal-lived")
                self._compare(line, rehearsal, renew)
        finally:
            self._aside.clear()

    def _await_lived(self, line: Line, rehearsal: Rehearsal) -> bool:
        """Wait until the living ranks have trained and saved for the rehearsal. Return whether new ranks can start."""
        while len(self._lived) < len(rehearsal.stops) or not (self._aside.is_known or rehearsal.kind == "commit"):
            if self._lived and self._lived[-1].is_ending:
                break
            try:
                self._ranks.own.gives_up = self._has_notice
                self.note(self._ranks.own.expect(Rehearsed, SavedAside))
            except RankDied as error:
                if not error.data.get("is_given_up"):
                    raise
                return False
            finally:
                self._ranks.own.gives_up = lambda: False
        if self._lived[-1].is_ending or not rehearsal.fits(line.head, self._aside):
            return False  # if the living ranks were told to end, they save now
        if rehearsal.kind != "commit" and self._aside.saved is None:
            log.warning("not rehearsed: the ranks couldn't save step %d for the rehearsal", rehearsal.start)
            self.due.lost += 1
            return False
        return True

    def _compare(self, line: Line, rehearsal: Rehearsal, renew: Renew) -> None:
        """Train the rehearsal's steps in new ranks, and compare the trails; see `finish`."""
        lived = [each for part in self._lived for each in part.lines]
        known, head = self._ranks.own.examine(), line.head
        again = self._rehearse_beside(line, rehearsal, renew) if rehearsal.is_beside else None
        if again is None:
            if self._ranks.running is not None and rehearsal.is_beside:
                return
            self.left = lived
            again = self._rehearse_alone(line, rehearsal, renew)
        self.left = []
        if line.head != head:
            _tell_elsewhere(rehearsal.start, line.head.step if line.head else 0)
            self._ranks.end_aside()
            return
        faults.reach("rehearsal-trained")
        difference = find_departure(lived[: len(again or [])], again or [], self._ranks.tolerance or 0.0)
        if difference is None and len(again or []) < len(lived):
            log.info("not rehearsed: the new ranks were told to end")
            self._ranks.put_back()
            return
        if difference is None:
            self._warn_of_unkept(line, known.unregistered)
            self._note_equal(line, rehearsal)
            return
        assert line.head is not None
        self._tell(CheckpointVerdict("rehearsal", "refused", line.head.number, time.monotonic() - rehearsal.began))
        suspects = list_suspects(known.unregistered, self._ranks.own.examine().unregistered)
        if self._settings.rehearse == "record":
            self._ranks.put_back()
        found = f"would not continue exactly: {describe_difference(difference)}"
        self._differences.report(line, lived, found, suspects or self._ranks.built.hints)

    def _warn_of_unkept(self, line: Line, lived: Sequence[Found]) -> None:
        """Warn once of each attribute that differs between the living and the new ranks, though their steps are equal.

        Later commits name it, so that no view says that the run continues exactly.

        Args:
            lived: the values that the living ranks had after these steps and that no checkpoint contains.
        """
        with contextlib.suppress(HoldfastError):  # new ranks that die now have trained all steps
            unkept = find_unkept(lived, self._ranks.own.examine().unregistered)
            line.note_unkept(found.name for found in unkept)
            self._ranks.warn([found.warning for found in unkept])

    def _note_equal(self, line: Line, rehearsal: Rehearsal) -> None:
        """Record that the rehearsal was equal. If the living ranks were set aside, continue the run in them."""
        assert line.head is not None
        self._ranks.put_back()
        # Living ranks that continue the run lose nothing by their own steps.
        cost_s = time.monotonic() - (self._lived_at if rehearsal.is_beside else rehearsal.began)
        self.due.cost_s, self.due.is_changed = cost_s, False
        first, last, number = rehearsal.start + 1, rehearsal.stop, line.head.number
        steps = describe_steps(rehearsal.kind, rehearsal.start, last, line.steps_per_epoch)
        line.note_rehearsal(steps, cost_s)
        self._tell(CheckpointVerdict("rehearsal", "passed", number, cost_s))
        faults.reach("rehearsal-noted")
        told = f"steps {first}-{last}" if first < last else f"step {first}"
        start = f"commit {number}" if rehearsal.kind == "commit" else f"step {rehearsal.start}"
        across = ", across an epoch's end," if steps.has_end else ""
        log.info("rehearsed: new ranks trained %s from %s%s exactly as the running ranks did", told, start, across)

    def _rehearse_beside(self, line: Line, rehearsal: Rehearsal, renew: Renew) -> list[dict[str, Any]] | None:
        """Train the rehearsal's steps in new ranks while the living ranks wait. Return these steps.

        Return None if the new ranks were lost or failed.
        """
        head = line.head
        within_s = max(LEAST_S, PATIENCE * (self._ranks.restart_s + (head.save_s if head else 0.0)))
        self._ranks.set_aside(within_s, self._has_notice)
        try:
            return self._train(line, rehearsal, renew, is_kept=False)
        except (OutOfMemory, RankDied, CheckpointDamaged) as error:
            if isinstance(error, RankHung) or error.data.get("is_silent"):
                self._give_up_beside(rehearsal, error)
                return None
            log.warning("not rehearsed: %s", error)
            self.due.lost += not error.data.get("is_given_up")
            self._ranks.put_back()
        except (StateError, RecipeFailed, RecipeError) as error:
            self._give_up_beside(rehearsal, error)
        return None

    def _give_up_beside(self, rehearsal: Rehearsal, error: HoldfastError) -> None:
        """End new ranks that failed or didn't answer in time. From now on rehearsals end the living ranks first.

        The program may open a port or take a lock, so that it can't run twice at once. If new ranks may not continue
        the run from this rehearsal's first step, continue it in the living ranks. The next rehearsal then starts at a
        step from which new ranks may continue.
        """
        self._is_alone = True
        which = "rehearsing later, " if rehearsal.ends_before else "rehearsing "
        log.warning(
            "new ranks beside the running ranks failed (%s); %safter the running ranks have ended", error, which
        )
        if rehearsal.ends_before:
            self._ranks.put_back()
        else:
            self._ranks.end()

    def _rehearse_alone(self, line: Line, rehearsal: Rehearsal, renew: Renew) -> list[dict[str, Any]] | None:
        """End the living ranks, and then train the rehearsal's steps in new ranks. Return these steps.

        Raises:
            Inexact: the new ranks can't restore the checkpoint, or fail in a step that the living ranks have trained.
        """
        self._ranks.end_running()
        try:
            return self._train(line, rehearsal, renew, is_kept=True)
        except CheckpointDamaged as error:
            log.warning("not rehearsed: %s", error)
            self._ranks.end_running()
            return None
        except (StateError, RecipeFailed) as error:
            number = line.head.number if line.head else 0
            self._tell(CheckpointVerdict("rehearsal", "refused", number, time.monotonic() - rehearsal.began))
            raise Inexact(
                f"the run could not be resumed from its checkpoint: {error}", hint=error.hint or GO_ON
            ) from error

    def _train(self, line: Line, rehearsal: Rehearsal, renew: Renew, *, is_kept: bool) -> list[dict[str, Any]]:
        head = line.head
        self._ranks.is_quiet = True
        try:
            renew(None if rehearsal.kind == "commit" or head is None else self._aside.describe(head))
        finally:
            self._ranks.is_quiet = False
        if head is None or line.head != head:
            return []
        faults.reach("rehearsal-restored")
        lived_s = self._lived_at - rehearsal.began
        self._ranks.own.answer_within(max(LEAST_S, PATIENCE * lived_s) if not is_kept else None)
        lines: list[dict[str, Any]] = []
        for stop in rehearsal.stops:
            # Steps up to a commit inside the rehearsal belong to this commit: the next save contains the steps after.
            committed = head.checkpoint_sha256 if stop == rehearsal.committed else ""
            saves = is_kept and not committed
            self._ranks.own.rehearse(
                stop, self._ranks.present.fingerprint, is_kept=saves, is_repeated=not saves, committed=committed
            )
            done = self._ranks.own.await_rehearsed()
            lines += done.lines
            if done.is_ending:
                break
        return lines

    def sweep(self) -> None:
        """Delete the checkpoints that dead attempts have saved for rehearsals."""
        self._aside.sweep()


def _tell_elsewhere(start: int, step: int) -> None:
    """Log that no rehearsal was made, because the new ranks restored a different step than the rehearsal's start."""
    if step < start:
        log.warning("not rehearsed: the checkpoint of step %d is damaged", start)
    else:
        log.info("not rehearsed: the earlier ranks had saved step %d, so new ranks continue from there", step)
