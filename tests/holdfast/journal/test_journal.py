"""The journal: who may write, which commits count, and how damaged or lost records are handled."""

import hashlib
import logging
from pathlib import Path

import pytest

from holdfast.errors import NameTaken, RecordDamaged, RunUnknown, StoreDenied, Superseded, WrongUse
from holdfast.journal import Commit, ConfigRecord, Journal
from holdfast.journal.finding import find_commit
from holdfast.store.local import LocalStore
from tests.support.makers import claim, make_commit, make_latest, publish


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(LocalStore(str(tmp_path)), "run")
    journal.begin("m:f")
    return journal


def test_a_run_begins_once(journal: Journal, root: Path) -> None:
    assert journal.begin("other:f").recipe == "m:f"
    with pytest.raises(RunUnknown, match="there is no run 'other'"):
        Journal(LocalStore(str(root.parent)), "other").read_run()


def test_a_later_format_is_refused(journal: Journal) -> None:
    record = journal.read_run().model_copy(update={"format": 2})
    journal.store.replace("run.json", record.to_bytes())
    with pytest.raises(WrongUse, match="is stored in format 2; this version of Holdfast reads formats up to 1"):
        journal.read_run()


def test_a_number_is_claimed_once(journal: Journal) -> None:
    claim(journal, 1)
    with pytest.raises(Superseded):
        claim(journal, 1)


def test_a_later_attempt_fences_off_the_earlier(journal: Journal) -> None:
    claim(journal, 1)
    publish(journal, make_commit(1))
    claim(journal, 2)
    with pytest.raises(Superseded, match="attempt 1 of run 'run' is superseded by attempt 2"):
        publish(journal, make_commit(2, attempt=1))
    assert journal.newest_number() == 1
    second = make_commit(2, attempt=2)
    publish(journal, second)
    assert journal.newest() == second


def test_only_one_of_two_attempts_that_passed_the_fence_commits(journal: Journal) -> None:
    claim(journal, 1)
    claim(journal, 2)
    journal.store.create("commits/00000001.json", make_commit(1, attempt=1).to_bytes())
    with pytest.raises(NameTaken):
        publish(journal, make_commit(1, attempt=2, path="epoch-0001.2"))
    assert journal.read_commit(1).path == "epoch-0001"
    claim(journal, 3)
    with pytest.raises(Superseded):
        publish(journal, make_commit(1, attempt=2, path="epoch-0001.2"))


def test_committing_again_finishes_an_interrupted_commit(journal: Journal, root: Path) -> None:
    claim(journal, 1)
    first = make_commit(1)
    publish(journal, first)
    (root / "latest.json").unlink()
    again = make_commit(1, created_at="2026-03-01T00:00:00+00:00")
    assert journal.publish_commit(again) == first


LATEST: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "not JSON": b'{"commit": 1',
    "a list": b"[1]",
    "without a hash": b'{"commit": 3}',
    "nested without end": b"[" * 100_000,
    "one bit flipped": make_latest(make_commit(3)).to_bytes().replace(b'"commit": 3', b'"commit": 2'),
    "stale": make_latest(make_commit(1)).to_bytes(),
    "ahead of the commits": make_latest(make_commit(99)).to_bytes(),
    "upwards": make_latest(make_commit(3)).model_copy(update={"path": "../other/epoch-0003"}).to_bytes(),
    "absolute": make_latest(make_commit(3)).model_copy(update={"path": "/etc"}).to_bytes(),
    "another bucket": make_latest(make_commit(3)).model_copy(update={"path": "s3://bucket/epoch-0003"}).to_bytes(),
}


@pytest.mark.parametrize("latest", LATEST)
def test_latest_is_only_a_hint(journal: Journal, root: Path, latest: str, caplog: pytest.LogCaptureFixture) -> None:
    commits = [make_commit(number) for number in (1, 2, 3)]
    publish(journal, *commits)
    (root / "latest.json").unlink()
    data = LATEST[latest]
    if data is not None:
        (root / "latest.json").write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert fresh(journal).newest() == commits[2]
    if latest not in ("missing", "stale", "ahead of the commits"):
        assert "latest.json can't be read" in caplog.text
        assert "the commits are listed instead" in caplog.text


