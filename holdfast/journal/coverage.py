"""The files of a run that the signatures of its commits cover, and the uncovered files, computed from the records.

A signature covers a commit's record and its checkpoint's files. The record contains hashes, so the signature also
covers the earlier commits, the attempts, the settings and the run's own record. Anyone who can write to the store can
add, change or delete all other files.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.journal.journal import Journal
from holdfast.journal.records import (
    Commit,
    config_name,
    folder_record_name,
    metrics_name,
    record_name,
    shown_name,
    signature_name,
)
from holdfast.journal.snapshots import SNAPSHOT, is_of


@dataclass(frozen=True)
class FileKind:
    """A kind of files in a run's folder.

    Attributes:
        name: the file's name, or the folder's with a slash; ``checkpoint/`` stands for all folders of checkpoints.
        covered: which of these files the signatures cover; empty for none.
        risk: the decision that a forged file of this kind could change if no signature covers it.
        unnoticed: why some losses or swaps of such a file stay unnoticed; empty if all are noticed.
    """

    name: str
    covered: str
    risk: str
    unnoticed: str = ""


CHECKPOINT = "checkpoint/"
_FITS = "a record of the same number from a different run passes"
_RENEWED = "the next attempt writes the file again"
_UNREAD = "the signature of a pruned commit isn't read: no run continues from it, and its record is in the chain"
_OLDER = "an attempt that hasn't committed may have gone back to older settings"
_UNCOMMITTED = (
    "no commit depends on an attempt that hasn't committed; if the attempt changed settings, the snapshot "
    "shows that the record is lost"
)
KINDS = (
    FileKind("run.json", "the file that signed commits name", "the run's name and first commit"),
    FileKind("commits/", "signed commits, and those before them", "an unsigned commit, which trusted keys refuse"),
    FileKind(CHECKPOINT, "the files of signed commits", "nothing: no run uses it"),
    FileKind("signatures/", "the signatures of signed commits", "nothing", _UNREAD),
    FileKind("metrics/", "the copies that belong to signed commits", "the curve of a commit that doesn't count"),
    FileKind("shown/", "the copies that belong to signed commits", "the texts of a commit that doesn't count"),
    FileKind("folders/", "the folders of signed commits", "the record of the commit that may use the folder",
             "the record of a different run differs only in its time"),
    FileKind("attempts/", "the attempts that trained signed commits", "a hold or a release; machine, code and start "
             "of an attempt that hasn't committed", _UNCOMMITTED),
    FileKind("configs/", "the settings that signed commits name", "settings with which no signed commit was trained"),
    FileKind(SNAPSHOT, "the settings of the newest signed commit", "which checkpoints a prune keeps", _OLDER),
    FileKind("skips/", "a signed list, and those that signed commits name", "steps to skip: trusted keys refuse it"),
    FileKind("latest.json", "", "a hint at the newest commit", _RENEWED),
    FileKind("endings/", "", "the reason why an attempt ended, which decides whether a further attempt follows", _FITS),
    FileKind("quarantine/", "", "the quarantine of a commit: the run goes back to a commit before it", _FITS),
    FileKind("pruned/", "", "the deletion of a checkpoint, now or by the next prune", _FITS),
    FileKind("pins/", "", "the pin by which a prune keeps a checkpoint", _FITS),
    FileKind("audits/", "", "the proof that a commit is right, or that a machine computes wrongly", _FITS),
    FileKind("answers/", "", "a person's answer to the verdict of audits", _FITS),
    FileKind("rehearsals/", "", "the steps that the next attempt must train exactly", _FITS),
    FileKind("index/", "", "the list by which a lost record is noticed", f"no entry lists the newest entry; in the "
                                        f"earlier entries {_FITS}"),
    FileKind("prunes/", "", "the report of a prune", _RENEWED),
    FileKind("sinks/", "", "the last step whose metrics were sent", "without it Weights & Biases may get a second run"),
    FileKind("report.html", "", "nothing: no program reads this page", _RENEWED),
)  # fmt: skip
# The loss that no file of the run shows.
ABSENT = "commits after the newest signed one, deleted with every trace of them, or the whole run in an older state"


@dataclass
class Coverage:
    """The files of a run that signatures cover and those that they don't, by the name of their kind.

    Attributes:
        newest: the number of the newest signed commit; 0 if no commit is signed.
    """

    newest: int = 0
    covered: dict[str, list[str]] = field(default_factory=dict)
    uncovered: dict[str, list[str]] = field(default_factory=dict)

    def describe(self) -> list[str]:
        """Return a line for each kind in each of the two lists."""
        lines = [f"covered: {_count(files)}" for files in self.covered.values()]
        risks = {kind.name: kind.risk for kind in KINDS}
        lines += [
            f"not covered: {_count(files)}: {risks.get(name, 'a file that is no record')}"
            for name, files in self.uncovered.items()
        ]
        return [*lines, f"not covered: {ABSENT}; the newest signed commit is {self.newest}"]


def find_coverage(
    journal: Journal, commits: Sequence[Commit], signed: Sequence[Commit], quarantined: Collection[int],
    elsewhere: int = 0, more: Iterable[str] = (),
) -> Coverage:  # fmt: skip
    """Return which files of a run the signatures of these commits cover.

    Args:
        commits: all commits of the run that can be read, oldest first.
        signed: the commits with a valid signature; only commits that count and aren't pruned need one.
        quarantined: the numbers of the quarantined commits.
        elsewhere: see `hash_rested`.
        more: further files with a valid signature: a skip list and its signature.
    """
    newest = max((each.number for each in signed), default=0)
    linked = _list_linked(commits, signed, quarantined)
    counting = [each for each in linked if each.number not in quarantined]
    hashed = hash_rested(counting, elsewhere)
    covered = {*more, *(name for name, sha256 in hashed.items() if sha256), *_list_files(counting)}
    covered |= {record_name("commits", each.number) for each in linked}
    covered |= {signature_name(each.number, each.attempt) for each in signed}
    if counting and is_of(journal, counting[-1]):
        covered.add(SNAPSHOT)
    found = Coverage(newest)
    for name in _walk(journal):
        lists = found.covered if name in covered else found.uncovered
        lists.setdefault(name_kind(name), []).append(name)
    order = {kind.name: place for place, kind in enumerate(KINDS)}
    for lists in (found.covered, found.uncovered):
        for name in sorted(lists, key=lambda each: order.get(each, len(order))):
            lists[name] = lists.pop(name)
    return found


def hash_rested(commits: Iterable[Commit], elsewhere: int = 0) -> dict[str, str]:
    """Return the names of the records that commits depend on, each with the SHA-256 that the newest commit names.

    The SHA-256 is empty if no commit names it, as for all records but settings in the commits of earlier versions. The
    next attempt rewrites a damaged record, so later commits name a different SHA-256.

    Args:
        commits: the commits, oldest first.
        elsewhere: in an unpacked run, the number of the first commit, whose attempt's record is in the original run;
            else 0.
    """
    wanted: dict[str, str] = {}
    for commit in commits:
        names = {config_name(commit.config_fingerprint): ""} | commit.records
        if commit.number == elsewhere:
            # a packed checkpoint contains only this record of the settings
            names = {name: names[name] for name in [config_name(commit.config_fingerprint)]}
        else:
            names.setdefault(record_name("attempts", commit.attempt), "")
        wanted |= {name: sha256 for name, sha256 in names.items() if sha256 or name not in wanted}
    return wanted


def _list_linked(commits: Sequence[Commit], signed: Sequence[Commit], quarantined: Collection[int]) -> list[Commit]:
    """Return the signed commits, and those whose records' hashes are in a chain of records from a signed commit."""
    numbers = {each.number for each in signed}
    linked: list[Commit] = []
    for commit in reversed(commits):
        if commit.number in numbers:
            linked.append(commit)
            numbers |= set() if commit.number in quarantined else {commit.number - 1}
    return linked[::-1]


def _list_files(commits: Iterable[Commit]) -> Iterable[str]:
    """Yield the names of the files whose content follows from the records of these commits."""
    for commit in commits:
        yield from (metrics_name(commit.number), shown_name(commit.number), folder_record_name(commit.path))
        yield from (f"{commit.path}/{file.name}" for file in commit.files)


def _walk(journal: Journal) -> Iterable[str]:
    for name in journal.store.list():
        inner = journal.store.list(name)
        yield from (f"{name}/{each}" for each in inner) if inner else [name]


def name_kind(name: str) -> str:
    """Return the name of the kind of a file in a run's folder; for a file that is no record, the name itself."""
    folder, slash, _ = name.partition("/")
    known = {kind.name for kind in KINDS}
    return name if name in known else folder + slash if folder + slash in known or not slash else CHECKPOINT


def _count(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} files, {names[0]} to {names[-1]}"
