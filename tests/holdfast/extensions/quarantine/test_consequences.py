"""What follows if audits have found a machine: its quarantine, and the rollback or the hold of the run."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.machine.host import VARIABLE
from tests.conftest import COMMAND_WITHIN_S, Engine, RunFlow
from tests.support.flipping import faulty
from tests.support.lives import Lives
from tests.support.wrong_machine import FLIPS_AT, OPTIONS, audit_on, copy_run, deployed_audit, journal_of, train_on

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Engine:
    """Return the engine of a run that a healthy machine has trained."""
    return train_on(tmp_path_factory.mktemp("healthy"), nursery, "a")


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Engine:
    """Return the engine of a run whose machine, a, computes wrongly from step 16 on."""
    return train_on(tmp_path_factory.mktemp("struck"), nursery, "a", **faulty("a", FLIPS_AT))


def test_a_machine_that_was_found_begins_no_attempt_until_it_is_released(struck: Engine, tmp_path: Path) -> None:
    engine = copy_run(struck, tmp_path)
    audit_on(engine, "b")
    audit_on(engine, "c")
    done = engine.run(*OPTIONS, "epochs=4")
    assert done.returncode == 3, done.stderr
    assert f"error: this machine is quarantined in {engine.store}: a, since " in done.stderr
    assert "commit 2 of run toy: a ended on different bytes than b and c" in done.stderr
    assert journal_of(engine).attempts() == 1, "it claims no attempt"
    doctor = ("doctor", "--store", engine.store)
    assert "\nquarantined: a, since " in engine.command(*doctor).stdout
    assert engine.command(*doctor, "--release", "b").returncode == 1
    assert (
        engine.command(*doctor, "--release", "a").stdout == f"a is released: runs of {engine.store} train on it again\n"
    )
    assert "quarantined" not in engine.command(*doctor).stdout
    assert engine.run(*OPTIONS, "epochs=4").returncode == 0


ROLLBACK = ("--on-fault", "rollback")


def final_id(engine: Engine) -> str:
    return engine.standing().checkpoint_sha256


def test_a_run_that_is_rolled_back_ends_on_the_healthy_bytes(struck: Engine, healthy: Engine, tmp_path: Path) -> None:
    engine = copy_run(struck, tmp_path)
    assert engine.run(*OPTIONS, "epochs=4", **{VARIABLE: "b"}).returncode == 2, "the gate refuses the last commit"
    audit_on(engine, "b", *ROLLBACK)
    assert audit_on(engine, "c", *ROLLBACK)["kind"] == "machine"
    journal = journal_of(engine)
    assert not journal.numbers("quarantine"), "commit 1 is of the same machine, and nobody has certified it"
    assert audit_on(engine, "b", commit=1)["kind"] == "certified"
    audit_on(engine, "c", *ROLLBACK)
    assert [journal.is_quarantined(number) for number in (1, 2, 3)] == [False, True, True]
    assert engine.run(*OPTIONS).returncode == 3, "the machine a is in quarantine"
    done = engine.run(*OPTIONS, **{VARIABLE: "b"})
    assert done.returncode == 0, done.stderr
    assert final_id(engine) == final_id(healthy) != final_id(struck)


def describe_trusted(engine: Engine) -> list[str]:
    """Return what `show` says of certified commits, and of verdicts that nobody has answered."""
    lines = engine.command("show", str(engine.run_folder)).stdout.splitlines()
    return [" ".join(line.split()) for line in lines if line.split()[:1] in (["certified"], ["chain"], ["verdict"])]


SECOND_FLIP = 33  # in commit 4


def test_two_faults_of_one_machine_are_taken_back_though_later_commits_continue_them(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, nursery: Lives
) -> None:
    """The machine a trains the commits 1 to 4, and a bit flips in 2 and in 4. Then b trains 5 and 6 correctly."""
    straight = Engine(tmp_path_factory.mktemp("straight"), {VARIABLE: "b"}, nursery=nursery)
    straight.finish(*OPTIONS, "epochs=6")
    engine = Engine(tmp_path, {VARIABLE: "b"} | faulty("a", FLIPS_AT, SECOND_FLIP), nursery=nursery)
    assert engine.run(*OPTIONS, "epochs=4", **{VARIABLE: "a"}).returncode == 0
    assert engine.run(*OPTIONS, "epochs=6").returncode == 0
    for commit in (1, 3, 6):
        assert audit_on(engine, "c", commit=commit)["kind"] == "certified", "its chunk is right, whatever 2 and 4 are"
    certified, chain = describe_trusted(engine)
    assert certified.startswith("certified commit 6 (step 60)")
    assert chain == "chain not certified before commit 6: 2, 4-5"
    assert audit_on(engine, "c", *ROLLBACK, commit=4)["kind"] == "undecided"
    certified, chain, verdict = describe_trusted(engine)
    assert certified.startswith("certified commit 3 (step 30)"), "6 continues 4, which is in doubt"
    assert (chain, verdict[:19]) == ("chain not certified before commit 3: 2", "verdict 1 commit 4:")
    found = audit_on(engine, "d", *ROLLBACK, commit=4)
    assert (found["kind"], found["host"], found["step"]) == ("machine", "a", SECOND_FLIP)
    journal = journal_of(engine)
    assert [each.number for each in journal.candidates()] == [1], "commit 3 continues 2, which nobody has audited"
    assert describe_trusted(engine)[1:] == ["chain each commit up to 1 is certified"]
    done = engine.run(*OPTIONS, "epochs=6")
    assert done.returncode == 0, done.stderr
    assert final_id(engine) == final_id(straight)
    assert engine.command("verify", str(engine.run_folder)).returncode == 0


def test_a_live_attempt_ends_on_the_machine_that_is_quarantined(
    healthy: Engine, tmp_path: Path, nursery: Lives
) -> None:
    with held_from(2, tmp_path, nursery, "a", **faulty("a", FLIPS_AT)) as (engine, ended):
        audit_on(engine, "b", commit=1)
        audit_on(engine, "b", *ROLLBACK)
        assert audit_on(engine, "c", *ROLLBACK)["kind"] == "machine"
    assert ended[0] == 3, ended[1]
    assert "doesn't count: it continues from commit 2, which is quarantined" in ended[1]
    assert "error: this machine is quarantined" in ended[1]
    assert engine.run(*OPTIONS, **{VARIABLE: "b"}).returncode == 0
    assert final_id(engine) == final_id(healthy)


def test_a_live_attempt_on_a_healthy_machine_goes_back_and_goes_on(
    healthy: Engine, tmp_path: Path, nursery: Lives
) -> None:
    """The machine a flipped a bit once, in commit 2; b continues from there when the audits find it."""
    once = faulty("a", FLIPS_AT, once=tmp_path / "struck")
    Engine(tmp_path, {VARIABLE: "a"} | once, nursery=nursery).run(*OPTIONS, "epochs=2")
    with held_from(2, tmp_path, nursery, "b", **once) as (engine, ended):
        audit_on(engine, "b", commit=1)
        audit_on(engine, "b", *ROLLBACK)
        assert audit_on(engine, "c", *ROLLBACK)["host"] == "a"
    assert ended[0] == 0, ended[1]
    assert "doesn't count: it continues from commit 2, which is quarantined; the steps of that" in ended[1]
    assert journal_of(engine).attempts() == 2, "no other attempt was needed"
    assert final_id(engine) == final_id(healthy)


@pytest.mark.server
def test_audits_look_for_a_right_commit_to_go_back_to(
    struck: Engine,
    healthy: Engine,
    tmp_path: Path,
    run_flow: RunFlow,
    prefect_api: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One audit of a wrong commit leads to the healthy run's bytes, though nobody has audited a right commit."""
    engine = copy_run(struck, tmp_path)

    def run(host: str, **parameters: object) -> str:
        for name, value in (faulty("a", FLIPS_AT) | {VARIABLE: host}).items():
            monkeypatch.setenv(name, value)
        return run_flow("audit", **{"store": engine.store} | parameters).stderr

    with deployed_audit(prefect_api) as waiting:
        run("b", run="toy", commit=2, on_fault="rollback")
        said = run("c", **waiting()[-1].parameters)
        assert "run toy isn't rolled back: no checkpoint before commit 1" in said
        asked = waiting()[-1].parameters
        assert (asked["commit"], asked["on_fault"]) == (1, "rollback")
        run("a", **asked)
        put_back = waiting()[-1].parameters
        assert (put_back["commit"], put_back["tries"]) == (1, 29), "the faulty machine leaves it to another one"
        assert "no further host has trained the commit again: commit 1: only a has trained it" in run(
            "a", **asked | {"tries": 0}
        )
        assert "run toy is rolled back to commit 1 (step 10): quarantined 2, 3" in run("b", **asked)
        assert len(waiting()) == 3
    assert engine.run(*OPTIONS, **{VARIABLE: "b"}).returncode == 0
    assert final_id(engine) == final_id(healthy)


