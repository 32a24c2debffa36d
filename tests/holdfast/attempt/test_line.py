"""The line of commits: what is taken up again after a loss, what is given up, and who may."""

import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import Line
from holdfast.attempt import line as line_module
from holdfast.checkpoint import METADATA, METRICS, PAYLOAD, Saved
from holdfast.config import Retention
from holdfast.errors import CheckpointDamaged, NameTaken, NotTrusted, NoVerifiedCheckpoint, Superseded
from holdfast.journal import Commit, Journal, signature_name
from holdfast.journal.signing import check_signed
from holdfast.retention import prune
from holdfast.signature import SigningKey, TrustedKey, generate_key, load_signing_key, load_trusted_key
from holdfast.store.local import LocalStore
from holdfast.verification import verify_run
from tests.support.makers import STEPS_PER_EPOCH, claim, load, make_latest, make_line, resume, save, save_next, train

Keys = list[tuple[SigningKey, TrustedKey]]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


@pytest.fixture
def line(store: LocalStore) -> Line:
    """Two commits."""
    line = make_line(store)
    train(line)
    train(line)
    return line


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    return [make_key(folder / "mine"), make_key(folder / "another")]


def make_key(path: Path) -> tuple[SigningKey, TrustedKey]:
    generate_key(path)
    return load_signing_key(str(path)), load_trusted_key(f"{path}.pub")


def root(line: Line) -> Path:
    return Path(line.journal.store.url)


def damage(line: Line, path: str, name: str = PAYLOAD) -> None:
    file = root(line) / path / name
    file.write_bytes(b"?" + file.read_bytes()[1:])


def save_after(line: Line, saved: Saved, steps: int = 10) -> Saved:
    """What ranks save next while the chunk before is not committed yet."""
    return save(line.journal.store, saved.step + steps, saved.metadata.checkpoint_sha256, steps=steps)


def assert_good(store: LocalStore, *trusted: TrustedKey, notes: tuple[str, ...] = ()) -> None:
    report = verify_run(Journal(store, "run"), everything=True, deep=True, trusted_keys=trusted)
    assert (report.problems, report.notes) == ([], [*notes])


# ---- what can't be loaded


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


def test_when_nothing_verifies_the_reasons_are_listed(line: Line, store: LocalStore) -> None:
    damage(line, "epoch-0001")
    (root(line) / "epoch-0002" / PAYLOAD).unlink()
    with pytest.raises(NoVerifiedCheckpoint) as caught:
        make_line(store)
    said = str(caught.value).splitlines()
    assert said[0] == "run 'run' has committed, but no checkpoint of it can be verified:"
    assert [row.split()[1] for row in said[1:]] == ["epoch-0001", "epoch-0002"]
    assert f"epoch-0002/{PAYLOAD} is missing" in said[2]


def test_when_all_commits_are_lost_nothing_is_begun_anew(line: Line, store: LocalStore) -> None:
    """The checkpoints are there, but trained from something that nobody knows."""
    for path in (root(line) / "commits").iterdir():
        path.unlink()
    (root(line) / "epoch-0001" / PAYLOAD).unlink()
    with pytest.raises(NoVerifiedCheckpoint):
        make_line(store)


# ---- what a kill has left out


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
    assert f"run 'run': latest.json {said}; it names commit 2 again" in caplog.text
    assert path.read_bytes() == good


def test_latest_that_is_right_is_left_alone(
    line: Line, store: LocalStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "publish_latest", None)
    with caplog.at_level(logging.INFO):
        make_line(store)
    assert caplog.text == ""


# ---- what dead ranks had saved


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
        (["x"], "has a line that is no step"),
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


# ---- a commit of another run


@pytest.fixture
def other(store: LocalStore) -> Line:
    """Another run with equal settings, and other data: four commits."""
    line = make_line(store, "other")
    for steps in (11, 9, 10, 10):
        train(line, steps)
    return line


def bring(line: Line, other: Line, *numbers: int) -> None:
    """Commits and checkpoints of the other run lie among those of this one."""
    for number in numbers:
        commit = other.journal.read_commit(number)
        name = f"commits/{number:08d}.json"
        shutil.copy(root(other) / name, root(line) / name)
        shutil.copytree(root(other) / commit.path, root(line) / commit.path, dirs_exist_ok=True)


