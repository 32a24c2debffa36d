"""What finding the resume point and pruning cost, as a run gets longer."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from unittest import mock

from holdfast.attempt import Line
from holdfast.journal import Journal
from holdfast.keeping.retention import DEBRIS_AFTER_S, prune_by_policy
from holdfast.store import Store, open_store
from tests.bench.counting import Tally, counted
from tests.bench.frame import Benchmark, Row
from tests.bench.history import POLICY, RUN, History
from tests.support import servers
from tests.support.makers import SETTINGS, STEPS_PER_EPOCH

COMMITS = (10, 1_000, 10_000)
# Writing a history takes a server some ten seconds a thousand commits.
COMMITS_OVER_HTTP = COMMITS[:2]
# As Google's: its longest, and what a client gets that asks for none.
GCS_PAGE = 1000


def run(full: bool) -> list[Row]:
    """The rows of all stores."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        rows += measure("folder", open_store(folder), COMMITS)
    over_http = COMMITS if full else COMMITS_OVER_HTTP
    with environment(servers.s3_server()):
        rows += measure("S3", open_store(servers.make_s3_bucket()), over_http)
    with environment(servers.gcs_server(GCS_PAGE)):
        rows += measure("GCS", open_store(servers.make_gcs_bucket()), over_http)
    return rows


@contextlib.contextmanager
def environment(server: contextlib.AbstractContextManager[dict[str, str]]) -> Iterator[None]:
    with server as environment, mock.patch.dict(os.environ, environment):
        yield


def measure(name: str, store: Store, sizes: tuple[int, ...]) -> list[Row]:
    """The rows of one store, for runs of so many commits; figures are related to those of the first."""
    histories = [_Run(name, store.inside(f"{commits}-commits"), commits).measure() for commits in sizes]
    rows: list[Row] = []
    for lines in zip(*histories, strict=True):  # one case, at all sizes
        for line in lines:
            line["ratio"] = _ratio(line["requests"], lines[0]["requests"])
            line["HTTP ratio"] = _ratio(line["HTTP"], lines[0]["HTTP"])
        rows += lines
    return rows


def _ratio(value: object, first: object) -> float | None:
    return round(value / first, 2) if isinstance(value, int) and isinstance(first, int) and first else None


def resume(journal: Journal) -> Line:
    """Find the number of a next attempt and what it continues from, and read no checkpoint; return its line."""
    line = Line(journal, journal.attempts() + 1, SETTINGS, STEPS_PER_EPOCH)
    line.resume(lambda commit: None)
    return line


class _Run:
    """One history, and the measurements on it. Each but the first leaves it a commit longer."""

    def __init__(self, name: str, store: Store, commits: int) -> None:
        self.name, self.commits = name, commits
        self.tally = Tally()
        self.plain, self.store = store, counted(store, self.tally)
        self.history = History(store, commits)

    def measure(self) -> list[Row]:
        history = self.history
        rows = [self._resume("as usual")]
        history.train()
        journal = Journal(self.store, RUN)
        rows.append(self._prune("as usual, an attempt's first", journal))
        history.train()
        journal.newest_number()  # an attempt's journal has published the commit itself, and so knows it
        rows.append(self._prune("as usual, its second", journal, debris_after_s=None))

        history.lose_latest()
        rows.append(self._resume("latest.json is lost"))
        history.train()
        history.lose_latest()
        rows.append(self._prune("latest.json is lost", Journal(self.store, RUN)))

        history.train()
        history.lose_reports()
        rows.append(self._prune("the last reports are lost", Journal(self.store, RUN)))

        history.train()
        history.pin_first()
        rows.append(self._prune("commit 1 is pinned", Journal(self.store, RUN)))
        Journal(self.plain, RUN).unpin(1)
        prune_by_policy(Journal(self.plain, RUN), POLICY, STEPS_PER_EPOCH)

        history.quarantine()
        rows.append(self._resume("1 in 100 is quarantined"))
        history.train()
        rows.append(self._prune("1 in 100 is quarantined", Journal(self.store, RUN)))
        return rows

    def _resume(self, case: str) -> Row:
        """An attempt finds its number and what it continues from. Loading that costs what a checkpoint costs."""
        journal = Journal(self.store, RUN)
        with self.tally.measuring():
            line = resume(journal)
        assert line.head
        assert line.head.number == self.history.commits
        return self._row("resume", case)

    def _prune(self, case: str, journal: Journal, *, debris_after_s: float | None = DEBRIS_AFTER_S) -> Row:
        """One checkpoint is given up and deleted."""
        with self.tally.measuring():
            report = prune_by_policy(journal, POLICY, STEPS_PER_EPOCH, debris_after_s=debris_after_s)
        assert report
        assert [entry.commit for entry in report.pruned] == [self.history.commits - POLICY.keep_last]
        return self._row("prune one", case)

    def _row(self, operation: str, case: str) -> Row:
        tally = self.tally
        return {
            "store": self.name, "operation": operation, "case": case, "commits": self.commits,
            "requests": tally.requests, "ratio": None, "HTTP": tally.http or None, "HTTP ratio": None,
            "names": tally.names, "KiB read": round(tally.bytes_read / 1024), "ms": round(tally.ms),
        }  # fmt: skip


BENCHMARK = Benchmark(
    name="journal",
    about=(
        "What finding the resume point and pruning one checkpoint cost, as a run gets longer. requests: calls of the "
        "store's verbs. HTTP: requests that went out; gcsfs looks for a name in two ways at once, so that its number "
        "is a few up or down. ratio: at the largest size, over that at the smallest. names: in listings. ms over "
        "HTTP are the test servers' own, which look at every object to make a listing. Over HTTP the largest size is "
        "measured with --full only."
    ),
    run=run,
    across="commits",
)