STOP = ("--on-fault", "stop")


HELD = "run 'toy' is held: commit 2: machine: a ended on different bytes than b and c"


def test_a_run_that_is_stopped_begins_no_attempt_until_it_is_rolled_back(
    struck: Engine, healthy: Engine, tmp_path: Path
) -> None:
    engine = copy_run(struck, tmp_path)
    run = str(engine.run_folder)
    assert engine.command("release", run).returncode == 1, "it isn't held"
    audit_on(engine, "b", *STOP)
    assert audit_on(engine, "c", *STOP)["kind"] == "machine"
    done = engine.run(*OPTIONS, "epochs=4", **{VARIABLE: "b"})
    assert done.returncode == 3, done.stderr
    assert (
        f"error: {HELD}\nhint: holdfast release {run} --rollback goes back to a commit with the right bytes"
        in done.stderr
    )
    journal = journal_of(engine)
    assert journal.attempts() == 2, "the hold is the second attempt, and no third one began"
    shown = engine.command("show", run)
    assert "commit 2: machine: a ended on different bytes than b and c" in shown.stdout
    done = engine.command("release", run, "--rollback")
    assert done.returncode == 3, "nobody has certified commit 1, which is of the same machine"
    assert "isn't rolled back: no checkpoint before commit 1" in done.stdout
    audit_on(engine, "b", commit=1)
    done = engine.command("release", run, "--rollback")
    assert done.returncode == 0, done.stderr
    assert "rolled back to commit 1 (step 10): quarantined 2, 3, and released" in done.stdout
    assert engine.run(*OPTIONS, **{VARIABLE: "b"}).returncode == 0
    assert final_id(engine) == final_id(healthy) != final_id(struck)
    out = str(tmp_path / "report.html")
    for command in (["verify", run], ["report", run, "--out", out], ["goodput", run], ["compare", run, run]):
        done = engine.command(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_a_live_attempt_of_a_stopped_run_ends_at_its_next_commit_and_goes_on_once_it_is_released(
    healthy: Engine, tmp_path: Path, nursery: Lives
) -> None:
    """The machine a flipped a bit once, in commit 2. The run is live on b, which computes right."""
    once = faulty("a", FLIPS_AT, once=tmp_path / "struck")
    Engine(tmp_path, {VARIABLE: "a"} | once, nursery=nursery).run(*OPTIONS, "epochs=2")
    with held_from(2, tmp_path, nursery, "b", **once) as (engine, ended):
        audit_on(engine, "b", *STOP)
        assert audit_on(engine, "c", *STOP)["host"] == "a"
        audit_on(engine, "c", *STOP)
    assert ended[0] == 3, ended[1]
    assert f"error: {HELD}" in ended[1]
    journal = journal_of(engine)
    newest = journal.newest()
    assert newest
    assert newest.number == 2
    assert not journal.numbers("quarantine"), "every commit stays"
    assert journal.attempts() == 3, "one hold, though the verdict came twice"
    assert [each.reason for each in journal.endings()] == ["completed", "held", "held"]
    assert engine.run(*OPTIONS, **{VARIABLE: "b"}).returncode == 3
    assert engine.command("release", str(engine.run_folder)).returncode == 0
    audit_on(engine, "b", commit=2)
    assert audit_on(engine, "d", *STOP)["kind"] == "machine"
    assert engine.run(*OPTIONS, **{VARIABLE: "b"}).returncode == 0, "nothing new was found since the release"
    assert final_id(engine) != final_id(healthy)


@contextmanager
def held_from(commit: int, folder: Path, nursery: Lives, host: str, **variables: str) -> Iterator[tuple[Engine, Any]]:
    """Train on a host, and let the ranks wait after a commit while the block lasts.

    Yields:
        The engine, and a list that has the exit code and the errors of the command after the block.
    """
    engine, held = Engine(folder, {VARIABLE: host} | variables, nursery=nursery), folder / "held"
    ended: list[Any] = []
    began = journal_of(engine).attempts()
    process = nursery.start_command(
        "tests.support.forked:train", str(engine.config), OPTIONS,
        environment=os.environ | engine.environment | {"TOY_HELD": str(held), "TOY_DELAY_S": "0.2"},
    )  # fmt: skip
    try:
        while journal_of(engine).newest_number() < commit or journal_of(engine).attempts() == began:
            assert process.poll() is None
            time.sleep(0.1)
        held.touch()
        yield engine, ended
    finally:
        held.unlink(missing_ok=True)
        _, errors = process.communicate(COMMAND_WITHIN_S)
        ended += [process.returncode, errors]
