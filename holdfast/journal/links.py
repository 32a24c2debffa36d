"""How a commit is linked to what came before it. Resume and verification share these rules."""

from holdfast.journal.records import Commit, record_name


def broken_links(commit: Commit, before: Commit | None, before_sha256: str, parent: Commit | None) -> list[str]:
    """Return a line for each link of a commit that is broken. A record that is lost breaks no link.

    Args:
        before: commit number - 1; None where there is none that can be read.
        before_sha256: of the bytes of its record.
        parent: the commit that the commit names as its parent; None where there is none that can be read.
    """
    name, problems = record_name("commits", commit.number), []
    if before is not None and commit.previous_record_sha256 != before_sha256:
        problems.append(f"{name} was made after another {record_name('commits', before.number)}")
    if commit.parent >= commit.number:
        problems.append(f"{name} was trained from commit {commit.parent}, which is later")
    elif parent is not None and parent.checkpoint_sha256 != commit.previous_checkpoint_sha256:
        problems.append(f"{name} was trained from another checkpoint than that of commit {parent.number}")
    return problems
