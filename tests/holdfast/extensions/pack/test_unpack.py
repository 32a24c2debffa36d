"""Unpacking makes a run that can be continued, or leaves no run at all."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.errors import NameMissing, NameTaken, WrongUse
from holdfast.extensions.pack.pack import unpack
from holdfast.journal import AuditRecord, Commit, Journal, now
from holdfast.journal.audits import record_audit
from holdfast.journal.chains import find_certified
from holdfast.journal.judgement import read_verdict
from holdfast.journal.signature import generate_key, load_signing_key, load_trusted_key
from holdfast.journal.trainers import list_trainers, read_machines
from holdfast.keeping.verification import verify_run
from holdfast.proof.audit import audit_commit, choose_span, list_replayable
from holdfast.store.local import LocalStore
from tests.support.makers import SETTINGS, STEPS_PER_EPOCH, make_line, resume, save_next, train
from tests.support.packing import contents, members, packed, unpacked


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_unpacked_run_can_be_continued(made: Path, store: LocalStore, number: int) -> None:
    journal = Journal(LocalStore(str(made)), "run")
    there = unpacked(packed(journal, number), store)
    assert there.newest() == journal.read_commit(number)
    assert packed(there) == packed(journal, number)
    line = make_line(store)
    assert line.head == journal.read_commit(number)
    after = train(line)
    assert (after.number, after.parent) == (number + 1, number)
    report = verify_run(Journal(store, "run"), everything=True, deep=True)
    assert (report.problems, report.notes) == ([], [])
    assert [entry.commit for entry in report.checkpoints] == [number + 1, number]


def test_an_unpacked_run_trains_the_same_as_its_original(made: Path, store: LocalStore) -> None:
    journal = Journal(LocalStore(str(made)), "run")
    unpacked(packed(journal, 2), store)
    assert train(make_line(store), size_bytes=320).checkpoint_sha256 == journal.read_commit(3).checkpoint_sha256


def test_the_longest_name_of_a_run_can_be_packed(store: LocalStore, tmp_path: Path) -> None:
    line = make_line(store, "r" * 100)
    train(line, 3)
    other = LocalStore(str(tmp_path / "other"))
    assert unpacked(packed(line.journal), other).newest() == line.head


def test_the_signature_is_packed(store: LocalStore, tmp_path: Path) -> None:
    generate_key(tmp_path / "key")
    line = make_line(store, signing_key=load_signing_key(str(tmp_path / "key")))
    train(line)
    trusted = load_trusted_key(f"{tmp_path}/key.pub")
    there = unpacked(packed(line.journal), LocalStore(str(tmp_path / "other")))
    assert verify_run(there, trusted_keys=[trusted]).ok
    assert make_line(LocalStore(str(tmp_path / "other")), trusted_keys=[trusted]).head == line.head


@pytest.mark.parametrize("name", ["run.json", "a file", "epoch-0001/checkpoint.safetensors"])
def test_an_existing_folder_is_not_touched(good: bytes, store: LocalStore, name: str) -> None:
    store.create(f"run/{name}", b"mine")
    with pytest.raises(WrongUse, match="already has a folder run"):
        unpacked(good, store)
    assert contents(store.root) == {f"run/{name}": b"mine"}


class Meanwhile(io.BytesIO):
    """A file that calls a function once, in the middle of being read."""

    def __init__(self, data: bytes, happen: Callable[[], object]) -> None:
        super().__init__(data)
        self.happen: Callable[[], object] | None = happen

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > 4 * tarfile.BLOCKSIZE and self.happen:
            happen, self.happen = self.happen, None
            happen()
        return super().read(size)


@pytest.mark.parametrize("number", [2, 3])
def test_two_unpacks_at_once_leave_one_complete_run(made: Path, good: bytes, store: LocalStore, number: int) -> None:
    """The later process deletes its own files, and none of the other's."""
    other = packed(Journal(LocalStore(str(made)), "run"), number)
    with pytest.raises(NameTaken):
        unpack(Meanwhile(good, lambda: unpacked(other, store)), store)
    assert contents(store.root).keys() == {member.name for member, _ in members(other)}
    assert verify_run(Journal(store, "run"), everything=True, deep=True).ok


