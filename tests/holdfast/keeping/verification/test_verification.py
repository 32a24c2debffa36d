"""Verification of a run: a good run has no problems, and each kind of damage is a problem that names the file."""

import hashlib
import io
import shutil
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import Line
from holdfast.checkpoint import METRICS, PAYLOAD
from holdfast.config import Retention, RunConfig
from holdfast.errors import ConfigError, RecordDamaged, RunUnknown
from holdfast.journal import AttemptRecord, ConfigRecord, Journal, RunRecord, read_record
from holdfast.journal.configs import find_conflict
from holdfast.journal.trainers import list_trainers
from holdfast.keeping.retention import prune_by_policy, prune_run
from holdfast.keeping.verification import verify_run
from holdfast.provenance.fingerprint import fingerprint, to_plain
from holdfast.store.local import LocalStore
from tests.support.makers import (
    CONFIG,
    FILES,
    IDENTITY,
    SETTINGS,
    STEPS_PER_EPOCH,
    Keys,
    claim,
    make_commit,
    make_latest,
    root,
    save_next,
)
from tests.support.verified import LIVE, check, fresh, numbers, pruned


def reseal(line: Line, number: int, **fields: Any) -> None:
    """Change fields of a commit's record and correct the record's hash."""
    commit = fresh(line).read_commit(number).model_copy(update=fields)
    line.journal.store.replace(f"commits/{number:08d}.json", commit.to_bytes())


def test_a_good_run_has_no_problems_and_no_notes(line: Line) -> None:
    for deep in (False, True):
        report = check(line, deep=deep)
        assert (report.ok, report.problems, report.notes) == (True, [], [])
        assert numbers(report.checkpoints) == LIVE
        assert {(entry.standing, tuple(entry.damaged)) for entry in report.checkpoints} == {("counts", ())}
    files = [path for path in root(line).rglob("*") if path.is_file()]
    # Not counted: latest.json, which is only a hint, and the metrics of the quarantined commit.
    others = ("epoch-", "signatures")
    assert report.records == len([path for path in files if not path.parent.name.startswith(others)]) - 2


def test_verifying_an_unknown_run_raises(line: Line) -> None:
    with pytest.raises(RunUnknown):
        verify_run(Journal(LocalStore(str(root(line).parent)), "other"))


def test_a_run_that_has_only_begun_is_good(tmp_path: Path) -> None:
    journal = Journal(LocalStore(str(tmp_path)), "run")
    journal.begin("m:f")
    report = verify_run(journal, everything=True)
    assert (report.ok, report.notes, report.checkpoints) == (True, [], [])


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def truncated(data: bytes) -> bytes:
    return data[:-1]


def gone(data: bytes) -> None:
    return None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((f"epoch-0006/{name}", change) for name in FILES for change in (flipped, truncated, gone)),
        (f"epoch-0002/{PAYLOAD}", flipped),
        ("metrics/00000001.jsonl", flipped),
        ("metrics/00000001.jsonl", gone),
        ("metrics/00000007.jsonl", flipped),
        *((f"commits/0000000{number}.json", change) for number in (1, 4, 6, 7) for change in (flipped, gone)),
        ("run.json", flipped),
        ("config.snapshot.json", flipped),
        (f"configs/{SETTINGS}.json", flipped),
        ("attempts/00000001.json", flipped),
        ("quarantine/00000003.json", flipped),
        ("pruned/00000004.json", flipped),
        ("pins/00000002.json", flipped),
        ("prunes/00000005.json", flipped),
        ("latest.json", flipped),
    ],
)  # fmt: skip
def test_damage_is_one_problem_that_names_the_file(
    line: Line, name: str, change: Callable[[bytes], bytes | None]
) -> None:
    path = root(line) / name
    changed = change(path.read_bytes())
    path.unlink() if changed is None else path.write_bytes(changed)
    report = check(line)
    assert not report.ok
    assert len(report.problems) == 1
    assert name in report.problems[0]
    assert report.notes == []


def test_both_digests_are_shown(line: Line) -> None:
    path = root(line) / "epoch-0006" / PAYLOAD
    good = path.read_bytes()
    path.write_bytes(flipped(good))
    was, now_is = (hashlib.sha256(data).hexdigest() for data in (good, flipped(good)))
    report = check(line)
    assert report.problems == [f"epoch-0006/{PAYLOAD} is {now_is} but was committed as {was}"]
    (damaged,) = (entry for entry in report.checkpoints if entry.damaged)
    assert damaged.damaged == [{"path": "epoch-0006", "name": PAYLOAD, "expected": was, "found": now_is}]


