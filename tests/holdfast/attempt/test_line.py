"""The line of commits: what is taken up again after a loss, what is given up, and who may."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import Line
from holdfast.checkpoint import METADATA, METRICS, PAYLOAD, Saved
from holdfast.config import Retention
from holdfast.errors import CheckpointDamaged, NameTaken, NotTrusted, NoVerifiedCheckpoint, Superseded
from holdfast.journal import AuditRecord, Commit, Journal, metrics_name, now, signature_name
from holdfast.journal.audits import record_audit
from holdfast.journal.exactness import describe_resume
from holdfast.journal.signing import check_signed
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.provenance.fingerprint import fingerprint
from holdfast.store.local import LocalStore
from tests.support.makers import (
    IDENTITY,
    STEPS_PER_EPOCH,
    Keys,
    assert_good,
    claim,
    damage,
    make_latest,
    make_line,
    resume,
    root,
    save,
    save_next,
    train,
)


def killed(*_arguments: object) -> None:
    raise KeyboardInterrupt


def save_after(line: Line, saved: Saved, steps: int = 10) -> Saved:
    """What ranks save next while the chunk before is not committed yet."""
    return save(line.journal.store, saved.step + steps, saved.metadata.checkpoint_sha256, steps=steps)


def make_line_of(store: LocalStore, attempt: int, **compute: Any) -> Line:
    """Continue a run with these settings of the ranks; return the line of its next attempt, not resumed yet."""
    journal, identity = Journal(store, "run"), IDENTITY | {"compute": compute}
    journal.begin("m:f")
    claim(journal, attempt)
    journal.record_config(fingerprint(identity), identity, {})
    return Line(journal, attempt, fingerprint(identity), STEPS_PER_EPOCH)


def test_what_another_number_of_ranks_has_saved_is_adopted(store: LocalStore) -> None:
    """Neither the head's attempt had this number of ranks, nor has the one that adopts."""
    first = make_line_of(store, 1, ranks=4)
    resume(first)
    train(first, config_fingerprint=first.config_fingerprint)
    second = make_line_of(store, 2, ranks=2)
    resume(second)
    saved = save_next(second, config_fingerprint=second.config_fingerprint)
    third = make_line_of(store, 3, ranks=1)
    resume(third)
    assert third.head
    assert (third.head.why, third.head.step) == ("adopted", saved.step)
    assert third.head.config_fingerprint == second.config_fingerprint


def test_an_orphan_of_other_settings_is_not_adopted(store: LocalStore) -> None:
    virtual = make_line_of(store, 1, virtual_ranks=4)
    save_next(virtual, config_fingerprint=virtual.config_fingerprint)
    other = make_line_of(store, 2, ranks=4)
    resume(other)
    assert other.head is None


def test_what_is_read_wrong_once_is_not_quarantined(line: Line) -> None:
    answers = [CheckpointDamaged("read wrong"), None]
    line.resume(lambda commit: answers.pop(0))
    assert line.head
    assert (line.head.number, answers, line.journal.numbers("quarantine")) == (2, [], [])


def test_what_is_damaged_is_quarantined_and_passed_over(line: Line, store: LocalStore) -> None:
    damage(line, "epoch-0002")
    after = make_line(store)
    assert after.head
    assert (after.head.number, after.next_number, after.journal.numbers("quarantine")) == (1, 3, [2])
    assert "epoch-0002" in after.journal.quarantine_reasons()[0]
    again = train(after)
    assert (again.number, again.parent, again.path) == (3, 1, "epoch-0002.2")
    assert verify_run(line.journal).ok


