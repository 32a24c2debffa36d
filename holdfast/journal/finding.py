"""The search for runs and commits by the names that a user types."""

import contextlib
import itertools
from collections.abc import Iterable

from holdfast.config import DEFAULT_STORE, KeepBest
from holdfast.errors import NameMissing, RunUnknown, WrongUse
from holdfast.journal.journal import Journal
from holdfast.journal.records import Commit
from holdfast.store import Store, open_store

# Folders of records. A folder that contains one of these is a run, even if its run.json is lost.
RECORDS = {"attempts", "commits"}
# The largest number of existing commits that an error lists.
SHOWN_COMMITS = 5
# The name that selects the commit with the best value of the metric in retention.keep_best.
BEST = "best"
HOW_TO_NAME = f"name the commit by its number, its folder, or {BEST!r}"


def open_journal(run: str) -> Journal:
    """Return the journal of the run ``<store>/<run>``. A run's name alone means a run in the default store.

    Raises:
        RunUnknown: the text contains no run name.
    """
    store, slash, name = run.rstrip("/").rpartition("/")
    if name in ("", ".", "..") or name.endswith(":") or store.endswith(":/"):  # a bucket alone is a store
        raise RunUnknown(f"{run!r} doesn't name a run", hint="name a run as <store>/<run>, for example runs/language")
    return Journal(open_store(store or ("/" if slash else DEFAULT_STORE)), name)


def open_place(place: str) -> Journal | Store:
    """Return the journal of the run ``<store>/<run>``; if there is no such run, the store with this folder or URL.

    Raises:
        RunUnknown: there is neither such a run nor such a store.
    """
    journal = None
    with contextlib.suppress(RunUnknown):
        journal = open_journal(place)
        if journal.exists():
            return journal
    store = open_store(place)
    names = store.list()
    if journal is not None and RECORDS & {*names}:
        return journal
    if not names:
        raise RunUnknown(
            f"{place!r} is neither a run nor a store",
            hint=f"a run is <store>/<run>, or a name in {DEFAULT_STORE}/; a store is a folder or URL that holds runs",
        )
    return store


def find_commit(journal: Journal, text: str = "") -> Commit:
    """Return the commit with this number, checkpoint folder or name ``best``; the newest commit if the text is empty.

    Raises:
        WrongUse: there is no such commit, or its checkpoint was pruned.
    """
    if text == BEST:
        return _require_best(journal)
    found = None
    if text.isdecimal():
        with contextlib.suppress(NameMissing):
            found = journal.read_commit(int(text))
    else:
        found = next((commit for commit in journal.candidates() if text in ("", commit.path)), None)
        if found is None and text:
            known = (journal.find_commit(number) for number in reversed(journal.numbers("commits")))
            found = next((commit for commit in known if commit and commit.path == text), None)
    if found is None and not text:
        raise WrongUse(f"run {journal.run!r} has no commit yet that counts")
    if found is None:
        raise WrongUse(f"run {journal.run!r} has no commit {text}", hint=HOW_TO_NAME)
    if journal.is_pruned(found.number):
        raise WrongUse(
            f"the checkpoint of commit {found.number} of run {journal.run!r} was pruned",
            hint=f"the newest are {', '.join(_list_newest(journal))}; holdfast verify lists the remaining checkpoints",
        )
    return found


def find_best_commit(journal: Journal, policy: KeepBest) -> Commit | None:
    """Return the commit with the best metric among the run's valid commits; None if no commit has the metric."""
    return next(iter(rank_by_metric(journal.candidates(), policy)), None)


def rank_by_metric(commits: Iterable[Commit], policy: KeepBest) -> list[Commit]:
    """Return the commits that have the metric, best first. Commits with equal metrics keep the given order."""
    valued = [(value, commit) for commit in commits if (value := commit.metrics.get(policy.metric)) is not None]
    valued.sort(key=lambda pair: pair[0], reverse=policy.mode == "max")
    return [commit for _, commit in valued]


def _require_best(journal: Journal) -> Commit:
    retention = journal.read_retention()
    if retention is None or retention.keep_best is None:
        raise WrongUse(
            f"run {journal.run!r} has no best commit: retention.keep_best is not set",
            hint="give the number of a commit; holdfast watch shows the metrics of each",
        )
    found = find_best_commit(journal, retention.keep_best)
    if found is None:
        raise WrongUse(f"run {journal.run!r} has no best commit: none has the metric {retention.keep_best.metric!r}")
    return found


def _list_newest(journal: Journal) -> list[str]:
    """Return the folder names of the newest commits' checkpoints, for a hint."""
    return [commit.path for commit in itertools.islice(journal.candidates(), SHOWN_COMMITS)]


def warn_if_quarantined(journal: Journal, commit: Commit) -> None:
    """Print a line if a person has asked for a commit by its number that the run doesn't use any more."""
    if journal.is_quarantined(commit.number):
        print(
            f"commit {commit.number} is in quarantine: the run no longer uses it, and its weights may be wrong; "
            "without a commit's name, the command takes the newest commit that counts"
        )