def test_all_damage_is_reported(line: Line) -> None:
    names = [f"epoch-0006/{PAYLOAD}", f"epoch-0005/{METRICS}", "commits/00000001.json", "metrics/00000004.jsonl"]
    for name in names:
        (root(line) / name).write_bytes(b"?")
    problems = check(line).problems
    assert len(problems) == len(names)
    assert all(any(name in problem for problem in problems) for name in names)


def test_a_gap_is_one_problem_however_wide(line: Line) -> None:
    for number in (6, 7):
        (root(line) / f"commits/0000000{number}.json").unlink()
    line.journal.store.create("commits/00090000.json", make_commit(90_000, path="epoch-0008").to_bytes())
    assert "commits/00000006.json to commits/00089999.json are missing" in check(line).problems


@pytest.mark.parametrize("left", ["latest.json", "metrics", "pins", "prunes", "pruned"])
def test_a_lost_newest_commit_is_found_by_any_record_that_names_it(line: Line, left: str) -> None:
    """The newest commit has no successor whose link would show the loss."""
    line.journal.pin(7)
    prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
    line.journal.store.create("pruned/00000007.json", pruned(line, 7))
    (root(line) / "commits/00000007.json").unlink()
    for name in {"latest.json", "metrics", "pins", "prunes", "pruned"} - {left}:
        path = root(line) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "commits/00000007.json is missing" in check(line).problems


@pytest.mark.parametrize("name", ["attempts/00000001.json", "pins/00000002.json"])
def test_a_record_under_anothers_name_is_damage(line: Line, name: str) -> None:
    other = f"{name[:-6]}9.json"
    (root(line) / name).rename(root(line) / other)
    assert f"{other} holds the record of a different number, {name[-6]}" in check(line).problems


@pytest.mark.parametrize("says", [SETTINGS, "f" * 64])
def test_settings_under_a_wrong_fingerprint_are_damage(line: Line, says: str) -> None:
    record = ConfigRecord(fingerprint=says, identity=IDENTITY | {"seed": 1}, config=CONFIG)
    name = f"configs/{says}.json"
    line.journal.store.replace(name, record.to_bytes())
    assert check(line).problems == [f"{name}: the record's fingerprint isn't the hash of its settings"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": "evil:f"}, "the record's configuration has recipe = 'evil:f', but its fingerprint is of 'm:f'"),
        ({"seed": 2}, "the record's configuration has seed = 2, but its fingerprint is of 1234"),
        ({"settings": {"lr": 0.2}}, "the record's configuration has settings.lr = 0.2, but its fingerprint is of 0.1"),
        (
            {"settings": {"lr": "0.2"}},
            "the record's configuration has settings.lr = '0.2', but its fingerprint is of 0.1",
        ),
        ({"settings": {"lr": "0.1"}}, ""),  # a text of which the recipe makes the number
        (
            {"settings": {"lr": 0.1, "do": "it"}},
            "the record's configuration has settings.do = 'it', but its fingerprint is of",
        ),
        ({"epochs": "many"}, "config.epochs: Input should be a valid integer"),
        ({"compute": {"nodes": 2, "later": 1}}, "config.compute: Value error, nodes = 2 needs a rendezvous"),
        ({"settings": {}, "epochs": 77, "later": {"version": 3}}, ""),  # a default, an operational setting, a newer one
    ],
)
def test_a_configuration_has_to_be_that_of_its_fingerprint(line: Line, changes: dict[str, Any], said: str) -> None:
    line.journal.store.delete(f"configs/{SETTINGS}.json")
    line.journal.record_config(SETTINGS, IDENTITY, CONFIG | changes)
    of_hashes = ("was committed with", "doesn't have the settings")
    problems = [problem for problem in check(line).problems if not any(each in problem for each in of_hashes)]
    assert len(problems) == (2 if said else 0), problems  # in configs/, and in config.snapshot.json
    assert all(said in problem for problem in problems)


def test_times_agree_though_records_spell_them_in_two_ways() -> None:
    times = {"day": date(2026, 1, 2), "at": datetime(2026, 1, 2, tzinfo=UTC), "list": [1.0, 2]}
    given = RunConfig(recipe="m:f", run="run", settings=times)
    identity = to_plain(given.identity)
    record = ConfigRecord(fingerprint=fingerprint(identity), identity=identity, config=given.model_dump(mode="json"))
    assert find_conflict(ConfigRecord.from_bytes(record.to_bytes(), "record")) == ""