def test_only_who_owns_the_run_may_quarantine(line: Line) -> None:
    damage(line, "epoch-0002")
    claim(line.journal, 2)
    with pytest.raises(Superseded):
        resume(line)
    assert line.journal.numbers("quarantine") == []


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_writer_whose_checkpoint_a_later_attempt_has_pruned_is_superseded(
    line: Line, store: LocalStore, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    saved, publish = save_next(line), line.journal.publish_commit

    def overtake() -> None:
        later = make_line(store)  # which adopts the checkpoint, if it isn't committed yet
        train(later)
        prune_by_policy(later.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
        assert not (root(line) / saved.path).exists()

    def publish_slowly(commit: Commit, envelope: bytes | None = None) -> Commit:
        commit = publish(commit, envelope)
        overtake()
        return commit

    if is_recorded:
        monkeypatch.setattr(line.journal, "publish_commit", publish_slowly)
    else:
        overtake()
    with pytest.raises(Superseded, match="attempt 1 of run 'run' is superseded by attempt 2"):
        line.commit(saved, "chunk")
    assert verify_run(line.journal).problems == []


def test_a_checkpoint_that_vanished_under_its_only_writer_is_damaged(line: Line) -> None:
    saved = save_next(line)
    shutil.rmtree(root(line) / saved.path)
    with pytest.raises(CheckpointDamaged, match="missing"):
        line.commit(saved, "chunk")


def test_when_nothing_verifies_the_reasons_are_listed(line: Line, store: LocalStore) -> None:
    damage(line, "epoch-0001")
    (root(line) / "epoch-0002" / PAYLOAD).unlink()
    with pytest.raises(NoVerifiedCheckpoint) as caught:
        make_line(store)
    said = str(caught.value).splitlines()
    assert said[0] == "run 'run' has commits, but none of its checkpoints can be verified:"
    assert [row.split()[1] for row in said[1:]] == ["epoch-0001", "epoch-0002"]
    assert f"epoch-0002/{PAYLOAD} is missing" in said[2]


def test_when_all_commits_are_lost_nothing_is_begun_anew(line: Line, store: LocalStore) -> None:
    """The checkpoints are there, but trained from something that nobody knows."""
    for path in (root(line) / "commits").iterdir():
        path.unlink()
    (root(line) / "epoch-0001" / PAYLOAD).unlink()
    with pytest.raises(NoVerifiedCheckpoint):
        make_line(store)


def test_metrics_that_a_kill_left_out_are_mended(line: Line, store: LocalStore) -> None:
    path = root(line) / "metrics/00000002.jsonl"
    good = path.read_bytes()
    path.unlink()
    make_line(store)
    assert path.read_bytes() == good
    assert_good(store)


def test_metrics_are_mended_before_an_orphan_is_adopted_on_top(line: Line, store: LocalStore) -> None:
    """They are the newest commit's no more after it, and nobody would look at them again."""
    save_next(line)
    (root(line) / "metrics/00000002.jsonl").unlink()
    after = make_line(store)
    assert after.head
    assert (after.head.number, after.head.why) == (3, "adopted")
    assert_good(store)


def test_metrics_are_not_mended_with_what_was_not_committed(line: Line, store: LocalStore) -> None:
    damage(line, "epoch-0002", METRICS)
    (root(line) / "metrics/00000002.jsonl").unlink()
    make_line(store)
    assert not (root(line) / "metrics/00000002.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path, stale: path.unlink(), "was missing or damaged"),
        (lambda path, stale: path.write_bytes(b"{"), "was missing or damaged"),
        (lambda path, stale: path.write_bytes(stale), "named commit 1"),
    ],
    ids=["missing", "damaged", "stale"],
)
def test_latest_is_renewed_with_a_warning(
    line: Line,
    store: LocalStore,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path, bytes], None],
    said: str,
) -> None:
    path = root(line) / "latest.json"
    good = path.read_bytes()
    change(path, make_latest(line.journal.read_commit(1)).to_bytes())
    make_line(store)
    assert f"run 'run': latest.json {said}; rewrote it to name commit 2" in caplog.text
    assert path.read_bytes() == good


def test_latest_that_is_right_is_left_alone(
    line: Line, store: LocalStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "publish_latest", None)
    with caplog.at_level(logging.INFO):
        make_line(store)
    assert caplog.text == ""


def test_a_chain_of_saved_checkpoints_is_adopted(line: Line, store: LocalStore) -> None:
    saved = [save_next(line)]
    for steps in (3, 7):
        saved.append(save_after(line, saved[-1], steps))
    after = make_line(store)
    commits = [after.journal.read_commit(number) for number in (3, 4, 5)]
    assert [(commit.path, commit.parent, commit.why, commit.attempt) for commit in commits] == [
        ("epoch-0003", 2, "adopted", 2), ("epoch-0004-step-00000033", 3, "adopted", 2), ("epoch-0004", 4, "adopted", 2),
    ]  # fmt: skip
    assert (after.head, after.next_number) == (commits[-1], 6)
    assert_good(store)