@pytest.mark.parametrize("numbers", [(3,), (3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("latest", ["as it was", "lost"])
def test_resume_refuses_the_commits_of_another_run(
    line: Line, other: Line, store: LocalStore, numbers: tuple[int, ...], latest: str
) -> None:
    bring(line, other, *numbers)
    if latest == "lost":
        (root(line) / "latest.json").unlink()
    assert not verify_run(Journal(store, "run")).ok
    after = make_line(store)
    assert after.head
    assert after.head.number == numbers[0] - 1
    assert after.journal.numbers("quarantine") == [*numbers]
    assert "it breaks the chain" in after.journal.quarantine_reasons()[0]
    assert train(after).number == numbers[-1] + 1
    assert_good(store)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_record_sha256": "f" * 64}, "commits/00000002.json was made after another commits/00000001.json"),
        ({"previous_checkpoint_sha256": "f" * 64}, "was trained from another checkpoint than that of commit 1"),
        ({"parent": 2}, "was trained from commit 2, which is later"),
        ({"step": 21}, "epoch-0002: step was saved as 20 but committed as 21"),
        ({"epoch": 7}, "epoch-0002: epoch was saved as 2 but committed as 7"),
        ({"config_fingerprint": "f" * 64}, "epoch-0002: config_fingerprint was saved as"),
    ],
)
def test_resume_refuses_what_verify_calls_broken(
    line: Line, store: LocalStore, fields: dict[str, Any], said: str
) -> None:
    forged = line.journal.read_commit(2).model_copy(update=fields)
    line.journal.store.replace("commits/00000002.json", forged.to_bytes())
    assert any(said in problem for problem in verify_run(Journal(store, "run"), deep=True).problems)
    after = make_line(store)
    assert after.head
    assert (after.head.number, after.journal.numbers("quarantine")) == (1, [2])
    assert said in after.journal.quarantine_reasons()[0]


@pytest.mark.parametrize("change", ["lost", "damaged", "quarantined", "pruned"])
def test_resume_goes_on_over_what_verify_accepts(line: Line, store: LocalStore, change: str) -> None:
    train(line)
    path = root(line) / "commits/00000002.json"
    if change == "lost":
        path.unlink()
    elif change == "damaged":
        path.write_bytes(b"{")
    elif change == "quarantined":
        line.journal.quarantine(2, "by hand", 1)
    else:
        prune(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
    after = make_line(store)
    assert after.head
    assert (after.head.number, after.journal.numbers("quarantine")) == (3, [2] if change == "quarantined" else [])


# ---- another attempt that was still alive


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
        dead.commit(saved, "chunk")
    with pytest.raises(NameTaken):
        alive.commit(theirs, "chunk")
    assert alive.follow() == dead.head
    assert train(alive).number == 4
    assert verify_run(Journal(store, "run")).ok


# ---- signatures


def test_what_is_not_signed_is_not_trusted_and_stays(line: Line, store: LocalStore, keys: Keys) -> None:
    (mine, trusted), (_, another) = keys
    with pytest.raises(NotTrusted, match="commit 2 of run 'run' is not signed"):
        make_line(store, trusted_keys=[trusted])
    signing = make_line(store, signing_key=mine)
    train(signing)
    with pytest.raises(NotTrusted, match="is not by a trusted key"):
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
    line.journal.store.replace(signature_name(commit), envelope)
    check_signed(line.journal, commit, [trusted])
    with pytest.raises(NotTrusted, match=r"commits/00000002.json changed while it was read"):
        check_signed(line.journal, commit.model_copy(update={"step": 21}), [trusted])


# ---- a commit that was interrupted, and done again


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two records are made in the same second."""
    times = iter(range(10, 60))
    monkeypatch.setattr(line_module, "now", lambda: f"2026-01-01T00:00:{next(times)}+00:00")


def interrupt(monkeypatch: pytest.MonkeyPatch, verb: str, name: str, is_before: bool) -> None:
    """Ctrl-C comes as the store writes this name: once."""
    whole = getattr(LocalStore, verb)
    is_over = False

    @functools.wraps(whole)
    def interrupted(store: LocalStore, written: str, *args: Any) -> Any:
        nonlocal is_over
        if is_over or not written.startswith(name):
            return whole(store, written, *args)
        is_over = True
        if not is_before:
            whole(store, written, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, verb, interrupted)


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize(
    ("verb", "name"),
    [("replace", "signatures/"), ("create", "commits/"), ("replace", "metrics/"), ("replace", "latest.json")],
)
@pytest.mark.usefixtures("ticking")
def test_a_commit_that_was_interrupted_is_finished_by_doing_it_again(
    store: LocalStore,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    name: str,
    is_before: bool,
    is_signed: bool,
) -> None:
    if name == "signatures/" and not is_signed:
        return
    signing, trusted = keys[0]
    line = make_line(store, signing_key=signing if is_signed else None)
    train(line)
    saved = save_next(line)
    with monkeypatch.context() as undone:
        interrupt(undone, verb, name, is_before)
        with pytest.raises(KeyboardInterrupt):
            line.commit(saved, "chunk")
    assert line.commit(saved, "preempted") == line.head == Journal(store, "run").read_commit(2)
    assert train(line).number == 3
    assert line.journal.numbers("commits") == [1, 2, 3]
    assert_good(store, *([trusted] if is_signed else []))


@pytest.mark.parametrize("name", ["commits/", "metrics/", "latest.json"])
@pytest.mark.usefixtures("ticking")
def test_a_commit_that_was_interrupted_for_good_is_the_next_attempts_head(
    store: LocalStore, keys: Keys, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    signing, trusted = keys[0]
    line = make_line(store, signing_key=signing)
    train(line)
    saved = save_next(line)
    with monkeypatch.context() as undone:
        interrupt(undone, "create" if name == "commits/" else "replace", name, is_before=name != "commits/")
        with pytest.raises(KeyboardInterrupt):
            line.commit(saved, "chunk")
    after = make_line(store, trusted_keys=[trusted])
    assert after.head == Journal(store, "run").read_commit(2)
    assert load(after.journal.store, after.head) is None
    assert_good(store, trusted)


@pytest.mark.usefixtures("ticking")
def test_what_was_begun_before_a_fall_back_is_not_committed_after_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = make_line(store)
    train(line)
    saved = save_next(line)
    with monkeypatch.context() as undone:
        interrupt(undone, "create", "commits/", is_before=True)
        with pytest.raises(KeyboardInterrupt):
            line.commit(saved, "chunk")
    resume(line)  # which adopts it, as what it is now
    assert line.head
    assert (line.head.number, line.head.path, line.head.why) == (2, saved.path, "adopted")
    assert_good(store)
