"""The loss of any one file of a run: what a later command needs is named, the rest is listed here and in FORMAT.md."""

from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.config import Retention
from holdfast.errors import RunUnknown
from holdfast.journal import Journal, RehearsalRecord, now
from holdfast.journal.endings import Ending
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from tests.support.makers import CONFIG, IDENTITY, SETTINGS, STEPS_PER_EPOCH, Keys, head_step, make_line, root, train
from tests.support.verified import check

SHOWN = b'{"step": 1, "epoch": 0, "name": "a", "type": "text/plain", "text": "b"}\n'
# Nothing that a later command does depends on them; see "What may be lost" in FORMAT.md. Commit 3 is quarantined, and
# attempt 3 has neither committed nor ended, so that nothing names its own settings.
OF_COMMIT_3 = (
    "commits/00000003", "epoch-0003/", "metrics/00000003", "shown/00000003", "folders/epoch-0003",
    "signatures/00000003",
)  # fmt: skip
OF_PRUNED = ("signatures/00000001", "signatures/00000004")
OF_ATTEMPT_3 = ("attempts/00000003", f"configs/{SETTINGS}-")  # the snapshot, which it wrote, shows their loss
HARMLESS = (*OF_COMMIT_3, *OF_PRUNED, "report.html", "sinks/", "prunes/", "index/00000007")
NOTED = ("latest.json", "metrics/00000007")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    """Make a run of three attempts; the first two have ended, and the third has not committed anything yet."""
    store = LocalStore(str(tmp_path_factory.mktemp("store")))
    line = make_line(store, signing_key=keys[0][0])
    for _ in range(5):
        train(line, shown=SHOWN)
    journal = line.journal
    journal.pin(2)
    journal.pin(5)
    journal.unpin(5)
    journal.quarantine(3, "damaged", 1)
    prune_by_policy(journal, Retention(keep_last=1), STEPS_PER_EPOCH)
    journal.record_rehearsal(RehearsalRecord(attempt=1, commit=5, lines=[], difference="loss", created_at=now()))
    journal.end_attempt(1, Ending("inexact", "other steps", 50))
    line = make_line(store, epochs=10, signing_key=keys[0][0])
    for _ in range(2):
        train(line)
    line.journal.end_attempt(2, Ending("preempted", "", 70))
    make_line(store, epochs=11)
    for name in ("report.html", "sinks/wandb.json"):
        line.journal.store.replace(name, b"{}")
    return store.root


def verify(folder: Path) -> tuple[list[str], list[str]]:
    report = verify_run(Journal(LocalStore(str(folder)), "run"), everything=True)
    return report.problems, report.notes


def test_the_loss_of_each_file_is_named_unless_it_is_harmless(whole: Path, tmp_path: Path) -> None:
    assert verify(whole) == ([], [])
    names = sorted(str(path.relative_to(whole / "run")) for path in whole.rglob("*") if path.is_file())
    folders = {name.partition("/")[0] for name in names}
    records = {"commits", "endings", "attempts", "configs", "folders", "index", "metrics", "shown", "pins", "prunes"}
    assert folders >= records | {"pruned", "quarantine", "rehearsals", "signatures", "epoch-0007", "latest.json"}
    unnamed, shown = [], []
    for name in names:
        (whole / "run" / name).rename(tmp_path / "kept")
        try:
            problems, notes = verify(whole)
            if name.startswith(NOTED):
                assert (problems, [note for note in notes if name in note]) == ([], notes), name
            elif name.startswith("pruned/"):
                assert problems[0].startswith(f"epoch-{name[-9:-5]}/"), name
            elif name.startswith(OF_ATTEMPT_3) and problems[0].startswith("config.snapshot.json doesn't have the set"):
                shown.append(name)
            elif not any(name in problem for problem in problems):
                assert problems == [], name
                unnamed.append(name)
        except RunUnknown:
            assert name == "run.json"
        finally:
            (tmp_path / "kept").rename(whole / "run" / name)
    assert [name for name in unnamed if not name.startswith(HARMLESS)] == []
    assert len(shown) == 2, "the settings of attempt 2 are named"


def test_a_folder_in_the_place_of_a_file_is_a_problem(whole: Path, tmp_path: Path) -> None:
    """Unless nothing that a later command does depends on the file."""
    unnamed = []
    for name in sorted(str(path.relative_to(whole / "run")) for path in whole.rglob("*") if path.is_file()):
        (whole / "run" / name).rename(tmp_path / "kept")
        (whole / "run" / name).mkdir()
        try:
            problems, _ = verify(whole)
            found = name.startswith(OF_ATTEMPT_3) or any(name in problem for problem in problems)
            unnamed += [] if found else [name]
        finally:
            (whole / "run" / name).rmdir()
            (tmp_path / "kept").rename(whole / "run" / name)
    assert [name for name in unnamed if not name.startswith(HARMLESS)] == []
    assert verify(whole) == ([], [])


def test_settings_are_those_that_the_commit_was_signed_with(line: Line, keys: Keys) -> None:
    """The signature covers the commit's record, and that the hash of its settings."""
    name = f"configs/{SETTINGS}.json"
    line.journal.store.delete(name)
    line.journal.record_config(SETTINGS, IDENTITY, CONFIG | {"epochs": 1000})
    of_snapshot, problem = sorted(check(line, trusted_keys=[keys[0][1]]).problems)
    assert of_snapshot.startswith("config.snapshot.json doesn't have the settings with which attempt")
    assert problem.startswith(f"{name} has the SHA-256 ")
    assert " but was committed with " in problem


def test_an_unpacked_run_lacks_no_attempt(line: Line, tmp_path: Path) -> None:
    packing = pytest.importorskip("holdfast.extensions.pack.pack")
    with (tmp_path / "run.tar").open("w+b") as tar:
        packing.pack(line.journal, line.journal.read_commit(5), tar)
        tar.seek(0)
        journal = packing.unpack(tar, LocalStore(str(tmp_path / "other")))
    assert verify(tmp_path / "other") == ([], ["latest.json is missing; the next attempt writes it again"])
    train(make_line(LocalStore(str(tmp_path / "other"))))
    assert verify(tmp_path / "other") == ([], [])
    journal.store.delete("attempts/00000001.json")
    assert verify(tmp_path / "other") == (["attempts/00000001.json is missing"], [])


def test_an_unpacked_run_lacks_no_later_settings(line: Line, tmp_path: Path) -> None:
    """A packed file contains the settings first used with the fingerprint, and not those of the commit's attempt."""
    packing = pytest.importorskip("holdfast.extensions.pack.pack")
    line = make_line(LocalStore(str(root(line).parent)), epochs=10)
    train(line)
    with (tmp_path / "run.tar").open("w+b") as tar:
        packing.pack(line.journal, line.journal.read_commit(head_step(line) // STEPS_PER_EPOCH), tar)
        tar.seek(0)
        packing.unpack(tar, LocalStore(str(tmp_path / "other")))
    assert verify(tmp_path / "other")[0] == []
