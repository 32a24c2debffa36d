"""The decision when a rehearsal is due, and where it starts."""

import logging
from collections.abc import Callable, Sequence

from holdfast.attempt.line import Line
from holdfast.attempt.phases import KINDS, choose_across, choose_inside, find_end
from holdfast.attempt.ranks import AttemptRanks
from holdfast.journal.records import RehearsalKind

log = logging.getLogger(__name__)

# A run with fewer seconds left to train is not rehearsed, unless its configuration asks for rehearsals.
SHORT_S = 60.0
SHORT = "the run would end within a minute"
# When an attempt has lost a rehearsal's new ranks this many times, for example because memory ran out, it makes no more
# rehearsals.
MOST_LOST = 2
ATTACHED = "a launcher has started the ranks, so holdfast can't start new ranks to compare with"


class Due:
    """The rehearsals that are due in one attempt: one of each kind at first, and then as many as their share pays for.

    Attributes:
        steps_per_s: the speed of the ranks; 0 if it is unknown.
        cost_s: the seconds for which training waited for the last rehearsal; 0 if there was none.
        lost: the number of rehearsals whose new ranks were lost.
        is_changed: whether a rehearsal is due in any case, because the attempt continues with accepted changes or on a
            machine where equal bits are not promised.
    """

    def __init__(self, ranks: AttemptRanks) -> None:
        self._ranks = ranks
        self._has_warned = self.is_changed = False
        self.steps_per_s, self.cost_s, self.lost = 0.0, 0.0, 0

    def choose(
        self, line: Line, start: int, stop: int, total: int, next_s: float, may_wait: Callable[[], bool]
    ) -> tuple[RehearsalKind, int]:
        """Return the kind and the start of the rehearsal that is due in the chunk ``(start, stop]``; a start of 0 for
        none.

        A first rehearsal starts inside the chunk, because that shows more than a start at the commit before the chunk.

        If the living ranks can't wait, the run continues in the new ranks. These ranks may lack a sum that the program
        computes over the epoch. The compared steps show this lack only where the program uses the sum: at the epoch's
        end. So in a chunk with an epoch's end, new ranks start just before that end and train across it, or they start
        at an epoch's beginning.

        Args:
            total: the run's last step.
            next_s: the seconds of training after the newest commit, up to the rehearsal's start.
            may_wait: returns whether the run will continue in the living ranks. It measures memory, so it is called
                only for a rehearsal that is due.
        """
        kinds = self._list(line, next_s)
        if not kinds:
            return "commit", 0
        per_epoch, past = line.steps_per_epoch, line.verdict.rehearsals
        places: dict[RehearsalKind, int] = {
            "inside": choose_inside(start, min(stop, total - 1), per_epoch, past),
            "across": choose_across(start, stop, per_epoch, total, past),
            "commit": start,
        }
        if find_end(start, stop, per_epoch) and not may_wait():
            places["inside"] = 0
            places["commit"] = 0 if start % per_epoch else start
        due = [kind for kind in kinds if places[kind]]
        return (due[0], places[due[0]]) if due else ("commit", 0)

    def _list(self, line: Line, next_s: float) -> Sequence[RehearsalKind]:
        """Return the kinds of rehearsals that are due when ``next_s`` more seconds have been trained, best first."""
        rehearse, share = self._ranks.config.proof.rehearse, self._ranks.config.proof.share
        verdict = line.verdict
        reason = 'proof.rehearse = "off"' if rehearse == "off" else ""
        if self._ranks.config.compute.is_attached:
            reason = reason or ATTACHED
        if reason:
            line.note_unrehearsed(reason)
        if reason or verdict.inexact or self.lost >= MOST_LOST:
            return ()
        if self.is_changed or not verdict.rehearsed:
            return KINDS
        missing = [kind for kind in KINDS if kind not in verdict.kinds]
        cost_s = self.cost_s or self._ranks.restart_s
        is_due = rehearse != "first" and (share == 1 or (verdict.unrehearsed_s + next_s) * share > cost_s > 0)
        made = [each.kind for each in verdict.rehearsals if each.kind in KINDS]
        turn = KINDS.index(made[-1]) + 1 if made else 0
        # A run may have no place for a kind: a run of a single epoch never goes across an epoch's end.
        return (*missing, *((*KINDS[turn:], *KINDS[:turn]) if is_due else ()))

    def is_short(self, steps: int) -> bool:
        """Return whether too few steps remain for a rehearsal; False if the configuration asks for rehearsals."""
        return self._ranks.config.proof.rehearse is None and steps < SHORT_S * self.steps_per_s

    def has_same_code(self, line: Line) -> bool:
        """Return whether new ranks would import the code that the living ranks have imported.

        If not, log one warning.
        """
        changed = self._ranks.find_changed_code()
        if changed and not self._has_warned:
            log.warning("not rehearsed: %s changed after the ranks had imported it; a resume would be refused", changed)
            self._has_warned = True
            line.note_unrehearsed(f"{changed} had changed")
        return not changed
