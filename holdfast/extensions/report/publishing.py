"""The report in a run's own folder: written while the run trains, and at each attempt's end."""

from holdfast.extensions.report.gathering import Gatherer
from holdfast.extensions.report.page import make_page
from holdfast.journal import REPORT, Journal


class Publisher:
    """Writes a run's report into its folder. Each call reads only the records that are new since the last call."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._gatherer = Gatherer(journal)

    def publish(self, attempt: int) -> None:
        """Write the report of the run's current state.

        If this process is suspended just before the write, its page may replace the newer page of a later attempt. So
        check for a later attempt after the write. If there is a later attempt, write the page again, from the run's
        current records.

        Raises:
            Superseded: a later attempt owns the run.
        """
        position, page = self._read_position(), make_page(self._gatherer.gather())
        self._journal.check_fence(attempt)
        self._journal.store.replace(REPORT, page.encode())
        while self._journal.attempts() > attempt and (newer := self._read_position()) != position:
            position, page = newer, make_page(self._gatherer.gather())
            self._journal.store.replace(REPORT, page.encode())

    def _read_position(self) -> tuple[int, int, list[int]]:
        """Return the run's position: its newest attempt and commit, and the recorded endings."""
        journal = self._journal
        return journal.attempts(), journal.newest_number(), journal.numbers("endings")
