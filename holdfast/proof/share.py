"""The choice of commits to audit, so that all audits of a run take a chosen fraction of its training time."""

import contextlib
from dataclasses import dataclass
from itertools import chain

from holdfast.journal import Commit, Journal
from holdfast.journal.audits import UNREADABLE, find_certifying, list_audits, read_audits
from holdfast.journal.reading import read_all
from holdfast.journal.trainers import read_machines
from holdfast.ledger.audit_share import Times, fill_time, order_commits
from holdfast.machine.host import name_host
from holdfast.proof.audit import choose_span, list_replayable


@dataclass(frozen=True)
class ShareChoice:
    """The commits to audit for a fraction of a run's training time.

    Attributes:
        commits: the commits, in the order in which to audit them; empty if no audit fits.
        seed: the seed of the random choice.
        trained_s: the seconds that the run has trained so far.
        spent_s: the training time, in seconds, that earlier audits of the run have repeated.
        longest_s: the training time, in seconds, that the longest possible audit repeats. A commit is chosen only while
            this time still fits into the share.
    """

    commits: list[Commit]
    share: float
    seed: int
    trained_s: float
    spent_s: float
    longest_s: float

    def __str__(self) -> str:
        numbers = ", ".join(str(each.number) for each in self.commits)
        audited = f"audits commit {numbers}, seed {self.seed}" if numbers else "audits no commit now"
        return (
            f"share     {self.share:g} of {self.trained_s:.3g} s of training is {self.share * self.trained_s:.3g} s; "
            f"earlier audits took {self.spent_s:.3g} s, and one more takes up to {self.longest_s:.3g} s: {audited}"
        )


def choose_by_share(journal: Journal, share: float, seed: int) -> ShareChoice:
    """Return the commits to audit, so that all audits of the run train at most a fraction of its own training time.

    A commit is omitted if it is certified, or if this host has audited it. Commits that another host has trained come
    before commits of this host, because this host would repeat its own fault. In both groups the newest commit
    comes first, and the others follow at random. Only whole chunks are audited, as long as the longest chunk would
    still fit. So a part of the share may remain unused. The next choice can use this part, because the share is
    computed from all times on record.

    Args:
        share: the fraction of the time in all steps of the run so far. The time of all audits on record is subtracted.
        seed: the seed of the random choice.
    """
    times = Times.of(filter(None, read_all(journal.find_commit, journal.numbers("commits"))))
    audits = _Audits(journal, times)
    replayable = list_replayable(journal) if times.trained_s else []
    elsewhere = order_commits(replayable, seed, audits.is_open_elsewhere)
    here = order_commits(replayable, seed, audits.is_open_here)
    longest_s = times.measure_longest(replayable)
    left_s = share * times.trained_s - audits.spent_s
    chosen = fill_time(chain(elsewhere, here), audits.measure, left_s, longest_s)
    return ShareChoice(chosen, share, seed, times.trained_s, audits.spent_s, longest_s)


class _Audits:
    """The recorded audits of a run, and the audits that this host may add."""

    def __init__(self, journal: Journal, times: Times) -> None:
        self._journal, self._times = journal, times
        self._numbers = list_audits(journal)
        found = read_all(lambda number: list(read_audits(journal, number, self._numbers[number])), self._numbers)
        audited = zip(self._numbers, found, strict=True)
        self._hosts = {number: {each.host for each in audits} for number, audits in audited}
        self.spent_s = times.measure_audits(chain.from_iterable(found))
        self._costs: dict[int, float] = {}
        self._trainers: dict[tuple[int, str, tuple[str, ...]], frozenset[str]] = {}

    def is_open_elsewhere(self, commit: Commit) -> bool:
        """Return whether this host should audit a commit that another host has certainly trained."""
        return name_host() not in self._list_machines(commit) and self._is_open(commit)

    def is_open_here(self, commit: Commit) -> bool:
        """Return whether this host should audit a commit that it may have trained itself."""
        return name_host() in self._list_machines(commit) and self._is_open(commit)

    def measure(self, commit: Commit) -> float:
        """Return the training time, in seconds, that an audit of a commit repeats.

        Raises:
            NameMissing, RecordDamaged: a record can't be read.
        """
        if commit.number not in self._costs:
            start = choose_span(self._journal, commit).start
            self._costs[commit.number] = self._times.measure(commit.number, start.number if start else 0)
        return self._costs[commit.number]

    def _is_open(self, commit: Commit) -> bool:
        if name_host() in self._hosts.get(commit.number, ()):
            return False
        with contextlib.suppress(*UNREADABLE):  # no audit can begin with this commit
            self.measure(commit)
            return not any(find_certifying(self._journal, commit, self._numbers.get(commit.number, ())))
        return False

    def _list_machines(self, commit: Commit) -> frozenset[str]:
        key = commit.attempt, commit.path if commit.why == "adopted" else "", (*commit.hosts,)
        if key not in self._trainers:
            with contextlib.suppress(*UNREADABLE):
                self._trainers[key] = read_machines(self._journal, commit)
        return self._trainers.setdefault(key, frozenset())
