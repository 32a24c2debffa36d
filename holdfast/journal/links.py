"""The links from a commit to its predecessors, which resume and verification check by the same rules."""

from holdfast.journal.records import Commit, record_name


def broken_links(commit: Commit, before: Commit | None, before_sha256: str, parent: Commit | None) -> list[str]:
    """Return a line of text for each broken link of a commit. A lost record doesn't count as a broken link.

    Args:
        before: the commit with the previous number; None if it is missing or can't be read.
        before_sha256: the SHA-256 of that commit's record.
        parent: the commit's parent; None if it is missing or can't be read.
    """
    name, problems = record_name("commits", commit.number), []
    if before is not None and commit.previous_record_sha256 != before_sha256:
        problems.append(f"{name} isn't linked to {record_name('commits', before.number)}")
    if commit.parent >= commit.number:
        problems.append(f"{name} says that its parent is commit {commit.parent}, which is later")
    elif parent is not None and parent.checkpoint_sha256 != commit.previous_checkpoint_sha256:
        problems.append(f"{name} was trained from a different checkpoint than that of commit {parent.number}")
    return problems
