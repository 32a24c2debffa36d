"""`holdfast compare`: find the first difference between two trainings, and the changes that explain it."""

from typing import Any

from holdfast import checkpoint
from holdfast.checkpoint.departure import Difference, causes_first, find_first
from holdfast.errors import HoldfastError, WrongUse
from holdfast.extensions.compare.ancestry import Ancestry, find_common_steps
from holdfast.extensions.compare.ends import describe_end, find_ended_side, leave_out_ends
from holdfast.extensions.compare.replaying import replay_both
from holdfast.extensions.compare.report import Comparison, Side
from holdfast.extensions.compare.suspects import Evidence, Suspect, find_evidence, list_changes, rank
from holdfast.journal import Commit, Journal
from holdfast.journal.chains import list_certified
from holdfast.proof.differing import to_fields
from holdfast.recipe.trust import BY_DEFAULT, Trust

Pair = tuple[Commit, Commit]


def compare_trainings(
    one: Ancestry, other: Ancestry, *, is_replayed: bool = False, trusts: tuple[Trust, Trust] = (BY_DEFAULT, BY_DEFAULT)
) -> Comparison:
    """Compare two trainings: content ids at steps where both have a checkpoint, and trails at every step.

    At a step where only one training has a checkpoint, only the trails are compared. At the end of an epoch, too, only
    the trails are compared if the loop's code for the epoch's end ran before one checkpoint and after the other.

    Args:
        is_replayed: whether to train the steps of the first difference again, in fresh processes on this machine, to
            find the first tensor that differs.
        trusts: for each training, the reader's own configuration, or the parts of the run's records to accept.

    Raises:
        WrongUse: there is no step at which both trainings have a checkpoint, or both have a line of a trail.
    """
    equal, different, common, ends = _compare_content_ids(one, other)
    after = equal[0].step if equal else 0
    until = different[0].step if different else min(one.head.step, other.head.step)
    (trail, notes), (others, more) = one.read_trail(after, until), other.read_trail(after, until)
    if not common and not {line["step"] for line in trail} & {line["step"] for line in others}:
        raise WrongUse(
            f"{one.label} and {other.label} can't be compared: they have no checkpoints at the same step, and a trail "
            "(the log of each step) is lost",
            hint="holdfast verify shows what is left of each run",
        )
    trail, others = leave_out_ends(trail, [*ends]), leave_out_ends(others, [*ends])
    first = find_first(trail, others)
    shown = different or equal
    known: dict[str, Any] = {
        "one": _describe_side(one, shown[0] if shown else None, differs=different is not None),
        "other": _describe_side(other, shown[1] if shown else None, differs=different is not None),
        "equal_until": after, "common": common, "compared_until": until,
    }  # fmt: skip
    notes = [*one.missing, *other.missing, *ends.values(), *notes, *more]
    if first is None and different is None:
        suspects = _rank(one, other, equal or (one.head, other.head), None)
        return Comparison(**known, is_equal=True, suspects=suspects, notes=notes)
    if different is not None:
        known |= {"different_at": different[0].step, "different": _compare_states(one, other, different, notes)}
    pair = (one.find_reaching(first.step), other.find_reaching(first.step)) if first else different
    assert pair is not None
    suspects = _rank(one, other, pair, find_evidence(first, _find_values(first, trail, others)))
    notes += [*_note_changed_settings(one, pair[0]), *_note_changed_settings(other, pair[1])]
    if is_replayed:
        known["replays"], in_detail, more = replay_both(one, other, pair, after, trusts)
        first, notes = in_detail or first, notes + more
    known |= _describe_first(first, _find_values(first, trail, others))
    return Comparison(**known, is_equal=False, suspects=suspects, notes=list(dict.fromkeys(notes)))


def _rank(one: Ancestry, other: Ancestry, pair: Pair, evidence: Evidence | None) -> list[Suspect]:
    """Return the recorded differences between two commits, the best explanations of the first difference first."""
    changes = list_changes(one.read_past(pair[0]), other.read_past(pair[1]), _read_configs(one, other, pair))
    return rank(changes, evidence)


