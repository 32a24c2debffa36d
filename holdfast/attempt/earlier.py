"""The steps that earlier ranks had trained and that no checkpoint contains: new ranks have to train them again.

Ranks that have died leave the trail of these steps on their machine's disk (`holdfast.rank.lived_steps`). Ranks that
were told to stop train them after their save (`holdfast.rank.shadow`), and the journal has their trail.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from holdfast.attempt.difference import Differences, describe_difference, list_suspects
from holdfast.attempt.due import Due
from holdfast.attempt.late import may_train_late, train_late
from holdfast.attempt.line import Line
from holdfast.attempt.observers import CheckpointVerdict
from holdfast.attempt.phases import describe_steps
from holdfast.attempt.ranks import AttemptRanks, Renew
from holdfast.checkpoint.departure import find_departure
from holdfast.checkpoint.found import Found
from holdfast.config.steps import Steps
from holdfast.errors import HoldfastError
from holdfast.journal import Commit, Journal
from holdfast.provenance.canonical import finite_or_none
from holdfast.rank.lived_steps import delete_lived, find_lived
from holdfast.rank.messages import Shadowed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owed:
    """The steps that earlier ranks had trained, and that the running ranks have to train again with the same trail.

    Attributes:
        whose: ``stopped`` or ``dead``: how the earlier ranks ended; or ``uninterrupted``, if new ranks
            trained the steps for the comparison; see `holdfast.attempt.late`.
        unregistered: the values that the checkpoint of the commit ``after`` doesn't contain, in ranks that were
            stopped.
        after: the number of the commit after which the earlier ranks began these steps.
    """

    lines: list[dict[str, Any]]
    whose: str
    unregistered: list[Found]
    after: int


class EarlierSteps:
    """The steps of earlier ranks that one attempt compares with its own, and the steps that it leaves to the next
    attempt.

    Attributes:
        reached: the last step that was compared; 0 if none was.
    """

    def __init__(
        self,
        journal: Journal,
        ranks: AttemptRanks,
        differences: Differences,
        due: Due,
        tell: Callable[[CheckpointVerdict], object] = lambda _: None,
        has_notice: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            due: decides when a rehearsal is due. It is due after a resume that was compared with nothing.
            tell: a function that is called with the verdict of each comparison.
            has_notice: returns whether this machine will be taken away.
        """
        self._journal, self._ranks, self._differences, self._tell = journal, ranks, differences, tell
        self._due, self._has_notice = due, has_notice
        self._owed: Owed | None = None
        self._shadow: Shadowed | None = None  # the steps that this attempt's ranks have trained after a stop's save
        self._tried = 0  # the number of the last commit whose shadow was to be trained late
        self._is_late = False  # whether the running ranks train such a shadow
        self.reached = 0

    @property
    def is_owed(self) -> bool:
        """Return whether the next chunk has to begin with steps that earlier ranks had trained."""
        return self._owed is not None

    @property
    def compared_from(self) -> int:
        """Return the number of the commit from which stopped ranks trained the steps that are still owed; 0 for none.

        If these steps differ, its checkpoint shows which values a restore loses.
        """
        return self._owed.after if self._owed is not None and self._owed.unregistered else 0

    def forget(self) -> None:
        """Forget the steps that the running ranks have to train, because these ranks have ended."""
        self._owed, self.reached, self._is_late = None, 0, False

    def compare(self, line: Line, stop: int, renew: Renew, *, is_fresh: bool) -> None:
        """Train in new ranks the steps that earlier ranks had trained after the same commit. Compare the two trails.

        The earlier ranks have died, or had trained these steps when they were told to stop. Steps after the chunk are
        compared in the next chunk.

        Args:
            stop: the last step of the chunk.
            renew: replaces the ranks by new ones, and restores the newest commit into them; or, given a commit, the
                state before its steps.
            is_fresh: whether the ranks have restored the head and trained nothing yet.

        Raises:
            Inexact: the trails differ.
        """
        if is_fresh:
            self._owed = self._find_earlier(line)
            is_evaluated = self._compare_evaluation(line)
            if self._owed is None and self._is_asked(line):
                self._owed = self._train_late(line, renew)
            if self._owed is None and self._is_asked(line):
                self._due.is_changed = True
                if not is_evaluated:
                    self._note_unproved(line)
        owed, self._owed = self._owed, None
        head = line.head
        if owed is None or head is None or owed.lines[0]["step"] <= head.step:
            return
        lived = [each for each in owed.lines if each["step"] <= stop]
        if not lived:  # a rehearsal inside a chunk began after the commit
            self._owed = owed
            return
        later = owed.lines[len(lived) :]
        is_detailed = any("tensors" in each.get("state", {}) for each in lived)
        began, fingerprint = time.monotonic(), self._ranks.present.fingerprint
        self._ranks.own.rehearse(lived[-1]["step"], fingerprint, is_kept=True, is_detailed=is_detailed)
        lines = self._ranks.own.await_rehearsed().lines
        if not lines:
            return
        difference = find_departure(lived, lines, self._ranks.tolerance or 0.0)
        result: Literal["passed", "refused"] = "passed" if difference is None else "refused"
        self._tell(CheckpointVerdict("death", result, head.number, time.monotonic() - began))
        if difference is not None:
            suspects = self._find_suspects(owed, head, renew)
            found = f"does not continue exactly: {describe_difference(difference)}"
            self._differences.report(line, owed.lines, found, suspects or self._ranks.built.hints, owed.unregistered)
            return
        self.reached = lines[-1]["step"]
        if is_detailed:
            line.note_rehearsal(describe_steps("stop", head.step, self.reached, line.steps_per_epoch), 0.0)
        log.info(
            "new ranks trained steps %d-%d exactly as the %s ranks did", head.step + 1, lines[-1]["step"], owed.whose
        )
        self._owed = replace(owed, lines=later) if later else None

    def _compare_evaluation(self, line: Line) -> bool:
        """Repeat the last evaluation of a run that was complete, and that continues because it was made longer.

        No step after the run's end was trained, so only the evaluation can show state that the checkpoint lacks, such
        as an average of the weights.

        Return whether the evaluation was repeated with equal metrics.

        Raises:
            Inexact: the metrics differ.
        """
        head = line.head
        ending = self._journal.read_ending(head.attempt) if head is not None else None
        metadata = line.read_metadata(head) if head is not None else None
        if head is None or metadata is None or not metadata.metrics or not metadata.is_at_epoch_end:
            return False
        if ending is None or (ending.ending.reason, ending.ending.step) != ("completed", head.step):
            return False
        if self._ranks.tolerance != 0.0 or self._rehearse == "off" or line.verdict.inexact:
            return False
        found = self._ranks.own.evaluate()
        metrics = {name: finite_or_none(value) for name, value in found.metrics.items() if name not in found.measured}
        different = [name for name, value in metrics.items() if metadata.metrics.get(name, value) != value]
        if found.is_pure and different:
            name = different[0]
            step, before = metadata.optimizer_steps_total, metadata.metrics[name]
            told = f"{name} is {metrics[name]} in a second evaluation after step {step}, and was {before}"
            self._differences.report(line, [], f"does not continue exactly: {told}", [])
        return found.is_pure and not different and not metrics.keys().isdisjoint(metadata.metrics)

    def _note_unproved(self, line: Line) -> None:
        """Record that the resume from the head was compared with nothing."""
        line.note_unproved()
        step = line.head.step if line.head else 0
        log.info(
            "this resume isn't proved: the earlier attempt has left no steps after step %d to compare; a rehearsal "
            "follows, unless the run ends within a minute",
            step,
        )

    def _is_asked(self, line: Line) -> bool:
        """Return whether the steps after the head can and should be compared with earlier ranks' steps."""
        is_comparable = self._ranks.tolerance is not None and self._rehearse != "off" and not line.verdict.inexact
        return is_comparable and line.head is not None and line.head.origin is None

    def _train_late(self, line: Line, renew: Renew) -> Owed | None:
        """Train the shadow of a stop that left none, if that takes a short time; see `holdfast.attempt.late`.

        Raises:
            Inexact: the steps before the stop, trained again, differ from those that the stop's commit contains.
        """
        head = line.head
        if head is None or head.number == self._tried or not may_train_late(line, self._ranks):
            return None
        self._tried, self._is_late = head.number, True
        late = train_late(line, self._ranks, renew, self._has_notice)
        self._is_late = False
        if late is None:
            return None
        difference = find_departure(late.known, late.lines, self._ranks.tolerance or 0.0)
        if difference is not None:
            found = f"does not continue exactly: {describe_difference(difference)}"
            self._differences.report(line, late.lines, found, self._ranks.built.hints, late.unregistered)
            return None
        lines = [each for each in late.lines if each["step"] > head.step]
        return Owed(lines, "uninterrupted", late.unregistered, head.number)

    def _find_suspects(self, owed: Owed, head: Commit, renew: Renew) -> list[str]:
        """Return a line for each value that the stopped ranks had and that new ranks lack after a restore.

        The running ranks have trained on, so restore the commit ``owed.after`` into new ranks.
        """
        if not owed.unregistered or self._rehearse == "record":
            return []
        later = None  # the commit that follows ``owed.after``; None if that is still the head
        if head.number != owed.after:
            later = next((each for each in self._journal.walk_back(head) if each.parent == owed.after), None)
        self._ranks.end_running()
        with contextlib.suppress(HoldfastError):  # the difference is reported without suspects
            renew(later)
            return list_suspects(owed.unregistered, self._ranks.own.examine().unregistered)
        return []

    def _find_earlier(self, line: Line) -> "Owed | None":
        """Return the steps that earlier ranks had trained after the head; None if there are none to compare."""
        head = line.head
        if head is None or self._ranks.tolerance is None:
            return None
        record = self._journal.find_rehearsal(head)
        if self._rehearse == "off" or line.verdict.inexact:
            if record is not None and record.difference:
                line.note_inexact(record.difference)
            return None
        lived = record.lines if record else find_lived(self._folder, head.attempt, head.step)
        # the earlier ranks may have trained steps that the skip list now excludes
        skipped = Steps.parse(self._ranks.config.skip)
        same = itertools.takewhile(lambda each: bool(each.get("skipped")) == (each["step"] in skipped), lived)
        lines = list(same)
        whose = "stopped" if record is not None and not record.difference else "dead"
        unregistered = [Found.model_validate(each) for each in record.unregistered] if record else []
        return Owed(lines, whose, unregistered, head.number) if lines else None

    @property
    def _rehearse(self) -> str | None:
        return self._ranks.config.proof.rehearse

    @property
    def _folder(self) -> Path:
        return Path(self._ranks.config.log.folder) / self._ranks.config.run

    @property
    def has_shadow(self) -> bool:
        """Return whether the ranks train a shadow, whose steps are never saved; see `holdfast.rank.shadow`."""
        return self._shadow is not None or self._is_late

    def note_shadow(self, shadowed: Shadowed) -> None:
        """Keep a report about the steps that stopped ranks train after their save, for `end`."""
        if self._shadow is None:
            self._shadow = shadowed
        else:
            self._shadow.lines.extend(shadowed.lines)

    def end(self, head: Commit) -> None:
        """Record the shadow of a stop for the next attempt, which may run on another machine.

        Delete the files of steps up to the newest commit, because no comparison needs these files any more.
        """
        shadow = self._shadow
        if shadow is not None and shadow.lines and shadow.lines[0]["step"] == head.step + 1:
            self._differences.record(head, shadow.lines, "", shadow.unregistered)
        elif shadow is not None:
            log.info(
                "the stop after step %d left no time for a shadow: steps with which the next attempt could compare "
                "its own steps",
                head.step,
            )
        delete_lived(self._folder, head.attempt, head.step)
