"""Rehearsals: new ranks start from a commit, and must train the next steps exactly as the living ranks do.

The living ranks (the ranks that trained up to the commit) have the program's whole state, even state that no checkpoint
contains. At a commit they train a few more steps, with a checksum of each component. New ranks restore the commit, pass
the gate and train the same steps. If both trails (a line for each step) are equal, a resume from that commit is exact.
Otherwise the run stops, before a wrong step can be committed.

New ranks can also be compared with ranks that have died, because their trail is on the disk; see `holdfast.rank.lived`.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.attempt.line import Line
from holdfast.attempt.observers import CheckpointVerdict
from holdfast.attempt.ranks import AttemptRanks
from holdfast.checkpoint import shorten
from holdfast.checkpoint.departure import REHEARSED_STEPS, Difference, find_departure
from holdfast.checkpoint.found import find_suspects
from holdfast.config import ProofSettings
from holdfast.config.steps import Steps
from holdfast.errors import (
    Inexact,
    OutOfMemory,
    RankDied,
    RecipeFailed,
    StateError,
    StoreError,
)
from holdfast.journal import Commit, Journal, RehearsalRecord, now
from holdfast.machine import faults
from holdfast.rank.lived import delete_lived, find_lived
from holdfast.rank.messages import Examined, Rehearsed

log = logging.getLogger(__name__)

# A run with fewer seconds left to train is not rehearsed, unless its configuration asks for rehearsals.
SHORT_S = 60.0
# The new ranks start this many seconds before the commit, so that they have imported torch when the commit is made.
AHEAD_S = 15.0
# When an attempt has lost a rehearsal's new ranks this many times, for example because memory ran out, it makes no more
# rehearsals.
MOST_LOST = 2
SHOWN_NAMES = 3
SHOWN_SUSPECTS = 4
ATTACHED = "another launcher has started the ranks, so holdfast can't start new ones to compare with"
GO_ON = "to train on anyway, with a note in every later commit: --set proof.rehearse=record"


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal that the living ranks have been ordered to begin.

    Attributes:
        start: the step of the commit from which new ranks start.
        stop: the last step that the living and the new ranks both train.
        is_beside: whether the living ranks wait while new ranks rehearse. The run then continues in the living ranks.
        began: when the living ranks had trained the commit's last step, on the clock of `time.monotonic`.
    """

    start: int
    stop: int
    is_beside: bool
    began: float


