"""Processes that sleep (SIGSTOP) just before a write or a deletion, and wake when the run has gone on without them.

Whatever they then do, every checkpoint that counts is whole.
"""

import os
from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.config import Retention
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from tests.support.makers import STEPS_PER_EPOCH, assert_good, damage, make_line, resume, root, train
from tests.support.stalled import stalled


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return make_line(LocalStore(str(tmp_path)))


def age(line: Line) -> None:
    """Let all files of the run be old."""
    for path in root(line).rglob("*"):
        os.utime(path, (0, 0))


def test_a_prune_that_slept_deletes_no_checkpoint_of_the_same_step(line: Line, tmp_path: Path) -> None:
    """The run falls back, and commits the step again whose folder the sleeping prune is about to delete."""
    for _ in range(4):
        train(line)
    line.journal.pin(1)
    with stalled(tmp_path, "prune_once", "delete_folder epoch-0002", keep_last=1) as sleeper:
        damage(line, "epoch-0004")
        later = make_line(LocalStore(str(tmp_path)))
        assert later.head
        assert later.head.number == 1
        again = [train(later), train(later), train(later)]
        code, out = sleeper.wake()
        assert code == 0, out
    assert [commit.step for commit in again] == [20, 30, 40]
    assert later.journal.newest() == again[-1]
    assert_good(LocalStore(str(tmp_path)))


def test_a_prune_that_slept_deletes_no_checkpoint_in_the_place_of_debris(line: Line, tmp_path: Path) -> None:
    for _ in range(2):
        train(line)
    (root(line) / "epoch-0002.2").mkdir()
    (root(line) / "epoch-0002.2" / "checkpoint.safetensors").write_bytes(b"half")
    age(line)
    with stalled(tmp_path, "prune_once", "delete_folder epoch-0002.2", debris_after_s=60) as sleeper:
        LocalStore(str(tmp_path)).inside("run").delete_folder("epoch-0002.2")  # as another prune does
        damage(line, "epoch-0002")
        later = make_line(LocalStore(str(tmp_path)))
        again = train(later)
        assert again.step == 20
        code, out = sleeper.wake()
        assert code == 0, out
    assert verify_run(later.journal).problems == []


def test_a_prune_that_slept_gives_up_no_checkpoint_that_the_run_fell_back_to(line: Line, tmp_path: Path) -> None:
    for _ in range(3):
        train(line)
    with stalled(tmp_path, "prune_once", "create pruned/00000001", keep_last=1) as sleeper:
        for path in ("epoch-0003", "epoch-0002"):
            damage(line, path)
        for number in (3, 2):
            line.journal.quarantine(number, "damaged", line.attempt)
        code, out = sleeper.wake()
        assert (code, "fell back to an earlier checkpoint" in out) == (3, True), out
    resume(line)
    assert line.head
    assert line.head.number == 1


def test_a_prune_that_slept_applies_no_policy_of_an_attempt_that_is_over(line: Line, tmp_path: Path) -> None:
    for _ in range(3):
        train(line)
    with stalled(tmp_path, "prune_once", "create pruned/00000001", keep_last=1) as sleeper:
        make_line(LocalStore(str(tmp_path)))
        code, out = sleeper.wake()
        assert (code, "superseded by attempt 2" in out) == (3, True), out
    assert line.journal.numbers("pruned") == []
    assert_good(LocalStore(str(tmp_path)))


def test_a_prune_that_slept_withdraws_no_record_that_another_has_relied_on(line: Line, tmp_path: Path) -> None:
    for _ in range(2):
        train(line)
    stops = ("create pruned/00000001", "delete pruned/00000001")
    with stalled(tmp_path, "prune_once", *stops, keep_last=1) as sleeper:
        line.journal.pin(1)
        sleeper.wake_until_next()
        line.journal.unpin(1)
        prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
        assert not (root(line) / "epoch-0001").exists()
        code, out = sleeper.wake()
        assert code == 0, out
    assert_good(LocalStore(str(tmp_path)))


@pytest.mark.parametrize("name", ["commits/00000002", "folders/epoch-0002"])
def test_a_commit_that_slept_is_superseded_and_harms_nothing(line: Line, tmp_path: Path, name: str) -> None:
    train(line)
    with stalled(tmp_path, "train_once", f"create {name}") as sleeper:
        later = make_line(LocalStore(str(tmp_path)))  # which adopts what the sleeping attempt has saved
        assert later.head
        assert (later.head.number, later.head.path) == (2, "epoch-0002")
        train(later)
        prune_by_policy(later.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
        code, out = sleeper.wake()
        assert (code, "superseded by attempt 3" in out) == (3, True), out
    assert later.journal.newest() == later.head
    assert_good(LocalStore(str(tmp_path)))


@pytest.mark.parametrize("debris_after_s", [0.0, 60.0])
def test_no_prune_deletes_what_a_live_save_has_written_so_far(
    line: Line, tmp_path: Path, debris_after_s: float
) -> None:
    train(line)
    with line.journal.store.creating("epoch-0002/checkpoint.safetensors") as writer:
        writer.write(b"half")
        age(line)
        prune_by_policy(line.journal, Retention(), STEPS_PER_EPOCH, debris_after_s=debris_after_s)
        writer.write(b"rest")
    assert line.journal.store.read("epoch-0002/checkpoint.safetensors") == b"halfrest"


def test_a_report_that_was_written_late_shows_the_run_as_it_is(line: Line, tmp_path: Path) -> None:
    publishing = pytest.importorskip("holdfast.extensions.report.publishing")
    train(line)
    with stalled(tmp_path, "publish_once", "replace report.html") as sleeper:
        later = make_line(LocalStore(str(tmp_path)))
        newest = train(later)
        publishing.Publisher(later.journal).publish(later.attempt)
        code, out = sleeper.wake()
        assert code == 0, out
    assert newest.checkpoint_sha256 in later.journal.store.read("report.html").decode()


def test_unpacking_that_fails_takes_no_file_from_a_run_that_began_meanwhile(line: Line, tmp_path: Path) -> None:
    """Both write the same bytes under the same names."""
    packing = pytest.importorskip("holdfast.extensions.pack.pack")
    path = tmp_path / "packed.tar"
    with path.open("wb") as file:
        packing.pack(line.journal, train(line), file)
    elsewhere = tmp_path / "elsewhere"
    with stalled(elsewhere, "unpack_file", "creating epoch-0001/metadata.json", path=str(path)) as sleeper:
        train(make_line(LocalStore(str(elsewhere))))
        code, out = sleeper.wake()
        assert (code, "it exists" in out) == (3, True), out
    assert_good(LocalStore(str(elsewhere)))