def test_candidates_leave_out_commits_that_do_not_count(journal: Journal, root: Path) -> None:
    publish(journal, *map(make_commit, range(1, 7)))
    journal = fresh(journal)
    journal.quarantine(6, "damaged", 1)
    (root / "commits" / "00000005.json").write_bytes(b"{}")
    (root / "commits" / "00000004.json").unlink()
    assert [commit.number for commit in journal.candidates()] == [3, 2, 1]
    assert not journal.is_quarantined(5)
    assert next(journal.candidates(attempt=1)).number == 3
    assert journal.is_quarantined(5)


def test_a_quarantine_that_the_store_refuses_is_not_reported(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(journal, make_commit(1))

    def refuse(store: LocalStore, name: str, data: bytes) -> None:
        raise StoreDenied(f"can't write {name}: Read-only file system")

    monkeypatch.setattr(LocalStore, "create", refuse)
    with pytest.raises(StoreDenied):
        journal.quarantine(1, "bad", 1)
    assert "is quarantined" not in caplog.text
    monkeypatch.undo()
    journal.quarantine(1, "bad", 1)
    assert "commit 1 of run 'run' is quarantined: bad" in caplog.text


def test_a_quarantine_keeps_its_first_reason(journal: Journal) -> None:
    journal.quarantine(1, "first", 1)
    journal.quarantine(1, "second", 2)
    assert journal.quarantine_reasons() == ["first"]


@pytest.mark.parametrize("path", ["../other", "/etc", "a/b", "", "..", "commits", "epoch-0001/..", "epoch-1"])
def test_a_commit_does_not_lead_out_of_the_run(journal: Journal, path: str) -> None:
    commit = make_commit(1).model_copy(update={"path": path})
    journal.store.create("commits/00000001.json", commit.to_bytes())
    with pytest.raises(RecordDamaged, match="path"):
        journal.read_commit(1)
    assert journal.newest() is None


def test_a_flipped_bit_damages_a_record_or_changes_nothing(journal: Journal) -> None:
    data = make_commit(1).to_bytes()
    commit = Commit.from_bytes(data, "it")
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            try:
                assert Commit.from_bytes(bytes(flipped), "it") == commit  # only white space changed
            except RecordDamaged:
                continue


def test_an_oversized_record_is_not_read_into_memory(
    journal: Journal, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.journal.records.MAX_RECORD_BYTES", 1000)
    (root / "latest.json").write_bytes(b" " * 1001)
    assert journal.read_latest() is None
    (root / "commits").mkdir()
    (root / "commits" / "00000001.json").write_bytes(b" " * 1001)
    with pytest.raises(RecordDamaged, match="larger than 1000 bytes"):
        journal.read_commit(1)


def test_a_damaged_run_json_is_written_again(journal: Journal, root: Path) -> None:
    publish(journal, *map(make_commit, (3, 4)))
    (root / "run.json").write_bytes(b"{")
    with pytest.raises(RecordDamaged):
        journal.read_run()
    assert journal.begin("m:f") == journal.read_run()
    assert (journal.read_run().recipe, journal.read_run().first_commit) == ("m:f", 3)


def test_settings_on_record_are_read_without_those_of_earlier_versions(journal: Journal, root: Path) -> None:
    earlier = {"retention": {"keep_last": 7, "max_epochs": 0}, "compute": {"ranks": 2, "ray_address": None}}
    journal.record_config("0" * 64, {}, earlier)
    stored = {path.read_bytes() for path in (root / "config.snapshot.json", root / "configs" / f"{'0' * 64}.json")}
    for record in (journal.read_snapshot(), journal.read_config("0" * 64)):
        assert record
        assert record.config == {"retention": {"keep_last": 7}, "compute": {"ranks": 2}}
    retention = journal.read_retention()
    assert retention
    assert retention.keep_last == 7
    journal.record_config("0" * 64, {}, earlier)  # the bytes on record decide whether these are the same settings
    assert {path.read_bytes() for path in (root / "configs").iterdir()} == stored
    assert journal.settings == {f"configs/{'0' * 64}.json": hashlib.sha256(*stored).hexdigest()}


def test_damaged_settings_are_written_again(journal: Journal, root: Path) -> None:
    journal.record_config("0" * 64, {"lr": 0.1}, {"epochs": 3})
    journal.record_config("1" * 64, {"lr": 0.2}, {"epochs": 4})
    assert journal.read_epochs() == 4
    first = root / "configs" / f"{'0' * 64}.json"
    first.write_bytes(b"")
    assert journal.read_config("0" * 64) is None
    journal.record_config("0" * 64, {"lr": 0.1}, {"epochs": 5})
    saved = journal.read_config("0" * 64)
    assert saved
    assert saved.identity == {"lr": 0.1}


def test_every_snapshot_of_the_settings_is_kept(journal: Journal) -> None:
    """Settings that differ only in operational fields have the same fingerprint, and are kept too."""
    snapshots = [{"epochs": 3, "log": {"every": every}} for every in (1, 2, 1, 3, 2)]
    for config in snapshots:
        journal.record_config("0" * 64, {"lr": 0.1}, config)
    names = journal.store.list("configs")
    assert len(names) == 3
    kept = [ConfigRecord.from_bytes(journal.store.read(f"configs/{name}"), name) for name in names]
    assert sorted(record.config["log"]["every"] for record in kept) == [1, 2, 3]
    first = journal.read_config("0" * 64)
    assert first
    assert first.config == snapshots[0]
    snapshot = journal.read_snapshot()
    assert snapshot
    assert snapshot.config == snapshots[-1]


def test_the_number_of_a_lost_commit_is_not_reused(journal: Journal, root: Path) -> None:
    publish(journal, *map(make_commit, (1, 2, 3)))
    assert journal.next_number() == 4
    journal.quarantine(3, "damaged", 1)
    for number in (2, 3):
        (root / "commits" / f"{number:08d}.json").unlink()
    assert journal.next_number() == 4
    journal.store.create("pruned/00000004.json", b"")
    assert journal.next_number() == 5


def test_pins(journal: Journal) -> None:
    publish(journal, make_commit(1))
    journal.pin(1)
    journal.pin(1)
    assert journal.numbers("pins") == [1]
    journal.unpin(1)
    journal.unpin(1)
    assert journal.numbers("pins") == []
    with pytest.raises(WrongUse, match="has no commit 2"):
        journal.pin(2)
    journal.store.create("pruned/00000001.json", b"")
    with pytest.raises(WrongUse, match="was pruned"):
        journal.pin(1)
    assert journal.numbers("pins") == []


def test_a_pruned_commit_is_named_as_such_by_its_number_and_by_its_folder(journal: Journal) -> None:
    for number in (1, 2):
        publish(journal, make_commit(number))
    journal.store.create("pruned/00000001.json", b"")
    newest = journal.read_commit(2).path
    for text in ("1", journal.read_commit(1).path):
        with pytest.raises(WrongUse, match=r"the checkpoint of commit 1 of run .* was pruned") as refused:
            find_commit(journal, text)
        assert refused.value.hint.startswith(f"the newest are {newest};")


@pytest.mark.parametrize("commits", [10, 1000])
def test_finding_the_newest_commit_takes_no_more_requests_in_a_long_run(
    journal: Journal, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, commits + 1):
        (path := journal.store.root / f"commits/{number:08d}.json").parent.mkdir(exist_ok=True)
        path.write_bytes(make_commit(number).to_bytes())
    journal.publish_latest(make_latest(make_commit(commits)))
    asked = []
    for verb in ("read", "list", "exists", "size_bytes"):
        whole = getattr(LocalStore, verb)
        monkeypatch.setattr(
            LocalStore, verb, lambda *args, whole=whole, **options: (asked.append(args[1:]), whole(*args, **options))[1]
        )
    newest = fresh(journal).newest()
    assert newest
    assert newest.number == commits
    assert fresh(journal).attempts() == 0
    assert 5 <= len(asked) <= 12, asked


def fresh(journal: Journal) -> Journal:
    """Return a journal of the same run that has read nothing yet, as another process's."""
    return Journal(LocalStore(str(Path(journal.store.url).parent)), journal.run)


def test_records_chain(journal: Journal) -> None:
    publish(journal, make_commit(1))
    assert journal.record_sha256(0) == journal.record_sha256(9) == ""
    assert len(journal.record_sha256(1)) == 64


def test_a_walk_along_parents_ends_although_a_record_names_a_later_one(journal: Journal, root: Path) -> None:
    """Whoever can write to the store can write a circle of parents."""
    for number in (1, 2, 3):
        publish(journal, make_commit(number))
    forged = make_commit(2).model_copy(update={"parent": 3})
    (root / "commits/00000002.json").write_bytes(forged.to_bytes())
    read = fresh(journal)
    newest = read.read_commit(3)
    assert read.find_parent(newest) == forged
    assert read.find_parent(forged) is None
    with pytest.raises(RecordDamaged, match=r"00000002.json says that its parent is commit 3, which is later"):
        read.read_parent(forged)
    assert read.read_parent(read.read_commit(1)) is None
