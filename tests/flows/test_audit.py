"""Tests of audits: a replayed chunk ends on the committed bytes, or the audit names the first difference."""

import hashlib
import itertools
import json
import platform
import shutil
import time
from pathlib import Path

import pytest

from holdfast import checkpoint
from holdfast.attempt.line import describe_latest
from holdfast.cli import app, run_app
from holdfast.config import Retention
from holdfast.errors import WrongUse
from holdfast.journal import AuditRecord, Commit, FileRecord, Journal, record_name
from holdfast.journal.audits import list_audits, read_audits
from holdfast.keeping.retention import prune_by_policy
from holdfast.ledger.audit_share import Times
from holdfast.proof.audit import audit_commit, choose_commits
from holdfast.store import open_store
from holdfast.testing.faults import fault
from tests.conftest import COMMAND_WITHIN_S, Engine, Reference, RunFlow
from tests.support.lives import Lives

pytestmark = pytest.mark.slow

# The commits end with steps 10, a few more, 20 and 30. Orphaned ranks saved the second, which was then adopted.
OPTIONS = ("chunk.steps=10", "retention.keep_last=99")
STEPS_PER_EPOCH = 10
WEIGHT = "model.0.weight"


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Path:
    """Return a run that was killed in its second chunk, with two epochs, and then finished with three."""
    engine = Engine(tmp_path_factory.mktemp("audited"), {}, nursery=nursery)
    struck = engine.folder / "struck"
    engine.run("epochs=2", *OPTIONS, TOY_DELAY_S="0.1", **fault("latest-replaced", 1, "self", struck))
    assert struck.exists()
    await_orphans(engine)
    engine.finish(*OPTIONS)
    return engine.run_folder


