"""Retention: which checkpoints stay, and that no needed file is ever deleted."""

import contextlib
import os
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import checkpoint
from holdfast.attempt import Line
from holdfast.config import KeepBest, Retention
from holdfast.errors import ConfigError, NoVerifiedCheckpoint, StoreError
from holdfast.journal import Journal, PruneReport, read_record
from holdfast.keeping.retention import DEBRIS_AFTER_S, choose_kept, prune_by_policy, prune_run
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from tests.support.makers import STEPS_PER_EPOCH, claim, load, make_commit, make_line, resume, save, train


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return make_line(LocalStore(str(tmp_path)))


def folders(line: Line) -> list[str]:
    return [name for name in line.journal.store.list() if name.startswith("epoch-")]


def run_prune(line: Line, debris_after_s: float = DEBRIS_AFTER_S, **policy: Any) -> PruneReport:
    journal = Journal(LocalStore(str(Path(line.journal.store.url).parent)), "run")
    report = prune_by_policy(journal, Retention(**policy), STEPS_PER_EPOCH, debris_after_s=debris_after_s)
    assert report
    return report


def numbers(entries: list[Any]) -> list[int]:
    return [entry.commit for entry in entries]


def damage(line: Line, path: str) -> None:
    (Path(line.journal.store.url) / path / "checkpoint.safetensors").write_bytes(b"damaged")


# ---- deciding

VALUES = [0.5, 0.1, None, 0.3, 0.1, 0.4, 0.9, None, 0.2]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"keep_last": 1}, {9}),
        ({"keep_last": 3}, {9, 8, 7}),
        ({"keep_last": 99}, set(range(1, 10))),
        ({"keep_last": 1, "keep_every": 2}, {9, 8, 4}),
        ({"keep_last": 1, "keep_every_steps": 15}, {9, 6, 3}),
        ({"keep_last": 1, "keep_best": {"metric": "score", "count": 2}}, {9, 5, 2}),
        ({"keep_last": 1, "keep_best": {"metric": "score", "count": 1}}, {9, 5}),
        ({"keep_last": 1, "keep_best": {"metric": "score", "mode": "max"}}, {9, 7}),
    ],
)
def test_each_policy_keeps_these_commits(policy: dict[str, Any], kept: set[int]) -> None:
    """There are two commits an epoch, at the steps 5, 10, 15 and so on."""
    commits = [make_commit(n, step=n * 5, metrics={"score": VALUES[n - 1]}) for n in range(9, 0, -1)]
    assert choose_kept(commits, Retention(**policy), STEPS_PER_EPOCH).keys() == kept


def test_a_prune_that_another_overtakes_finds_no_damage(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        train(line)
    verify = checkpoint.verify

    def overtaken(*arguments: Any, **options: Any) -> list[Any]:
        monkeypatch.setattr(checkpoint, "verify", verify)
        train(line)
        run_prune(line, keep_last=1)
        assert folders(line) == ["epoch-0004"]
        return verify(*arguments, **options)

    monkeypatch.setattr(checkpoint, "verify", overtaken)
    run_prune(line, keep_last=1)
    assert folders(line) == ["epoch-0004"]
    assert verify_run(line.journal).problems == []


def test_a_misspelt_metric_deletes_nothing(line: Line) -> None:
    for _ in range(3):
        train(line)
    with pytest.raises(
        ConfigError, match="your evaluate function has returned this metric for no checkpoint"
    ) as caught:
        run_prune(line, keep_last=1, keep_best={"metric": "scor"})
    assert caught.value.hint == "did you mean score?"
    assert len(folders(line)) == 3


def test_a_metric_may_be_missing_before_the_first_epoch_ends() -> None:
    within = [make_commit(n, step=n, metrics={"avg_loss": 1.0}) for n in (3, 2, 1)]
    policy = Retention(keep_last=1, keep_best=KeepBest(metric="score"))
    assert choose_kept(within, policy, STEPS_PER_EPOCH).keys() == {3}


@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    policy=st.builds(
        Retention,
        keep_last=st.integers(1, 5),
        keep_every=st.integers(0, 4),
        keep_every_steps=st.integers(0, 40),
        keep_best=st.none() | st.builds(KeepBest, metric=st.just("avg_loss"), count=st.integers(1, 4)),
    ),
)
def test_the_newest_is_always_kept_and_keeping_is_stable(steps: list[int], policy: Retention) -> None:
    """A second prune deletes nothing more, so a prune can be repeated after a kill."""
    total, commits = 0, []
    for number, count in enumerate(steps, start=1):
        total += count
        commits.insert(0, make_commit(number, step=total))
    kept = choose_kept(commits, policy, STEPS_PER_EPOCH)
    assert commits[0].number in kept
    left = [commit for commit in commits if commit.number in kept]
    assert choose_kept(left, policy, STEPS_PER_EPOCH).keys() == kept.keys()


# ---- deleting


