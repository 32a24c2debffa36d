"""Who may write, what counts, and that the records say so after any loss."""

import json
from pathlib import Path

import pytest

from holdfast.config import Retention
from holdfast.errors import NameTaken, RecordDamaged, RunUnknown, Superseded, WrongUse
from holdfast.journal import Commit, FileRecord, Journal
from holdfast.retention import choose_kept, plan, prune
from holdfast.store.local import LocalStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(LocalStore(str(tmp_path)), "run")
    journal.begin("m:f")
    return journal


def make_commit(number: int, attempt: int = 1, step: int | None = None, path: str | None = None) -> Commit:
    sha256 = f"{number:064x}"
    path = path or f"epoch-{number:04d}"
    return Commit(
        number=number, parent=number - 1, attempt=attempt, step=step or number * 10, epoch=number, path=path,
        files=[FileRecord(name="checkpoint.safetensors", size_bytes=1, sha256=sha256)], checkpoint_sha256=sha256,
        previous_checkpoint_sha256="", previous_record_sha256="", config_fingerprint=sha256, why="chunk", created_at="",
    )  # fmt: skip


def publish(journal: Journal, *commits: Commit) -> None:
    for commit in commits:
        journal.publish_commit(commit, b"", {"commit": commit.number})


def claim(journal: Journal, number: int) -> None:
    journal.claim_attempt(number, "fresh", "host", 1, {})


def test_a_run_begins_once(journal: Journal, root: Path) -> None:
    assert journal.begin("other:f").recipe == "m:f"
    with pytest.raises(RunUnknown, match="there is no run 'other'"):
        Journal(LocalStore(str(root.parent)), "other").read_run()


def test_a_later_format_is_refused(journal: Journal) -> None:
    record = json.loads(journal.store.read("run.json"))
    journal.store.replace("run.json", json.dumps(record | {"format": 2}).encode())
    with pytest.raises(WrongUse, match="has format 2; this version reads up to 1"):
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
    publish(journal, make_commit(2, attempt=2))
    assert journal.newest() == make_commit(2, attempt=2)


def test_of_two_who_passed_the_fence_one_commits(journal: Journal) -> None:
    claim(journal, 1)
    claim(journal, 2)
    journal.store.create("commits/00000001.json", make_commit(1, attempt=1).to_bytes())
    with pytest.raises(NameTaken):
        publish(journal, make_commit(1, attempt=2, path="other"))
    assert journal.read_commit(1).path == "epoch-0001"
    claim(journal, 3)
    with pytest.raises(Superseded):
        publish(journal, make_commit(1, attempt=2, path="other"))


def test_committing_again_finishes_an_interrupted_commit(journal: Journal, root: Path) -> None:
    claim(journal, 1)
    publish(journal, make_commit(1))
    (root / "latest.json").unlink()
    publish(journal, make_commit(1))
    assert journal.latest_number() == 1


@pytest.mark.parametrize("latest", [b"", b"{}", b"[1]", b'{"commit": "3"}', b'{"commit": 99}', b'{"commit": -1}', None])
def test_latest_is_only_a_hint(journal: Journal, root: Path, latest: bytes | None) -> None:
    publish(journal, *map(make_commit, (1, 2, 3)))
    if latest is None:
        (root / "latest.json").unlink()
    else:
        journal.store.replace("latest.json", latest)
    assert journal.newest() == make_commit(3)


def test_the_walk_passes_over_what_does_not_count(journal: Journal, root: Path) -> None:
    publish(journal, *map(make_commit, range(1, 7)))
    journal.quarantine(6, "damaged", 1)
    (root / "commits" / "00000005.json").write_bytes(b"{}")
    (root / "commits" / "00000004.json").unlink()
    assert journal.lost_commits() == [4, 5]
    assert [commit.number for commit in journal.candidates()] == [3, 2, 1]
    assert not journal.is_quarantined(5)
    assert next(journal.candidates(attempt=1)).number == 3
    assert journal.is_quarantined(5)
    assert journal.lost_commits() == [4]


def test_the_first_reason_stays(journal: Journal) -> None:
    journal.quarantine(1, "first", 1)
    journal.quarantine(1, "second", 2)
    assert journal.quarantine_reasons() == ["first"]


@pytest.mark.parametrize("path", ["../other", "/etc", "a/b", "", ".."])
def test_a_commit_does_not_lead_out_of_the_run(journal: Journal, path: str) -> None:
    publish(journal, make_commit(1))
    record = json.loads(journal.store.read("commits/00000001.json"))
    journal.store.replace("commits/00000001.json", json.dumps(record | {"path": path}).encode())
    with pytest.raises(RecordDamaged, match="path"):
        journal.read_commit(1)


def test_records_chain(journal: Journal) -> None:
    publish(journal, make_commit(1))
    assert journal.record_sha256(0) == journal.record_sha256(9) == ""
    assert len(journal.record_sha256(1)) == 64


# ---- retention


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Retention(keep_last=1), {9}),
        (Retention(keep_last=3), {9, 8, 7}),
        (Retention(keep_last=1, keep_every=2), {9, 8, 4}),
        (Retention(keep_last=99), set(range(1, 10))),
    ],
)
def test_policies(policy: Retention, kept: set[int]) -> None:
    commits = [make_commit(number, step=number * 5) for number in range(9, 0, -1)]
    assert choose_kept(commits, policy, steps_per_epoch=10) == kept


def test_prune_gives_up_the_old_and_never_the_newest(journal: Journal) -> None:
    for number in range(1, 5):
        journal.store.create(f"epoch-{number:04d}/checkpoint.safetensors", b"x")
        publish(journal, make_commit(number))
    journal.quarantine(4, "damaged", 1)
    report = prune(journal, Retention(keep_last=1), 10)
    assert [commit.number for commit in report.kept] == [3]
    assert [commit.number for commit in report.pruned] == [2, 1]
    assert [name for name in journal.store.list() if name.startswith("epoch")] == ["epoch-0003", "epoch-0004"]
    assert journal.newest() == make_commit(3)
    assert plan(journal, Retention(keep_last=1), 10).pruned == []