def test_what_a_run_saved_before_its_first_commit_is_adopted(store: LocalStore) -> None:
    line = make_line(store)
    save_next(line)
    head = make_line(store).head
    assert head
    assert (head.number, head.parent, head.step) == (1, 0, 10)
    assert_good(store)


def test_what_cannot_be_loaded_is_adopted_once_and_given_up(line: Line, store: LocalStore) -> None:
    """Its bytes are those that were saved, and yet it can't be restored."""
    saved = save_next(line)
    after = Line(line.journal, 1, line.config_fingerprint, line.steps_per_epoch)
    after.resume(lambda commit: CheckpointDamaged("no state") if commit.path == saved.path else None)
    assert after.head
    assert (after.head.number, after.journal.numbers("quarantine")) == (2, [3])
    assert make_line(store).head == after.head
    assert after.journal.newest_number() == 3


def test_what_is_incomplete_or_of_another_line_is_not_adopted(line: Line, store: LocalStore) -> None:
    damage(line, save_next(line).path)
    save(line.journal.store, 40, "f" * 64)
    save(line.journal.store, 50, line.head.checkpoint_sha256 if line.head else "", config_fingerprint="f" * 64)
    head = make_line(store).head
    assert head
    assert head.number == 2


def test_who_is_superseded_adopts_nothing(line: Line) -> None:
    save_next(line)
    claim(line.journal, 2)
    with pytest.raises(Superseded):
        resume(line)
    assert line.journal.newest_number() == 2


