"""The report in a run's own folder: written while the run trains, and at each attempt's end."""

from holdfast.journal import REPORT, Journal
from holdfast.report.gathering import Gatherer
from holdfast.report.page import make_page


class Publisher:
    """Writes a run's report into its folder. Each time it reads what is new since the time before."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._gatherer = Gatherer(journal)

    def publish(self, attempt: int) -> None:
        """Write the report as the run stands now.

        Raises:
            Superseded: an attempt after this one owns the run.
        """
        page = make_page(self._gatherer.gather())
        self._journal.check_fence(attempt)
        self._journal.store.replace(REPORT, page.encode())