def test_old_checkpoints_are_deleted_and_their_metrics_stay(line: Line) -> None:
    for _ in range(5):
        train(line)
    report = run_prune(line, keep_last=2)
    assert (numbers(report.kept), numbers(report.pruned), report.protected) == ([5, 4], [3, 2, 1], [])
    assert folders(line) == ["epoch-0004", "epoch-0005"]
    assert len(line.journal.store.list("metrics")) == 5
    assert read_record(line.journal.store, PruneReport, "prunes/00000005.json") == report
    commit = line.journal.read_commit(1)
    assert (report.pruned[-1].checkpoint_sha256, report.pruned[-1].size_bytes) == (
        commit.checkpoint_sha256, commit.size_bytes,
    )  # fmt: skip
    assert verify_run(line.journal).ok
    assert numbers(run_prune(line, keep_last=2).kept) == [5, 4]


def test_a_dry_run_changes_nothing(line: Line) -> None:
    for _ in range(3):
        train(line)
    before = sorted(Path(line.journal.store.url).rglob("*"))
    report = prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH, dry_run=True)
    assert report
    assert report.dry_run
    assert numbers(report.pruned) == [2, 1]
    assert sorted(Path(line.journal.store.url).rglob("*")) == before


def test_the_newest_that_verifies_stays(line: Line) -> None:
    """If retention counted damaged checkpoints as good, it could delete the only good one."""
    for _ in range(4):
        train(line)
    damage(line, "epoch-0004")
    damage(line, "epoch-0003")
    report = run_prune(line, keep_last=1)
    assert numbers(report.kept) == [4]
    assert {entry.commit: entry.why for entry in report.protected} == {
        3: "newer than every commit that verifies", 2: "the newest that verifies",
    }  # fmt: skip
    assert numbers(report.pruned) == [1]
    resume(line)
    assert line.head
    assert line.head.number == 2
    assert numbers(run_prune(line, keep_last=1).kept) == [2]


def test_nothing_is_deleted_if_nothing_verifies(line: Line) -> None:
    for _ in range(3):
        train(line)
    for path in folders(line):
        damage(line, path)
    with pytest.raises(NoVerifiedCheckpoint, match="nothing is pruned"):
        run_prune(line, keep_last=1)
    assert len(folders(line)) == 3


def test_quarantined_checkpoints_do_not_count_and_stay(line: Line) -> None:
    for _ in range(4):
        train(line)
    line.journal.quarantine(4, "damaged", 1)
    report = run_prune(line, keep_last=1)
    assert (numbers(report.kept), numbers(report.pruned)) == ([3], [2, 1])
    assert folders(line) == ["epoch-0003", "epoch-0004"]


def test_pinned_checkpoints_stay_until_unpinned(line: Line) -> None:
    for _ in range(3):
        train(line)
    line.journal.pin(1)
    would = prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH, dry_run=True)
    assert would
    assert (numbers(would.protected), numbers(would.pruned)) == ([1], [2])
    report = run_prune(line, keep_last=1)
    assert [(entry.commit, entry.why) for entry in report.protected] == [(1, "pinned")]
    assert folders(line) == ["epoch-0001", "epoch-0003"]
    line.journal.unpin(1)
    assert numbers(run_prune(line, keep_last=1).pruned) == [1]
    assert folders(line) == ["epoch-0003"]


