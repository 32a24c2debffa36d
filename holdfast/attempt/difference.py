"""A difference between two sets of ranks that train the same steps: its record, and the end of the run."""

import logging
from collections.abc import Sequence
from typing import Any

from holdfast.attempt.line import Line
from holdfast.checkpoint import shorten
from holdfast.checkpoint.departure import Difference
from holdfast.checkpoint.found import Found, find_suspects
from holdfast.config import RunConfig
from holdfast.errors import Inexact, StoreError
from holdfast.journal import Commit, Journal, RehearsalRecord, now

log = logging.getLogger(__name__)

SHOWN_NAMES = 3
SHOWN_SUSPECTS = 4
GO_ON = "--set proof.rehearse=record trains on anyway, and every later commit records that"


class Differences:
    """The differences that one attempt finds between two sets of ranks."""

    def __init__(self, journal: Journal, number: int, config: RunConfig) -> None:
        """
        Args:
            number: the attempt's number.
        """
        self._journal, self._number, self._rehearse = journal, number, config.proof.rehearse

    def report(
        self,
        line: Line,
        lived: Sequence[dict[str, Any]],
        found: str,
        suspects: Sequence[str],
        unregistered: Sequence[Found] = (),
    ) -> None:
        """Record a difference, and raise `Inexact` unless the configuration lets the run continue."""
        assert line.head is not None
        since = line.find_unproved()
        if self._rehearse == "record":
            line.note_inexact(found)
            log.warning("this run %s; it continues, and each later commit records this", found)
            return
        if after := [each for each in lived if each["step"] > line.head.step]:
            self.record(line.head, after, found, unregistered)
        named = f"; {'; '.join(suspects)}" if suspects else ""
        raise Inexact(
            f"this run {found}{since}{named}",
            hint="a step depends on state that no checkpoint has: save that state, or derive it from the step, as "
            f"holdfast docs troubleshooting#state-that-no-checkpoint-has shows; {GO_ON}",
        )

    def record(
        self, head: Commit, lines: Sequence[dict[str, Any]], difference: str, unregistered: Sequence[Found]
    ) -> None:
        """Record the steps that the next attempt has to train from a commit."""
        values = [each.model_dump(mode="json") for each in unregistered]
        described = {"lines": [*lines], "difference": difference, "unregistered": values}
        record = RehearsalRecord(attempt=self._number, commit=head.number, created_at=now(), **described)
        try:
            self._journal.record_rehearsal(record)
        except StoreError as error:
            log.warning("the steps after commit %d can't be recorded: %s", head.number, error)


def describe_difference(difference: Difference) -> str:
    """Return a text for a person about a difference between two trails."""
    after = f"; after it {shorten(list(difference.tensors), SHOWN_NAMES)}" if difference.tensors else ""
    return f"first in step {difference.step}: {shorten(list(difference.fields), SHOWN_NAMES)}{after}"


def list_suspects(known: Sequence[Found], found: Sequence[Found]) -> list[str]:
    """Return a line for each value that no checkpoint contains and that differs between two sets of ranks."""
    suspects = find_suspects(known, found)
    return [f"{each}: {each.remedy}" for each in suspects[:SHOWN_SUSPECTS]]