def await_orphans(engine: Engine) -> None:
    """Wait until the ranks of a dead attempt have saved their state."""
    deadline = time.monotonic() + COMMAND_WITHIN_S
    while not list(engine.run_folder.glob("epoch-*-step-*/metadata.json")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def run(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the run that tests audit."""
    return shutil.copytree(untouched, tmp_path_factory.mktemp("run") / untouched.name)


@pytest.fixture
def copied(untouched: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that no other test changes."""
    return shutil.copytree(untouched, tmp_path / "runs" / "toy")


def journal_of(run: Path) -> Journal:
    return Journal(open_store(str(run.parent)), run.name)


def forge(run: Path, number: int) -> Commit:
    """Flip one bit of a weight in a checkpoint, make all hashes and records consistent with it; return the commit."""
    journal = journal_of(run)
    commit = journal.read_commit(number)
    payload = checkpoint.read_payload(journal.store, commit)
    memoryview(payload.tensors[WEIGHT].pieces[0])[2] ^= 1
    data = b"".join(map(bytes, checkpoint.serialize(payload)))
    content_id = hashlib.sha256(data).hexdigest()
    metadata = checkpoint.read_metadata(journal.store, commit.path)
    assert metadata
    parts = [FileRecord(name=checkpoint.PAYLOAD, size_bytes=len(data), sha256=content_id)]
    metadata = metadata.model_copy(update={"checkpoint_sha256": content_id, "parts": parts})
    forged = {checkpoint.PAYLOAD: data, checkpoint.METADATA: metadata.to_bytes()}
    files = {file.name: file for file in commit.files}
    for name, content in forged.items():
        journal.store.replace(f"{commit.path}/{name}", content)
        sha256 = hashlib.sha256(content).hexdigest()
        files[name] = FileRecord(name=name, size_bytes=len(content), sha256=sha256)
    commit = commit.model_copy(update={"files": list(files.values()), "checkpoint_sha256": content_id})
    journal.store.replace(record_name("commits", number), commit.to_bytes())
    if number == journal.newest_number():
        journal.publish_latest(describe_latest(commit, metadata))
    return commit


def test_every_commit_of_a_run_that_was_killed_is_identical(engine: Engine, run: Path) -> None:
    *_, third, second, first = journal_of(run).candidates()
    assert [commit.why for commit in (first, second, third)] == ["chunk", "adopted", "chunk"]
    seed = next(seed for seed in itertools.count() if choose_commits(journal_of(run), 1, seed) == [third])
    chosen_by = {1: ["--commit", "1"], 2: ["--commit", second.path], 3: ["--random", "1", "--seed", str(seed)]}
    # No record says how the ranks of an adopted chunk began: perhaps with a resume, which the audit then covers.
    starts = {
        1: "0-10",
        2: f"0-{second.step}, across the resume at 10",
        3: f"10-20, across the resume at {second.step}",
    }
    for commit in (first, second, third):
        done = engine.command("audit", str(run), *chosen_by[commit.number])
        assert done.returncode == 0, done.stderr
        first, *rows = done.stdout.splitlines()
        assert first == (
            f"commit {commit.number} ({commit.path}, steps {starts[commit.number]}): "
            f"replayed to the same bytes, {commit.checkpoint_sha256}"
        )
        assert rows == [
            f"  equal bytes, not certified yet: only {platform.node()} has trained it; "
            "an audit on another host would certify it",
            f"    next: holdfast audit {run} --commit {commit.number} on a host other than {platform.node()}",
        ]


def test_an_audit_begins_where_it_is_told_to(engine: Engine, run: Path) -> None:
    journal = journal_of(run)
    done = engine.command("audit", str(run), "--commit", "3", "--from", "0", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["is_identical"]
    assert (found["start"], found["stop"], found["from_commit"]) == (0, 20, 0)
    assert found["resumes"] == [journal.read_commit(number).step for number in (1, 2)]


def test_an_audit_refuses_a_start_that_was_pruned_or_is_no_ancestor(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prune_by_policy(journal_of(copied), Retention(keep_last=2), STEPS_PER_EPOCH)
    of_no_ancestor = "commit 3 of run 'toy' doesn't continue from commit"
    pruned = "of run 'toy' can't be replayed: commit 1 was pruned"
    for number, start, error, hint in (
        ("3", "3", f"--from 3: {of_no_ancestor} 3", "give an ancestor of commit 3, or 0 for the beginning of the run"),
        ("3", "9", f"--from 9: {of_no_ancestor} 9", "give an ancestor of commit 3, or 0 for the beginning of the run"),
        ("3", "1", f"commit 3 {pruned}", "use --from 0, the beginning of the run"),
        ("4", "1", f"commit 4 {pruned}", "begin with the oldest checkpoint that is left: --from 3"),
    ):
        assert run_app(app, ["audit", str(copied), "--commit", number, "--from", start]) == 1
        assert capsys.readouterr().err.splitlines() == [f"error: {error}", f"hint: {hint}"]


def test_an_audit_says_which_resume_it_could_not_check(engine: Engine, copied: Path) -> None:
    """The run was resumed from commit 2. Its parent was pruned, so that a replay can't repeat that resume."""
    second = journal_of(copied).read_commit(2)
    prune_by_policy(journal_of(copied), Retention(keep_last=3), STEPS_PER_EPOCH)
    done = engine.command("audit", str(copied), "--commit", "3")
    assert done.returncode == 0, done.stderr
    first, line, *_ = done.stdout.splitlines()
    assert f"steps {second.step}-20): replayed to the same bytes" in first
    assert line == (
        f"  not checked: the replay begins with the resume at step {second.step}: "
        "commit 1 was pruned, so the replay can't begin before commit 2"
    )


def test_the_newest_commit_of_an_extended_run_is_audited(
    run: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings on record have fewer epochs than this commit needs. This audit starts real ranks."""
    assert run_app(app, ["audit", str(run), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["commit"], found["start"], found["stop"], found["is_identical"]) == (4, 20, 30, True)
    assert found["expected"] == found["found"] == reference.standing.checkpoint_sha256
    assert (found["first_step"], found["different"], found["notes"]) == (None, [], [])


def test_another_machine_certifies_a_commit(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare `holdfast show` after an audit on the run's own machine, and after one on another machine."""
    for host, certified in ((platform.node(), False), ("elsewhere", True)):
        monkeypatch.setattr(platform, "node", lambda host=host: host)
        assert run_app(app, ["audit", str(copied), "--commit", "4"]) == 0
        capsys.readouterr()
        assert run_app(app, ["show", str(copied)]) == 0
        row = "commit 4 (step 30): elsewhere has trained it again to the same bytes"
        assert (row in capsys.readouterr().out) is certified
    assert list_audits(journal_of(copied)) == {4: [1, 2]}


def test_an_audit_that_cannot_be_recorded_is_good(copied: Path, engine: Engine) -> None:
    (copied / "audits").write_text("a file in the place of the folder")
    done = engine.command("audit", str(copied), "--commit", "4")
    assert done.returncode == 0, done.stderr
    assert "replayed to the same bytes" in done.stdout
    assert "the audit's result can't be recorded" in done.stderr


def test_commits_to_audit_are_chosen_at_random(run: Path, copied: Path) -> None:
    journal = journal_of(run)
    chosen = [[commit.number for commit in choose_commits(journal, 2, seed)] for seed in range(40)]
    assert chosen == [[commit.number for commit in choose_commits(journal, 2, seed)] for seed in range(40)]
    assert {tuple(numbers) for numbers in chosen} == set(itertools.combinations([1, 2, 3, 4], 2))
    assert [commit.number for commit in choose_commits(journal, 99)] == [1, 2, 3, 4]
    prune_by_policy(journal_of(copied), Retention(keep_last=3), STEPS_PER_EPOCH)
    assert [commit.number for commit in choose_commits(journal_of(copied), 99)] == [3, 4]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--commit", "9"], "run 'toy' has no commit 9"),
        (["--random", "1", "--commit", "1"], "--commit and --random exclude each other"),
        (["--random", "1", "--from", "1"], "--from and --random exclude each other"),
        (["--random", "0"], "--random 0: expected at least 1"),
        (["--random", "-1"], "--random -1: expected at least 1"),
        (["--share", "0.1", "--commit", "1"], "--commit and --share exclude each other"),
        (["--share", "0.1", "--random", "1"], "--random and --share exclude each other"),
        (["--share", "0"], "--share 0: expected a share of the training time, up to 1, such as --share 0.01"),
        (["--share", "1.5"], "--share 1.5: expected"),
    ],
)
def test_wrong_use(run: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str) -> None:
    assert run_app(app, ["audit", str(run), *options]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {error}")


def read_audits_of(journal: Journal) -> list[AuditRecord]:
    audits = list_audits(journal)
    return [audit for number in audits for audit in read_audits(journal, number, audits[number])]


def test_audits_of_a_share_take_no_more_and_have_their_seed_on_record(
    engine: Engine, copied: Path, run_flow: RunFlow
) -> None:
    """The flow and the command count the same audits, and the second finds no time left."""
    journal = journal_of(copied)
    commits = [journal.read_commit(number) for number in (1, 2, 3, 4)]
    times = Times.of(commits)
    longest_s = times.measure_longest(commits)
    share = (longest_s + times.measure(4, 3)) / times.trained_s  # the newest one fits, and then one more
    assert share < 1
    done = run_flow("audit", store=str(copied.parent), share=share, seed=7)
    assert done.returncode == 0, done.stderr
    audits = read_audits_of(journal)
    assert 4 in {each.commit for each in audits}
    assert len(audits) >= 2
    assert {(each.seed, each.share) for each in audits} == {(7, share)}
    spent_s = times.measure_audits(audits)
    assert share * times.trained_s - longest_s < spent_s <= share * times.trained_s + 1e-6
    assert f"run toy: share     {share:g} of {times.trained_s:.3g} s of training is" in done.stderr
    done = engine.command("audit", str(copied), "--share", str(spent_s / times.trained_s))
    assert done.returncode == 0, done.stderr
    assert "audits no commit now" in done.stdout
    done = engine.command("audit", str(copied), "--random", "1")
    assert done.returncode == 0, done.stderr
    (by_chance,) = [each for each in read_audits_of(journal) if each.seed != 7]
    assert by_chance.share is None
    assert [each.number for each in choose_commits(journal, 1, by_chance.seed)] == [by_chance.commit]


def test_a_pruned_commit_can_not_be_replayed(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prune_by_policy(journal_of(copied), Retention(keep_last=1), STEPS_PER_EPOCH)
    for options, error, hint in (
        (
            [],
            "commit 4 of run 'toy' can't be replayed: commit 3 was pruned",
            "retention.keep_last and holdfast pin keep more of them",
        ),
        (
            ["--commit", "2"],
            "the checkpoint of commit 2 of run 'toy' was pruned",
            "verify lists the remaining checkpoints",
        ),
        (
            ["--random", "1"],
            "run 'toy' has no commit that can be replayed",
            "raise retention.keep_last, then train a chunk: a replay begins at the checkpoint before the commit",
        ),
    ):
        assert run_app(app, ["audit", str(copied), *options]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == f"error: {error}"
        assert lines[1].startswith("hint: ")
        assert lines[1].endswith(hint)


class PrunedMeanwhile(Journal):
    """A journal that prunes its run right after each check whether a commit was pruned."""

    def is_pruned(self, number: int) -> bool:
        was_pruned = super().is_pruned(number)
        if not was_pruned:
            prune_by_policy(journal_of(Path(self.store.url)), Retention(keep_last=1), STEPS_PER_EPOCH)
        return was_pruned


def test_a_prune_during_an_audit_is_no_damage(copied: Path) -> None:
    journal = PrunedMeanwhile(open_store(str(copied.parent)), "toy")
    with pytest.raises(WrongUse, match=r"commit 4 of run 'toy' can't be replayed: commit 3 was pruned"):
        audit_commit(journal, journal.read_commit(4))


def test_a_forgery_that_verifies_is_found(engine: Engine, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    honest = journal_of(copied).read_commit(4).checkpoint_sha256
    forged = forge(copied, 4)
    assert run_app(app, ["verify", str(copied), "--all", "--deep"]) == 0
    assert "note" not in capsys.readouterr().out
    done = engine.command("audit", str(copied))
    assert done.returncode == 2
    first, *rows = done.stdout.splitlines()
    assert first.endswith(f"the replay ends on different bytes: {honest[:12]}, not {forged.checkpoint_sha256[:12]}")
    assert rows[:3] == [
        "  every step has the same samples, loss, gradient and random numbers",
        f"  then, at the end: {WEIGHT}",
        f"  undecided: {platform.node()} differs from itself",
    ]
    done = engine.command("evaluate", str(copied))
    assert done.returncode == 2
    error, *_ = done.stderr.splitlines()
    assert "the probe gives a different result" in error
    assert "commit 4" in error


def test_no_replay_begins_at_a_parent_that_fails_the_gate(engine: Engine, copied: Path) -> None:
    forge(copied, 3)
    done = engine.command("audit", str(copied))
    assert done.returncode == 2
    assert "commit 4" in done.stdout
    assert "gate" in done.stdout
    assert "the probe gives a different result" in done.stdout
    assert "every step has the same" not in done.stdout, "no step was trained"


def test_every_run_of_a_store_is_audited(run: Path, copied: Path, run_flow: RunFlow) -> None:
    """The store has four runs: one without commits, a forged one, an honest one, and one whose settings were lost."""
    store = copied.parent
    Journal(open_store(str(store)), "begun").begin("m:f")
    forged = copied.rename(store / "forged")
    forge(forged, 4)
    # Only the forged commit can be replayed then.
    prune_by_policy(journal_of(forged), Retention(keep_last=2), STEPS_PER_EPOCH)
    shutil.copytree(run, store / "honest")
    shutil.copytree(run, store / "lost")
    shutil.rmtree(store / "lost" / "configs")
    done = run_flow("audit", store=str(store), commits=1, seed=1)
    (chosen,) = choose_commits(journal_of(run), 1, 1)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "run begun has no commit that can be replayed"
    assert lines[1].startswith("warning: run forged: commit 4 (epoch-0003, steps 20-30): ")
    assert lines[3] == f"  then, at the end: {WEIGHT}"
    assert lines[4:6] == ["warning: run forged, commit 4:", f"  undecided: {platform.node()} differs from itself"]
    assert lines[7].startswith(
        "no deployment of the flow audit exists, so start the audit on a different host yourself: "
        f"holdfast audit {store}/forged --commit "
    )
    assert lines[8].startswith(f"run honest: commit {chosen.number} ({chosen.path}, steps ")
    assert "replayed to the same bytes" in lines[8]
    assert lines[9].startswith(f"warning: commit {chosen.number} of run lost was not audited: the settings of commit")
    assert lines[10].startswith("warning: run forged has a verdict without an answer: commit 4: undecided: ")
    assert lines[11] == "error: damaged, or trained again to different bytes: commit 4 of run forged"
    assert lines[12].startswith("hint: ")
    assert len(lines) == 13
    shutil.rmtree(forged)
    shutil.rmtree(store / "honest")
    done = run_flow("audit", store=str(store), commits=1, seed=1)
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1] == f"error: these commits were not audited: commit {chosen.number} of run lost"