def _compare_content_ids(one: Ancestry, other: Ancestry) -> tuple[Pair | None, Pair | None, int, dict[int, str]]:
    """Compare the commits at common steps.

    Returns:
        The last pair of commits with equal content ids before the first difference, or None; the first pair with
        different content ids, or None; the number of steps whose states can be compared; and a note for each step whose
        states can't be compared, because only one of the trainings has run the code at the epoch's end.
    """
    equal: Pair | None = None
    ends: dict[int, str] = {}
    pairs = list(find_common_steps(one, other))
    for pair in pairs:
        if pair[0].checkpoint_sha256 == pair[1].checkpoint_sha256:
            equal = pair
        elif ended := find_ended_side(one, other, pair):
            ends[pair[0].step] = describe_end(ended, other if ended is one else one, pair[0].step)
        else:
            return equal, pair, len(pairs) - len(ends), ends
    return equal, None, len(pairs) - len(ends), ends


def _compare_states(one: Ancestry, other: Ancestry, pair: Pair, notes: list[str]) -> list[str]:
    """Return the names of the values that differ in two checkpoints. Add a note if either is pruned or unreadable."""
    for line, commit in zip((one, other), pair, strict=True):
        if line.journal.is_pruned(commit.number):
            notes.append(
                f"the tensors at step {commit.step} weren't compared: the checkpoint of {line.label} was pruned"
            )
            return []
    try:
        states = [
            checkpoint.read_payload(line.journal.store, commit)
            for line, commit in zip((one, other), pair, strict=True)
        ]  # fmt: skip
    except HoldfastError as error:
        notes.append(f"the tensors at step {pair[0].step} weren't compared: {error}")
        return []
    return sorted(checkpoint.differences(*states), key=causes_first)


def _find_values(first: Difference | None, *trails: checkpoint.Lines) -> tuple[Any, Any]:
    """Return the two values of the first field that differs; (None, None) if the trails have only its checksums."""
    if first is None:
        return None, None
    one, other = (next((line for line in trail if line["step"] == first.step), {}) for trail in trails)
    return one.get(first.fields[0]), other.get(first.fields[0])


def _describe_first(first: Difference | None, values: tuple[Any, Any]) -> dict[str, Any]:
    if first is None:
        return {}
    return to_fields(first) | ({"first_values": list(values)} if None not in values else {})


def _describe_side(line: Ancestry, commit: Commit | None, *, differs: bool) -> Side:
    certified = list_certified(line.journal, {commit.number: commit}) if commit else {}
    return Side(
        label=line.label, commit=line.head.number, step=line.head.step,
        first=commit.number if commit and differs else 0, content_id=commit.checkpoint_sha256 if commit else "",
        certified_by=certified.get(commit.number, "") if commit else "",
    )  # fmt: skip


def _note_changed_settings(line: Ancestry, commit: Commit) -> list[str]:
    """Return a list: one note if the settings changed between a commit and its parent; else no note."""
    parent = line.find_parent(commit)
    if parent is None or parent.config_fingerprint == commit.config_fingerprint:
        return []
    run = f"{line.journal.store_url}/{line.journal.run}"
    return [f"{line.label} changed its settings at step {parent.step}: holdfast diff {run}"]


def _read_configs(one: Ancestry, other: Ancestry, pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all settings of two commits; two empty dicts if the settings of either commit are lost."""
    left, right = _read_config(one.journal, pair[0]), _read_config(other.journal, pair[1])
    return (left, right) if left and right else ({}, {})


def _read_config(journal: Journal, commit: Commit) -> dict[str, Any]:
    """Return all settings with which a commit was trained, or an empty dict if they are lost.

    Several configurations may have the commit's fingerprint. Return the run's last configuration if it has this
    fingerprint, else the first configuration on record that has it.
    """
    snapshot = journal.read_snapshot()
    if snapshot is not None and snapshot.fingerprint == commit.config_fingerprint:
        return snapshot.config
    record = journal.read_config(commit.config_fingerprint)
    return record.config if record else {}
