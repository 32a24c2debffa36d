"""The replay of the steps in which two trainings differ first, with a checksum of each tensor in every step."""

from dataclasses import dataclass

from holdfast.comparison.ancestry import Ancestry
from holdfast.comparison.report import Replay
from holdfast.errors import HoldfastError
from holdfast.journal import Commit
from holdfast.replay import Trail, read_trail, replayed
from holdfast.trail import Difference, find_first


@dataclass(frozen=True)
class _Replayed:
    replay: Replay
    trail: Trail


def replay_both(
    one: Ancestry, other: Ancestry, pair: tuple[Commit, Commit], after: int
) -> tuple[list[Replay], Difference | None, list[str]]:
    """Train the steps up to two commits again, each from the last checkpoint that both have in common if possible.

    Args:
        pair: the commits up to which to train: the first that reach the first difference.
        after: the last step at which both have one content id.

    Returns:
        The replays; the first difference between their trails, which name every tensor; and notes.
    """
    found: list[_Replayed] = []
    for line, commit in zip((one, other), pair, strict=True):
        try:
            found.append(_replay(line, commit, after))
        except HoldfastError as error:
            return [each.replay for each in found], None, [f"{line.label} wasn't trained again: {error}"]
    left, right = found
    replays = [left.replay, right.replay]
    return replays, find_first(left.trail, right.trail), _judge(replays, (one.label, other.label))


def _replay(line: Ancestry, commit: Commit, after: int) -> _Replayed:
    start = _choose_start(line, commit, after)
    with replayed(line.journal, start, commit) as (saved, folder, _):
        replay = Replay(
            commit=commit.number, start=start.step if start else 0, stop=commit.step,
            expected=commit.checkpoint_sha256, found=saved.metadata.checkpoint_sha256,
        )  # fmt: skip
        return _Replayed(replay, read_trail(folder, saved.path))


def _choose_start(line: Ancestry, commit: Commit, after: int) -> Commit | None:
    """Return the commit to begin with: not before step ``after``, and not before a change of settings."""
    start = line.find_parent(commit)
    while start is not None and start.step > after and start.config_fingerprint == commit.config_fingerprint:
        start = line.find_parent(start)
    return start


def _judge(replays: list[Replay], labels: tuple[str, str]) -> list[str]:
    """Return a note if a replay isn't what was committed, so that settings, code and machine don't explain it."""
    wrong = [label for replay, label in zip(replays, labels, strict=True) if not replay.is_identical]
    if len(wrong) == 1:
        return [f"{wrong[0]} doesn't follow from its settings, code and data on this machine, and the other one does"]
    if wrong:
        return ["neither follows from its settings, code and data on this machine: look at the machine and the code"]
    return []