class Rehearsals:
    """The rehearsals of one attempt: decide when one is due, run it, and record its result.

    Attributes:
        is_changed: whether a new rehearsal is due, because the attempt continues with accepted changes or on a machine
            where equal bits are not promised.
    """

    def __init__(
        self,
        journal: Journal,
        number: int,
        ranks: AttemptRanks,
        tell: Callable[[CheckpointVerdict], object] = lambda _: None,
    ) -> None:
        """
        Args:
            tell: a function that is called with the verdict of each comparison.
        """
        self._journal, self._number, self._ranks, self._tell = journal, number, ranks, tell
        self._pending: Rehearsal | None = None
        self._lived: Rehearsed | None = None  # the steps that the living ranks have trained for the rehearsal
        self._cost_s, self._lost = 0.0, 0
        self._has_warned = False
        self.is_changed = False

    @property
    def _settings(self) -> ProofSettings:
        return self._ranks.config.proof

    @property
    def is_pending(self) -> bool:
        """Return whether the living ranks have been ordered to begin a rehearsal."""
        return self._pending is not None

    # ---- when a rehearsal is due

    def may_follow(self, line: Line, next_s: float) -> bool:
        """Return whether a rehearsal may be due when ``next_s`` more seconds have been trained."""
        rehearse, verdict = self._settings.rehearse, line.verdict
        reason = 'proof.rehearse = "off"' if rehearse == "off" else ""
        if self._ranks.config.compute.is_attached:
            reason = reason or ATTACHED
        if reason:
            line.note_unrehearsed(reason)
        if reason or verdict.inexact or self._lost >= MOST_LOST:
            return False
        if not verdict.rehearsed or self.is_changed:
            return True
        cost_s = self._cost_s or self._ranks.restart_s
        share = self._settings.share
        return rehearse != "first" and (share == 1 or (verdict.unrehearsed_s + next_s) * share > cost_s > 0)

    def start_ahead(self, step: int, stops: tuple[int, int], steps_per_s: float) -> None:
        """Start the new ranks, which import torch and wait, if the living ranks will soon begin a rehearsal.

        Args:
            step: the step that was trained last.
            stops: the last step of the chunk, and the last step of the run.
        """
        if stops[0] - step < AHEAD_S * steps_per_s and not self._is_short(stops[1] - stops[0], steps_per_s):
            self._ranks.start_ahead()

    def _is_short(self, steps: int, steps_per_s: float) -> bool:
        """Return whether too few steps remain for a rehearsal, unless the configuration asks for rehearsals."""
        return self._settings.rehearse is None and steps < SHORT_S * steps_per_s

    def begin(self, line: Line, step: int, stops: tuple[int, int], trained_s: float, steps_per_s: float) -> bool:
        """Order the living ranks to begin a rehearsal at the end of a chunk, if one is due. Return whether it is due.

        Args:
            step: the last step of the chunk.
            stops: the last step of the next chunk, and the last step of the run.
            trained_s: the seconds that the chunk's steps took.
            steps_per_s: the speed of the ranks; 0 if it is unknown.
        """
        # Don't rehearse the run's last step: after that step a user's loop would end, and the code after the loop would
        # run.
        stop = min(step + REHEARSED_STEPS, stops[0], stops[1] - 1)
        if self._is_short(stops[1] - step, steps_per_s):
            line.note_unrehearsed("the run would end within a minute")
        elif stop > step and self.may_follow(line, trained_s) and self._has_same_code(line):
            self._order(step, stop)
            return True
        self._ranks.ahead.end()
        return False

    def _order(self, step: int, stop: int) -> None:
        self._ranks.start_ahead()
        is_beside = self._settings.beside and self._ranks.has_room()
        self._ranks.own.rehearse(stop, self._ranks.present.fingerprint, is_kept=is_beside)
        self._pending, self._lived = Rehearsal(step, stop, is_beside, time.monotonic()), None

    def _has_same_code(self, line: Line) -> bool:
        """Return whether new ranks would import the code that the living ranks have imported.

        If not, log one warning.
        """
        changed = self._ranks.find_changed_code()
        if changed and not self._has_warned:
            log.warning("not rehearsed: %s changed after the ranks had imported it; a resume would be refused", changed)
            self._has_warned = True
            line.note_unrehearsed(f"{changed} had changed")
        return not changed

    def note_lived(self, lived: Rehearsed) -> None:
        """Keep the steps that the living ranks have trained for the rehearsal, for `finish`."""
        self._lived = lived

    def forget(self) -> None:
        """Abandon the rehearsal that has begun, because its ranks have ended or must stop."""
        self._pending = self._lived = None

    # ---- the comparison

    def finish(self, line: Line, renew: Callable[[], None]) -> None:
        """Finish a rehearsal that the living ranks have begun: train its steps in new ranks, and compare the trails.

        Afterwards one of the two sets of ranks continues the run. Do nothing if no rehearsal has begun.

        Args:
            renew: starts new ranks, and restores the newest commit into them.

        Raises:
            Inexact: the trails differ.
            HoldfastError: the ranks ended, or can't be started.
        """
        rehearsal, self._pending = self._pending, None
        if rehearsal is None or self._ranks.running is None or line.head is None or line.head.step != rehearsal.start:
            return
        lived = self._lived or self._ranks.own.await_rehearsed()
        if lived.is_ending:
            # The living ranks were told to end. They save now, if they were to continue the run after the rehearsal.
            return
        faults.reach("rehearsal-lived")
        known = self._ranks.own.examine()
        again = self._rehearse_beside(line, rehearsal, renew) if rehearsal.is_beside else None
        if again is None:
            if self._ranks.running is not None and rehearsal.is_beside:
                return
            again = self._rehearse_alone(line, rehearsal, renew)
        if line.head.step != rehearsal.start:
            _tell_elsewhere(rehearsal.start, line.head.step)
            self._ranks.end_aside()
            return
        faults.reach("rehearsal-trained")
        if len(again.lines) < len(lived.lines):
            log.info("not rehearsed: the new ranks were told to end")
            self._ranks.put_back()
            return
        difference = find_departure(lived.lines, again.lines, self._ranks.tolerance or 0.0)
        if difference is None:
            self._note_equal(line, rehearsal)
            return
        self._tell(CheckpointVerdict("rehearsal", "refused", line.head.number, time.monotonic() - rehearsal.began))
        suspects = _list_suspects(known, self._ranks.own.examine())
        if self._settings.rehearse == "record":
            self._ranks.put_back()
        self._differ(line, lived.lines, f"would not continue exactly: {_describe_difference(difference)}", suspects)

    def _note_equal(self, line: Line, rehearsal: Rehearsal) -> None:
        """Record that the rehearsal was equal. If the living ranks were set aside, continue the run in them."""
        assert line.head is not None
        self._ranks.put_back()
        self._cost_s = time.monotonic() - rehearsal.began
        self.is_changed = False
        line.note_rehearsal(rehearsal.start, self._cost_s)
        self._tell(CheckpointVerdict("rehearsal", "passed", line.head.number, self._cost_s))
        faults.reach("rehearsal-noted")
        first, last, commit = rehearsal.start + 1, rehearsal.stop, line.head.number
        steps = f"steps {first}-{last}" if first < last else f"step {first}"
        log.info("rehearsed: new ranks trained %s from commit %d exactly as the running ranks did", steps, commit)

    def _rehearse_beside(self, line: Line, rehearsal: Rehearsal, renew: Callable[[], None]) -> Rehearsed | None:
        """Train the rehearsal's steps in new ranks while the living ranks wait. Return these steps.

        Return None if the new ranks were lost or failed. If the new ranks failed, end the living ranks, too, because
        perhaps this machine can't run two sets of ranks at once.
        """
        self._ranks.set_aside()
        try:
            return self._train(line, rehearsal, renew, is_kept=False)
        except (RankDied, OutOfMemory) as error:
            log.warning("not rehearsed: %s", error)
            self._lost += 1
            self._ranks.put_back()
        except (StateError, RecipeFailed):
            self._ranks.end()
        return None

    def _rehearse_alone(self, line: Line, rehearsal: Rehearsal, renew: Callable[[], None]) -> Rehearsed:
        """End the living ranks, and then train the rehearsal's steps in new ranks. Return these steps.

        Raises:
            Inexact: the new ranks can't restore the commit, or fail in a step that the living ranks have trained.
        """
        self._ranks.end_running()
        try:
            return self._train(line, rehearsal, renew, is_kept=True)
        except (StateError, RecipeFailed) as error:
            number = line.head.number if line.head else 0
            self._tell(CheckpointVerdict("rehearsal", "refused", number, time.monotonic() - rehearsal.began))
            raise Inexact(f"this run could not be resumed: {error}", hint=error.hint or GO_ON) from error

    def _train(self, line: Line, rehearsal: Rehearsal, renew: Callable[[], None], *, is_kept: bool) -> Rehearsed:
        self._ranks.is_quiet = True
        try:
            renew()
        finally:
            self._ranks.is_quiet = False
        if line.head is None or line.head.step != rehearsal.start:
            return Rehearsed(lines=[])
        faults.reach("rehearsal-restored")
        self._ranks.own.rehearse(rehearsal.stop, self._ranks.present.fingerprint, is_kept=is_kept)
        return self._ranks.own.await_rehearsed()

    def compare_with_dead(self, line: Line, stop: int) -> None:
        """Train in new ranks the steps that dead ranks had trained after the same commit, and compare the two trails.

        Args:
            stop: the last step of the chunk.

        Raises:
            Inexact: the trails differ.
        """
        head = line.head
        if head is None or self._ranks.tolerance is None:
            return
        record = self._journal.find_rehearsal(head.number)
        if self._settings.rehearse == "off" or line.verdict.inexact:
            if record is not None:
                line.note_inexact(record.difference)
            return
        lived = record.lines if record else find_lived(self._folder, head.attempt, head.step)
        # the dead ranks may have trained steps that the skip list now excludes
        skipped = Steps.parse(self._ranks.config.skip)
        same = itertools.takewhile(lambda each: bool(each.get("skipped")) == (each["step"] in skipped), lived)
        lived = [each for each in same if each["step"] <= stop]
        if not lived:
            return
        began, stop, fingerprint = time.monotonic(), lived[-1]["step"], self._ranks.present.fingerprint
        self._ranks.own.rehearse(stop, fingerprint, is_kept=True, is_detailed=record is not None)
        lines = self._ranks.own.await_rehearsed().lines
        difference = find_departure(lived, lines, self._ranks.tolerance or 0.0)
        if lines:
            result: Literal["passed", "refused"] = "passed" if difference is None else "refused"
            self._tell(CheckpointVerdict("death", result, head.number, time.monotonic() - began))
        if difference is not None:
            self._differ(line, lived, f"does not continue exactly: {_describe_difference(difference)}", [])
            return
        if lines:
            log.info("new ranks trained steps %d-%d exactly as the dead ranks did", head.step + 1, lines[-1]["step"])

    @property
    def _folder(self) -> Path:
        return Path(self._ranks.config.log.folder) / self._ranks.config.run

    def _differ(self, line: Line, lived: Sequence[dict[str, Any]], found: str, suspects: Sequence[str]) -> None:
        """Record a difference, and raise `Inexact` unless the configuration lets the run continue."""
        assert line.head is not None
        since = line.find_unproved()
        if self._settings.rehearse == "record":
            line.note_inexact(found)
            log.warning("this run %s; it continues, and each later commit records this", found)
            return
        record = RehearsalRecord(
            attempt=self._number, commit=line.head.number, lines=[*lived], difference=found, created_at=now()
        )
        try:
            self._journal.record_rehearsal(record)
        except StoreError as error:
            log.warning("the steps that differ can't be recorded: %s", error)
        named = f"; {'; '.join(suspects)}" if suspects else ""
        raise Inexact(
            f"this run {found}{since}{named}",
            hint="a step depends on state that no checkpoint has: save that state, or derive it from the step, as "
            f"docs/troubleshooting.md#state-that-no-checkpoint-has shows; {GO_ON}",
        )

    def end(self, head: Commit) -> None:
        """Delete the recorded steps up to the newest commit, because no comparison needs their files any more."""
        delete_lived(self._folder, head.attempt, head.step)


def _describe_difference(difference: Difference) -> str:
    """Return a text for a person about a difference between two trails."""
    after = f"; after it {shorten(list(difference.tensors), SHOWN_NAMES)}" if difference.tensors else ""
    return f"first in step {difference.step}: {shorten(list(difference.fields), SHOWN_NAMES)}{after}"


def _tell_elsewhere(start: int, step: int) -> None:
    """Log that no rehearsal was made, because the new ranks have restored another step than the rehearsal's start."""
    if step < start:
        log.warning("not rehearsed: the checkpoint of step %d is damaged", start)
    else:
        log.info("not rehearsed: the earlier ranks had saved step %d, so new ranks continue from there", step)


def _list_suspects(known: Examined, found: Examined) -> list[str]:
    """Return a line for each value that no checkpoint contains and that differs between two sets of ranks."""
    suspects = find_suspects(known.unregistered, found.unregistered)
    return [f"{each}: {each.remedy}" for each in suspects[:SHOWN_SUSPECTS]]