def test_run_json_is_written_last(good: bytes, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LocalStore.create
    created: list[str] = []

    def noted(store: LocalStore, name: str, data: bytes) -> None:
        created.append(name)
        assert name != "run.json" or len(contents(store.root)) == len(members(good)) - 1
        create(store, name, data)

    monkeypatch.setattr(LocalStore, "create", noted)
    unpacked(good, store)
    assert created[-1] == "run.json"


def test_a_run_that_begins_during_an_unpack_stays(good: bytes, store: LocalStore) -> None:
    with pytest.raises(NameTaken):
        unpack(Meanwhile(good, lambda: Journal(store, "run").begin("m:f")), store)
    assert contents(store.root).keys() == {"run/run.json"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_an_interrupted_unpack_leaves_no_run(good: bytes, store: LocalStore, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        unpack(Meanwhile(good, fail), store)
    assert store.list() == []
    unpacked(good, store)


@pytest.mark.parametrize("number", [1, 3])
def test_the_machine_of_the_first_commit_of_an_unpacked_run_is_not_known(
    made: Path, store: LocalStore, number: int
) -> None:
    """Attempt 1 of the unpacked run isn't attempt 1 of the original, which trained the commit."""
    unpacked(packed(Journal(LocalStore(str(made)), "run"), number), store)
    line = make_line(store)
    given = line.head
    assert given
    with pytest.raises(NameMissing, match="no record of the machine"):
        list_trainers(line.journal, given)
    record_audit(line.journal, make_audit(given, "another"))
    assert read_verdict(line.journal, given) is None
    assert find_certified(line.journal, [given]) is None


def test_every_attempt_of_an_unpacked_run_may_have_trained_its_first_adopted_commit(
    store: LocalStore, tmp_path: Path
) -> None:
    for _ in range(3):  # the last attempt of the original, 3, trains the commit
        original = make_line(LocalStore(str(tmp_path / "original")))
    train(original)
    there = unpacked(packed(original.journal), store)
    for attempt, host in ((1, "dying"), (2, "adopting")):
        there.claim_attempt(attempt, "continued", host, 1, {})
        line = Line(there, attempt, SETTINGS, STEPS_PER_EPOCH)
        resume(line)
        if attempt == 1:
            save_next(line)
    adopted = line.head
    assert adopted
    assert (adopted.why, adopted.attempt) == ("adopted", 2)
    assert read_machines(there, adopted) == {"dying", "adopting"}
    for host, kind in (("dying", "undecided"), ("third", "certified")):
        record_audit(there, make_audit(adopted, host))
        verdict = read_verdict(there, adopted)
        assert verdict
        assert verdict.kind == kind, host


def test_an_audit_of_an_unpacked_run_begins_with_its_first_commit(made: Path, store: LocalStore) -> None:
    there = unpacked(packed(Journal(LocalStore(str(made)), "run"), 3), store)
    line = make_line(store)
    commits = [train(line) for _ in range(2)]
    given = there.read_commit(3)
    span = choose_span(there, commits[0])
    assert (span.start, span.commits) == (given, commits[:1])
    assert "another run's checkpoint" in span.unchecked
    assert choose_span(there, commits[1]).start == commits[0]
    assert list_replayable(there) == commits[::-1]
    ancestry = pytest.importorskip("holdfast.extensions.compare.ancestry")
    assert ancestry.read_ancestry(there, "there").missing == []
    chain = pytest.importorskip("holdfast.extensions.receipt.chain")
    assert [each.number for each, _ in chain.list_line(there, 5)] == [3, 4, 5]


def test_what_an_unpacked_run_has_not_trained_is_refused_by_name(made: Path, store: LocalStore) -> None:
    there = unpacked(packed(Journal(LocalStore(str(made)), "run"), 3), store)
    given = there.read_commit(3)
    for call in (lambda: audit_commit(there, given), lambda: audit_commit(there, given, 0)):
        with pytest.raises(WrongUse, match="was not trained here: it was unpacked from another run's checkpoint"):
            call()


def make_audit(commit: Commit, host: str) -> AuditRecord:
    return AuditRecord(
        commit=commit.number, number=1, from_commit=0, notes=[], host=host, environment={}, created_at=now(),
        checkpoint_sha256=commit.checkpoint_sha256,
    )  # fmt: skip
