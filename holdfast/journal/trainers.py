"""The attempts and machines that trained a commit, and whether its training may have begun with a resume."""

from collections.abc import Sequence

from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal.journal import Journal
from holdfast.journal.records import AttemptRecord, Commit, record_name

# NODES: the key of the number of nodes in the lineage of an attempt on several nodes. OTHER_NODE: a name for nodes that
# no record names.
NODES = "nodes"
OTHER_NODE = "another node"


def list_machines(commit: Commit, attempts: Sequence[AttemptRecord]) -> frozenset[str]:
    """Return the hosts that may have trained a commit: its ranks' hosts or, without these, its attempts' hosts.

    In earlier versions a commit of several nodes didn't name the nodes, and its attempt names only node 0. Then the
    result has `OTHER_NODE` in place of the other nodes.

    Args:
        attempts: the attempts of which one has trained the commit.
    """
    if commit.hosts:
        return frozenset(commit.hosts)
    others = {OTHER_NODE} if any(each.lineage.get(NODES) for each in attempts) else set()
    return frozenset({each.host for each in attempts} | others)


def list_trainers(journal: Journal, commit: Commit) -> list[AttemptRecord]:
    """Return the attempts that may have trained a commit.

    Raises:
        NameMissing: an attempt's record is lost, or belongs to the run from which this commit was unpacked.
        RecordDamaged: an attempt's record is damaged, or no attempt that trains can have trained the commit.
        Unreadable: an attempt's record can't be read.
    """
    if journal.is_unpacked(commit):
        raise NameMissing(f"run {journal.run!r} has no record of the machine that trained commit {commit.number}")
    first = commit.attempt
    if commit.why == "adopted":
        # The ranks of an earlier attempt trained the commit. If several attempts began since the parent's commit, no
        # record says which attempt's ranks that were.
        first = journal.first_attempt_after(journal.find_parent(commit))
    attempts = [_read_committed(journal, commit, number) for number in range(first, commit.attempt + 1)]
    trainers = [attempt for attempt in attempts if attempt.is_training]
    if not trainers:
        name = record_name("commits", commit.number)
        raise RecordDamaged(f"{name} says that attempt {commit.attempt} trained it, which is impossible")
    return trainers


def _read_committed(journal: Journal, commit: Commit, number: int) -> AttemptRecord:
    """Return the record of an attempt that trained a commit.

    Raises:
        RecordDamaged: the record isn't the one that the commit names.
    """
    name = record_name("attempts", number)
    record, expected = journal.read_attempt(number), commit.records.get(name, "")
    if expected and journal.hash_once(name) != expected:
        raise RecordDamaged(
            f"{name} was changed after commit {commit.number} was made",
            hint="holdfast verify names the changed records",
        )
    return record


def read_machines(journal: Journal, commit: Commit) -> frozenset[str]:
    """Return the hosts that may have trained a commit; see `list_machines`.

    Raises:
        NameMissing, RecordDamaged, Unreadable: an attempt's record can't be read.
    """
    return list_machines(commit, list_trainers(journal, commit))


def may_follow_resume(parent: Commit, commit: Commit) -> bool:
    """Return whether the training of a commit's steps may have begun with a resume from the commit's parent.

    If two commits of one attempt differ in ``restart_s``, the attempt restarted its ranks between them. For an adopted
    commit return True, because no record says when the ranks that saved its checkpoint were started.
    """
    times = {parent.restart_s, commit.restart_s} - {0.0}
    return parent.attempt != commit.attempt or "adopted" in (parent.why, commit.why) or len(times) > 1
