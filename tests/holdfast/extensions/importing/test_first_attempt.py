"""A run that begins with another program's checkpoint: its records, what every command says of it, and its faults."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast import checkpoint
from holdfast.attempt import live
from holdfast.cli import app, run_app
from holdfast.config import Compute, Log, RunConfig
from holdfast.errors import RankDied, WrongUse
from holdfast.extensions.importing.first_attempt import import_run
from holdfast.journal import Journal
from holdfast.journal.finding import open_journal
from holdfast.keeping.verification import verify_run
from holdfast.ledger.standing import read_standing
from holdfast.proof.audit import audit_commit, choose_commits
from holdfast.rank.launching import Ranks
from holdfast.recipe.trust import Trust
from holdfast.store import open_store
from tests.support.movers import PER_EPOCH, TOTAL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

STOP = 2 * PER_EPOCH
WRITE = "import sys, json; from pathlib import Path; import torch; from tests.support import movers; " \
    "torch.set_num_threads(1); print(json.dumps(movers.with_torch(Path(sys.argv[1]), int(sys.argv[2]))))"  # fmt: skip

Make = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Return a checkpoint that a script has saved, and the losses of all its steps."""
    path = tmp_path_factory.mktemp("alone") / "at.pt"
    command = [sys.executable, "-W", "ignore", "-c", WRITE, str(path), str(STOP)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": "."})
    losses: list[float] = json.loads(done.stdout)
    return path, losses


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(function: str = "loop", **fields: object) -> RunConfig:
        known = {"chunk": {"steps": PER_EPOCH}, "compute": Compute(device="cpu"), "epochs": 4} | fields
        return RunConfig(
            recipe=f"tests.support.movers:{function}", run="moved", store=str(tmp_path / "runs"),
            log=Log(folder=str(tmp_path / "logs")), **known,
        )  # type: ignore[arg-type]  # fmt: skip

    return make


def read_losses(journal: Journal) -> list[float]:
    commits = sorted(journal.candidates(), key=lambda each: each.number)
    return [line["loss"] for each in commits for line in checkpoint.read_commit_lines(journal.store, each)]


def test_it_goes_on_bit_for_bit_and_every_record_says_from_where(
    alone: tuple[Path, list[float]], make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    path, losses = alone
    config = make()
    made = import_run(config, str(path), None, {})
    journal = open_journal(f"{config.store}/{config.run}")
    assert (made.commit.number, made.commit.step, made.commit.why, made.total_steps) == (1, STOP, "imported", TOTAL)
    assert made.commit.origin is not None
    assert made.commit.origin.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not verify_run(journal, deep=True).problems
    ending = journal.read_ending(1)
    assert ending is not None
    assert (ending.reason, ending.step) == ("imported", STOP)
    assert live(config).complete
    assert read_losses(journal) == losses[STOP:]
    assert not verify_run(journal, deep=True).problems
    assert str(path) in read_standing(journal).origin
    for command in (["show"], ["report", "--out", f"{config.store}/page.html"], ["goodput"], ["history"]):
        with contextlib.suppress(SystemExit):
            run_app(app, [command[0], f"{config.store}/{config.run}", *command[1:]])
    assert "imported from" in capsys.readouterr().out


def test_an_audit_begins_with_the_import_and_replays_none_of_it(alone: tuple[Path, list[float]], make: Make) -> None:
    config = make()
    import_run(config, str(alone[0]), None, {})
    live(config)
    journal = open_journal(f"{config.store}/{config.run}")
    commits = {each.number: each for each in journal.candidates()}
    assert [each.number for each in choose_commits(journal, 9)] == [2, 3]
    trust = Trust(recipe=config.recipe)
    found = audit_commit(journal, commits[2], trust=trust)
    assert found.is_identical
    assert found.unchecked.endswith("the run began with another program's checkpoint")
    for number, start in ((1, None), (3, 0)):
        with pytest.raises(WrongUse, match="was not trained here: it was imported from"):
            audit_commit(journal, commits[number], start, trust=trust)


def test_two_ranks_take_over_the_same(alone: tuple[Path, list[float]], make: Make) -> None:
    config = make("recipe", compute=Compute(device="cpu", ranks=2))
    made = import_run(config, str(alone[0]), None, {"best": "", "epoch": ""})
    assert made.commit.step == STOP
    assert live(config).complete


@pytest.mark.parametrize("at", [(Journal, "record_config"), (Ranks, "keep")])
def test_an_import_that_died_is_finished_by_another_and_by_nothing_else(
    alone: tuple[Path, list[float]], make: Make, monkeypatch: pytest.MonkeyPatch, at: tuple[type, str]
) -> None:
    config = make()

    def die(dying: object, *arguments: object) -> None:
        if isinstance(dying, Ranks):
            dying.end(within_s=0.0)
        raise RankDied("gone")

    with monkeypatch.context() as patch:
        patch.setattr(*at, die)
        with pytest.raises(RankDied):
            import_run(config, str(alone[0]), None, {})
    with pytest.raises(WrongUse, match="the import of a checkpoint into run 'moved' was interrupted"):
        live(config)
    assert import_run(config, str(alone[0]), None, {}).commit.attempt == 2
    with pytest.raises(WrongUse, match="run 'moved' exists"):
        import_run(config, str(alone[0]), None, {})
    assert live(config).complete


def test_nothing_is_written_for_a_source_that_is_refused(
    alone: tuple[Path, list[float]], make: Make, tmp_path: Path
) -> None:
    saved = torch.load(alone[0], weights_only=False)
    torch.save(saved | {"step": 99}, tmp_path / "far.pt")
    for source in ("far.pt", "none.pt"):
        with pytest.raises(WrongUse):
            import_run(make(), str(tmp_path / source), None, {})
        assert not (tmp_path / "runs").exists()


def test_a_run_whose_import_was_killed_before_its_claim_waits_for_the_import(
    alone: tuple[Path, list[float]], make: Make
) -> None:
    """It has its run.json alone, and training would begin it at step 0."""
    path, _ = alone
    config = make()
    journal = Journal(open_store(config.store), config.run)
    journal.begin(config.recipe, is_imported=True)
    with pytest.raises(WrongUse, match="the import of a checkpoint into run 'moved' was interrupted"):
        live(config)
    assert import_run(config, str(path), None, {}).commit.step == STOP
    assert live(config).complete