@pytest.mark.parametrize(
    ("trail", "said"),
    [
        (range(1, 31), "its trail begins with step 1 and not with step 21"),
        (range(22, 31), "its trail begins with step 22 and not with step 21"),
        (range(21, 30), "its trail ends with step 29 and not with step 30"),
        ([21, 22, 24, *range(25, 31)], "has step 24 after step 22"),
        ([*range(21, 30), 29, 30], "has step 29 after step 29"),
        ([], "its trail has no step"),
        (["x"], "has a line that isn't a step's metrics"),
    ],
)
def test_an_orphan_goes_on_where_its_parents_trail_ends(
    line: Line, store: LocalStore, trail: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it says of its parent can be rewritten, and sealed again; its steps must be there, too."""
    saved = save_next(line)
    (root(line) / saved.path / METRICS).write_text("".join(f'{{"step": {step}}}\n' for step in trail))
    head = make_line(store).head
    assert head
    assert head.number == 2
    assert f"{saved.path} is not adopted: " in caplog.text
    assert said in caplog.text


def test_an_orphan_of_another_run_is_not_adopted_under_a_new_seal(line: Line, store: LocalStore) -> None:
    """It was trained as far as here in another run with equal settings, and now says that it comes from here."""
    other = make_line(store, "other")
    saved = save(other.journal.store, 30, "f" * 64, steps=30)
    assert line.head
    forged = saved.metadata.model_copy(update={"previous_checkpoint_sha256": line.head.checkpoint_sha256})
    shutil.copytree(store.root / "other" / saved.path, root(line) / saved.path)
    (root(line) / saved.path / METADATA).write_bytes(forged.to_bytes())
    head = make_line(store).head
    assert head
    assert head.number == 2


def test_a_number_that_was_taken_meanwhile_is_followed(
    line: Line, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier attempt had looked at the fence just before it was claimed, and commits after all."""
    dead = line
    saved = save_next(dead)
    claim(line.journal, 2)
    alive = Line(Journal(store, "run"), 2, dead.config_fingerprint, dead.steps_per_epoch)
    with monkeypatch.context() as undone:
        undone.setattr(Line, "_adopt", lambda self: False)
        resume(alive)
    theirs = save(alive.journal.store, 23, alive.head.checkpoint_sha256 if alive.head else "")
    with monkeypatch.context() as undone:
        undone.setattr(Journal, "check_fence", lambda self, attempt: None)
        undone.setattr(Journal, "publish_copy", killed)
        with pytest.raises(KeyboardInterrupt):
            dead.commit(saved, "chunk")
    with pytest.raises(NameTaken):
        alive.commit(theirs, "chunk")
    followed = alive.follow()
    assert (followed.number, followed.path) == (3, saved.path)
    latest = alive.journal.read_latest()
    assert latest
    assert latest.commit == 3
    assert alive.journal.store.exists(metrics_name(3))
    assert train(alive).number == 4
    assert verify_run(Journal(store, "run")).ok


def test_what_is_not_signed_is_not_trusted_and_stays(line: Line, store: LocalStore, keys: Keys) -> None:
    (mine, trusted), (_, another) = keys
    with pytest.raises(NotTrusted, match="commit 2 of run 'run' is not signed"):
        make_line(store, trusted_keys=[trusted])
    signing = make_line(store, signing_key=mine)
    train(signing)
    with pytest.raises(NotTrusted, match="was not made with a trusted key"):
        make_line(store, trusted_keys=[another])
    assert signing.journal.numbers("quarantine") == []
    assert make_line(store, trusted_keys=[another, trusted]).head == signing.head


def test_nothing_is_loaded_before_it_is_trusted(line: Line, keys: Keys) -> None:
    """Loading is what a stranger's bytes could be made for."""
    cautious = Line(line.journal, 1, line.config_fingerprint, line.steps_per_epoch, trusted_keys=[keys[0][1]])
    loaded: list[Commit] = []
    with pytest.raises(NotTrusted):
        cautious.resume(lambda commit: loaded.append(commit))
    assert loaded == []


def test_nobody_vouches_for_orphans(store: LocalStore, keys: Keys) -> None:
    mine, trusted = keys[0]
    line = make_line(store, signing_key=mine, trusted_keys=[trusted])
    train(line)
    saved = save_next(line)
    after = make_line(store, signing_key=mine, trusted_keys=[trusted])
    assert after.head == line.head
    again = train(after)
    assert again.checkpoint_sha256 == saved.metadata.checkpoint_sha256  # trained again
    assert (saved.path, again.path) == ("epoch-0002", "epoch-0002.2")  # equal, but for who has saved it
    assert_good(store, trusted, notes=("epoch-0002 is named by no commit",))


def test_what_was_damaged_falls_back_to_what_is_signed(store: LocalStore, keys: Keys) -> None:
    mine, trusted = keys[0]
    line = make_line(store, signing_key=mine)
    for _ in range(2):
        train(line)
    damage(line, "epoch-0002")
    head = make_line(store, trusted_keys=[trusted]).head
    assert head
    assert head.number == 1


class LaterCommit(Commit):
    """As a later version may write it."""

    more: str = "that this version doesn't know"


def test_the_signature_is_over_the_record_as_it_lies_there(line: Line, keys: Keys) -> None:
    signing, trusted = keys[0]
    commit = line.journal.read_commit(2)
    record = LaterCommit(**commit.model_dump()).to_bytes()
    files = {f"{commit.path}/{file.name}": file.sha256 for file in commit.files}
    line.journal.store.replace("commits/00000002.json", record)
    envelope = signing.sign("run", "commits/00000002.json", record, files)
    line.journal.store.replace(signature_name(commit.number, commit.attempt), envelope)
    check_signed(line.journal, commit, [trusted])
    with pytest.raises(NotTrusted, match=r"commits/00000002.json changed while it was read"):
        check_signed(line.journal, commit.model_copy(update={"step": 21}), [trusted])


def test_a_resume_is_unproved_until_an_audit_has_trained_straight_through_it(line: Line) -> None:
    line.note_unproved()
    commits = [train(line), train(line)]
    assert [commit.unproved for commit in commits] == [[3], [3]]
    assert commits[1].verdict.startswith("not rehearsed; unproved: commit 3 begins after a stop or a kill")
    audit = AuditRecord(
        commit=3, number=1, from_commit=1, checkpoint_sha256=commits[0].checkpoint_sha256, notes=[], host="another",
        environment={}, created_at=now(),
    )  # fmt: skip
    record_audit(line.journal, audit)  # it began with the resume
    assert train(line).unproved == [3]
    record_audit(line.journal, audit.model_copy(update={"resumes": [2 * STEPS_PER_EPOCH]}))
    assert describe_resume(line.journal, commits[1]) == "not rehearsed", "also if nothing is trained any more"
    assert train(line).unproved == []
