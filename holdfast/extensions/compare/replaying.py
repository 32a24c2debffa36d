"""The replay of the steps in which two trainings differ first, with a checksum of each tensor in every step."""

from dataclasses import dataclass

from holdfast.checkpoint import Lines, read_checkpoint_lines
from holdfast.checkpoint.departure import Difference, find_first
from holdfast.errors import HoldfastError
from holdfast.extensions.compare.ancestry import Ancestry
from holdfast.extensions.compare.report import Replay
from holdfast.journal import Commit
from holdfast.proof.audit import list_notes
from holdfast.proof.replay import replayed
from holdfast.recipe.trust import Trust


@dataclass(frozen=True)
class _Replayed:
    replay: Replay
    trail: Lines
    notes: list[str]


def replay_both(
    one: Ancestry, other: Ancestry, pair: tuple[Commit, Commit], after: int, trusts: tuple[Trust, Trust]
) -> tuple[list[Replay], Difference | None, list[str]]:
    """Train the steps up to two commits again, if possible from the last checkpoint that both trainings share.

    Args:
        pair: for each training, the commit up to which to train: the first commit at or after the first difference.
        after: the last step at which both trainings have the same content id.
        trusts: for each training, the reader's own configuration, or the parts of the run's records to accept.

    Returns:
        The replays; the first difference between their trails, which have a checksum of every tensor; and notes. The
        difference is None if the trails are equal, or if a replay failed; a note then says why it failed.
    """
    found: list[_Replayed] = []
    for line, commit, trust in zip((one, other), pair, trusts, strict=True):
        try:
            found.append(_replay(line, commit, after, trust))
        except HoldfastError as error:
            return [each.replay for each in found], None, [f"{line.label} wasn't trained again: {error}"]
    left, right = found
    notes = [note for line, each in zip((one, other), found, strict=True) for note in _judge(line.label, each)]
    return [left.replay, right.replay], find_first(left.trail, right.trail), notes


def _replay(line: Ancestry, commit: Commit, after: int, trust: Trust) -> _Replayed:
    start = _choose_start(line, commit, after)
    with replayed(line.journal, start, commit, trust) as (saved, folder, present):
        replay = Replay(
            commit=commit.number, start=start.step if start else 0, stop=commit.step,
            expected=commit.checkpoint_sha256, found=saved.metadata.checkpoint_sha256,
        )  # fmt: skip
        return _Replayed(replay, read_checkpoint_lines(folder, saved.path), list_notes(line.journal, commit, present))


def _judge(label: str, found: _Replayed) -> list[str]:
    """Return the reasons why a replay doesn't give the committed bytes; an empty list if it gives these bytes."""
    if found.replay.is_identical:
        return []
    if found.notes:
        return [f"equal bits aren't promised here for {label}: {note}" for note in found.notes]
    return [f"trained again, {label} gives different bytes, with the settings, code, data and machine on record"]


def _choose_start(line: Ancestry, commit: Commit, after: int) -> Commit | None:
    """Return the commit with which the replay of a commit begins; None for the beginning of the run.

    It is the newest ancestor whose step is at most ``after``, or whose settings differ from those of ``commit``.
    """
    start = line.find_parent(commit)
    while start is not None and start.step > after and start.config_fingerprint == commit.config_fingerprint:
        start = line.find_parent(start)
    return start