def test_each_snapshot_of_the_settings_is_checked(line: Line) -> None:
    claim(line.journal, 2)
    line.journal.record_config(SETTINGS, IDENTITY, CONFIG | {"epochs": 5})
    (name,) = (name for name in line.journal.store.list("configs") if name != f"{SETTINGS}.json")
    assert check(line).ok

    def list_others() -> list[str]:
        return [problem for problem in check(line).problems if not problem.startswith("config.snapshot.json")]

    path = root(line) / "configs" / name
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"epochs": 5', b'"epochs": 6'))
    damaged = f"configs/{name} can't be read: the record's content doesn't hash to its record_sha256"
    assert list_others() == [damaged]
    path.write_bytes(data)
    other = f"{SETTINGS}-{'0' * 16}.json"
    path.rename(path.with_name(other))
    assert list_others() == [f"configs/{other} contains settings with a different fingerprint, {SETTINGS}"]


def test_a_stale_or_missing_latest_is_only_a_note(line: Line) -> None:
    line.journal.publish_latest(make_latest(line.journal.read_commit(6)))
    report = check(line)
    assert (report.ok, report.notes) == (True, ["latest.json names commit 6 of 7; the next attempt renews it"])
    (root(line) / "latest.json").unlink()
    report = check(line)
    assert (report.ok, report.notes) == (True, ["latest.json is missing; the next attempt writes it again"])


def test_the_newest_may_lack_its_metrics_after_a_kill(line: Line) -> None:
    (root(line) / "metrics/00000007.jsonl").unlink()
    assert check(line).ok


def test_a_record_that_was_replaced_is_found_through_its_successor(line: Line) -> None:
    reseal(line, 5, created_at="2020-01-01T00:00:00+00:00")
    assert check(line).problems == ["commits/00000006.json isn't linked to commits/00000005.json"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"previous_checkpoint_sha256": "f" * 64}, "was trained from a different checkpoint than that of commit 6"),
        ({"parent": 5}, "was trained from a different checkpoint than that of commit 5"),
        ({"parent": 7}, "says that its parent is commit 7, which is later"),
    ],
)
def test_a_commit_has_the_checkpoint_of_its_parent(line: Line, fields: dict[str, Any], problem: str) -> None:
    reseal(line, 7, **fields)
    assert check(line).problems == [f"commits/00000007.json {problem}"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"step": 75}, "epoch-0007: step was saved as 70 but committed as 75"),
        ({"epoch": 8}, "epoch-0007: epoch was saved as 7 but committed as 8"),
        (
            {"checkpoint_sha256": "f" * 64},
            "commit 7 contradicts itself: the files that it lists don't have the content id that it states, ffff",
        ),
        ({"config_fingerprint": "f" * 64}, "config_fingerprint was saved as"),
        ({"parent": 99, "previous_checkpoint_sha256": "f" * 64}, "previous_checkpoint_sha256 was saved as"),
        ({"files": []}, f"the record of commit 7 lists no file {PAYLOAD}"),
    ],
)
def test_a_deep_check_finds_a_commit_that_contradicts_its_checkpoint(
    line: Line, fields: dict[str, Any], problem: str
) -> None:
    reseal(line, 7, **fields)
    assert any(problem in found for found in check(line, deep=True).problems)


def test_everything_lists_quarantined_and_uncommitted_checkpoints(line: Line) -> None:
    (root(line) / "epoch-0003" / PAYLOAD).write_bytes(b"damaged")
    saved = save_next(line)
    assert numbers(check(line).checkpoints) == LIVE
    report = check(line, everything=True, deep=True)
    assert report.ok
    assert report.notes == [f"{saved.path} is named by no commit"]
    others = {entry.standing: entry for entry in report.checkpoints if entry.standing != "counts"}
    assert others.keys() == {"quarantined", "uncommitted"}
    assert (others["quarantined"].commit, len(others["quarantined"].damaged)) == (3, 1)
    assert (others["uncommitted"].commit, others["uncommitted"].path) == (None, saved.path)
    assert others["uncommitted"].checkpoint_sha256 == saved.metadata.checkpoint_sha256
    assert others["uncommitted"].size_bytes == sum(file.size_bytes for file in saved.files)


def test_an_unreadable_record_of_a_quarantined_commit_is_no_problem(line: Line) -> None:
    (root(line) / "commits/00000003.json").write_bytes(b"{")
    assert check(line, everything=True).ok
    (root(line) / "commits/00000003.json").unlink()
    assert check(line, everything=True).ok


def test_every_commit_that_counts_is_signed(line: Line, keys: Keys) -> None:
    (_, mine), (_, another) = keys
    for name in ("00000003", "00000004"):  # quarantined and pruned commits need no signature
        (root(line) / f"signatures/{name}-00000001.json").unlink()
    assert check(line, trusted_keys=[another, mine]).ok
    problems = check(line, trusted_keys=[another]).problems
    assert len(problems) == len(LIVE)
    assert all("was not made with a trusted key" in problem for problem in problems)