def test_a_pin_during_a_prune_keeps_its_checkpoint(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        train(line)
    create = LocalStore.create

    def pin_first(self: LocalStore, name: str, data: bytes) -> None:
        if name.startswith("pruned/"):
            create(self, "pins/00000001.json", b"")
        create(self, name, data)

    monkeypatch.setattr(LocalStore, "create", pin_first)
    report = run_prune(line, keep_last=1)
    assert numbers(report.protected) == [1]
    assert folders(line) == ["epoch-0001", "epoch-0002"]
    assert not line.journal.is_pruned(1)


def test_a_deletion_that_failed_is_finished(
    line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        train(line)

    def fail(self: LocalStore, folder: str) -> None:
        raise StoreError(f"can't delete {folder}: the disk says no")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "delete_folder", fail)
        run_prune(line, keep_last=1)
        run_prune(line, keep_last=1)
    assert "the disk says no; the next prune tries again" in caplog.text
    assert len(folders(line)) == 3
    assert line.journal.newest() == line.head
    assert verify_run(line.journal).ok
    assert run_prune(line, keep_last=1).unfinished == ["epoch-0001", "epoch-0002"]
    assert folders(line) == ["epoch-0003"]


class Killed(BaseException):
    """A simulated SIGKILL: only the store's files survive it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Raise `Killed` in place of the nth write or deletion."""
    done = 0
    for verb in ("create", "replace", "delete_folder", "delete", "sweep"):
        whole: Callable[..., Any] = getattr(LocalStore, verb)

        def counted(*args: Any, whole: Callable[..., Any] = whole) -> Any:
            nonlocal done
            done += 1
            if done == nth:
                raise Killed
            return whole(*args)

        monkeypatch.setattr(LocalStore, verb, counted)


@pytest.mark.parametrize("nth", range(1, 13))
@pytest.mark.parametrize("then", [1, 3])
def test_a_killed_prune_leaves_only_debris(line: Line, monkeypatch: pytest.MonkeyPatch, nth: int, then: int) -> None:
    """With any policy, the next prune finishes the deletions, and every checkpoint that it keeps can be loaded."""
    for _ in range(4):
        train(line)
    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        kill_at(patched, nth)
        run_prune(line, keep_last=1)
    assert verify_run(line.journal).ok
    report = run_prune(line, keep_last=then)
    assert all(load(line.journal.store, line.journal.read_commit(number)) is None for number in numbers(report.kept))
    assert folders(line) == sorted(entry.path for entry in report.kept)
    assert verify_run(line.journal).ok


def test_debris_is_collected_once_it_is_old(line: Line) -> None:
    for _ in range(3):
        train(line)
    root = Path(line.journal.store.url)
    save(line.journal.store, 25, "f" * 64)  # of an abandoned line, so no attempt will adopt it
    (root / "epoch-0002.2").mkdir()
    (root / "epoch-0002.2" / "checkpoint.safetensors").write_bytes(b"half")
    (root / "epoch-0002.3").mkdir()
    (root / "epoch-0002.3" / "checkpoint.safetensors").write_bytes(b"half, and fresh")
    save(line.journal.store, 35, "f" * 64)  # beyond the newest step: a live attempt may be writing it
    (root / "commits" / "00000004.json.tmp-12345678").write_bytes(b"half")
    (root / "epoch-0002.2" / "metadata.json.tmp-12345678").write_bytes(b"half")
    long_ago = time.time() - 3600
    for path in (*root.rglob("*"),):
        if "epoch-0002.3" not in str(path):
            os.utime(path, (long_ago, long_ago))
    assert run_prune(line, debris_after_s=7200).debris == []
    report = run_prune(line, debris_after_s=60)
    assert report.debris == ["epoch-0002.2", "epoch-0003-step-00000025"]
    assert folders(line) == ["epoch-0001", "epoch-0002", "epoch-0002.3", "epoch-0003", "epoch-0004-step-00000035"]
    assert not list(root.rglob("*.tmp-*"))


def test_a_checkpoint_whose_record_is_lost_is_not_debris(line: Line) -> None:
    for _ in range(3):
        train(line)
    root = Path(line.journal.store.url)
    (root / "commits" / "00000002.json").write_bytes(b"{")
    for path in (*root.rglob("*"),):
        os.utime(path, (0, 0))
    for _ in range(2):  # the second prune uses the first one's report
        report = run_prune(line, debris_after_s=60)
        assert (report.debris, report.unreadable) == ([], [2])
    assert "epoch-0002" in folders(line)


def test_a_checkpoint_of_a_pruned_step_stays_and_has_another_name(line: Line) -> None:
    """After a fallback the run trains the steps of pruned checkpoints again, and never saves under the same names."""
    for _ in range(4):
        train(line)
    line.journal.pin(1)
    run_prune(line, keep_last=1)
    assert folders(line) == ["epoch-0001", "epoch-0004"]
    damage(line, "epoch-0004")
    claim(line.journal, 2)
    line.attempt = 2
    resume(line)
    assert line.head
    assert line.head.number == 1
    assert train(line).path == "epoch-0002.2"
    ahead = save(line.journal.store, 30, line.head.checkpoint_sha256)
    assert ahead.path == "epoch-0003.2"
    assert run_prune(line, keep_last=1, debris_after_s=0).unfinished == []
    line.commit(ahead, "chunk")
    assert verify_run(line.journal).ok


def test_a_run_is_pruned_by_its_saved_policy(line: Line) -> None:
    assert prune_run(line.journal) is None
    for _ in range(5):
        train(line)
    report = prune_run(line.journal)
    assert report
    assert numbers(report.kept) == [5, 4, 3]
    line.journal.store.replace("config.snapshot.json", b"{}")
    with pytest.raises(ConfigError, match="nothing is pruned"):
        prune_run(line.journal)


def test_without_the_last_report_a_prune_lists_all_commits(line: Line) -> None:
    for _ in range(12):
        train(line)
        run_prune(line, keep_last=2, keep_every=5)
    assert folders(line) == ["epoch-0005", "epoch-0010", "epoch-0011", "epoch-0012"]
    for path in (Path(line.journal.store.url) / "prunes").iterdir():
        path.write_bytes(b"")
    assert numbers(run_prune(line, keep_last=1).pruned) == [11, 10, 5]


@pytest.mark.parametrize("year", [1966, 9000])
def test_a_clock_far_off_prunes_nothing(line: Line, year: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No record may have such a time, so a prune couldn't write what it deletes."""
    for _ in range(3):
        train(line)
    before = folders(line)

    class Off(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(year, 1, 2, tzinfo=tz)

    monkeypatch.setattr("holdfast.journal.records.datetime", Off)
    with pytest.raises(
        ConfigError, match=f"clock is wrong: it says {year}-01-02, and records can have times from 1970 to 8999"
    ):
        run_prune(line, keep_last=1)
    monkeypatch.undo()
    assert folders(line) == before
    assert verify_run(line.journal).problems == []