def test_a_missing_or_wrong_signature_is_a_problem(line: Line, keys: Keys) -> None:
    signatures = root(line) / "signatures"
    shutil.copy(signatures / "00000006-00000001.json", signatures / "00000005-00000001.json")
    (signatures / "00000002-00000001.json").unlink()
    reseal(line, 7, created_at="2020-01-01T00:00:00+00:00")
    lost = "signatures/00000002-00000001.json is missing"
    assert check(line).problems == [lost]
    found = check(line, trusted_keys=[keys[0][1]]).problems
    assert found[:2] == [lost, "commit 2 of run 'run' is not signed"]
    assert "signature of commits/00000005.json was made for 'commits/00000006.json'" in found[2]
    assert "signature of commits/00000007.json was made for different bytes" in found[3]
    assert len(found) == 4


def test_a_run_that_was_unpacked_begins_with_its_checkpoint(line: Line, tmp_path: Path) -> None:
    packing = pytest.importorskip("holdfast.extensions.pack.pack")
    packed = io.BytesIO()
    packing.pack(line.journal, line.journal.read_commit(6), packed)
    packed.seek(0)
    there = packing.unpack(packed, LocalStore(str(tmp_path / "other")))
    report = verify_run(there, everything=True, deep=True)
    assert (report.problems, report.notes) == ([], ["latest.json is missing; the next attempt writes it again"])
    assert numbers(report.checkpoints) == [6]
    (tmp_path / "other" / "run" / "commits" / "00000006.json").unlink()
    there.publish_latest(make_latest(line.journal.read_commit(6)))
    assert verify_run(Journal(LocalStore(str(tmp_path / "other")), "run")).problems == [
        "commits/00000006.json is missing"
    ]


FORGERIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "another machine": ("attempts/00000001.json", {"host": "forged"}, "attempts/00000001.json"),
    "other sources": ("attempts/00000001.json", {"environment": {"sources": {"a": "b"}}}, "attempts/00000001.json"),
    "accepted drift": ("attempts/00000001.json", {"lineage": {"drift": ["seed"]}}, "attempts/00000001.json"),
    "a later first commit": ("run.json", {"first_commit": 2}, "run.json"),
    "another run": ("run.json", {"run": "other"}, "run.json"),
    "another run's settings": ("config.snapshot.json", {"config": CONFIG | {"run": "other"}}, "config.snapshot.json"),
}


@pytest.mark.parametrize(("name", "changes", "found"), FORGERIES.values(), ids=FORGERIES)
def test_a_forged_record_on_which_a_signed_commit_rests_is_found(
    line: Line, keys: Keys, name: str, changes: dict[str, Any], found: str
) -> None:
    """The forger has computed all hashes again, but can't sign the commits that name them."""
    classes = {"attempts": AttemptRecord, "run.json": RunRecord, "config.snapshot.json": ConfigRecord}
    cls = classes[name.partition("/")[0]]
    forged = read_record(line.journal.store, cls, name).model_copy(update=changes)
    line.journal.store.replace(name, forged.to_bytes())
    problems = check(line, trusted_keys=[keys[0][1]]).problems
    assert [problem for problem in problems if problem.startswith(found)]
    if name.startswith("attempts/"):
        with pytest.raises(RecordDamaged, match="was changed after commit 5 was made"):
            list_trainers(fresh(line), line.journal.read_commit(5))
    if name == "config.snapshot.json":
        with pytest.raises(ConfigError, match=r"nothing is pruned, because .* has the settings of a run 'other'"):
            prune_run(fresh(line))


def test_a_signature_covers_what_a_commit_names_and_nothing_else(line: Line, keys: Keys) -> None:
    report = check(line, trusted_keys=[keys[0][1]])
    assert {"run.json", "attempts/", "configs/", "commits/", "config.snapshot.json"} <= report.covered.keys()
    assert report.uncovered.keys() == {
        "checkpoint/", "folders/", "index/", "latest.json", "metrics/", "pins/", "pruned/", "prunes/", "quarantine/",
        "signatures/",
    }  # fmt: skip
    assert report.coverage[-1].endswith("the newest signed commit is 7")
    line.journal.store.create("attempts/00000002.json", line.journal.store.read("attempts/00000001.json"))
    assert check(line, trusted_keys=[keys[0][1]]).uncovered["attempts/"] == ["attempts/00000002.json"]
