"""A machine that computes wrongly in one of several ranks: an audit on another machine names the rank."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.app import app
from holdfast.errors import WrongUse
from holdfast.machine.host import VARIABLE
from holdfast.proof.part import audit_part
from holdfast.store.local import LocalStore
from tests.support.flipping import faulty
from tests.support.lives import Lives
from tests.support.makers import make_line
from tests.support.makers import train as train_line
from tests.support.shares import write_config

FLIPS_AT = 3  # the first step of the second of the chunks, which have two steps
RECIPE = "flipping:flipping_in_shares"


def train(nursery: Lives, folder: Path, ranks: int, shares: int = 8, **options: Any) -> str:
    """Train a run whose second rank computes wrongly from a step on, on machine a. Return its address."""
    path = write_config(folder, ranks, 1, recipe=RECIPE, shares=shares, **options)
    variables = {VARIABLE: "a", **faulty("a", FLIPS_AT, rank=1)}
    done = nursery.call("tests.support.forked:train", path, [], **variables)
    assert done.returncode == 0, done.stderr
    return str(folder / "r")


def audit(nursery: Lives, *command: str) -> Any:
    """Let machine b audit a run; return the ended command."""
    return nursery.call("tests.support.forked:command", "audit", *command, **{VARIABLE: "b"})


def check_parts(nursery: Lives, run: str, ranks: int, shares: str = "") -> None:
    """Check that one process alone finds rank 1's part of a step wrong, and others' parts right."""
    where = f"commit 2 (epoch-0001-step-00000004), step {FLIPS_AT}, rank 1 of {ranks}{shares}"
    done = audit(nursery, run, "--commit", "2", "--rank", "1")
    assert done.returncode == 2, done.stdout + done.stderr
    wrong = f"{where}: trained alone, it differs from the record in gradient of rank 1{shares}"
    assert done.stdout.splitlines()[0].startswith(wrong)
    for commit, rank in (("2", "0"), ("1", "1")):
        done = audit(nursery, run, "--commit", commit, "--rank", rank)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith(": trained alone, it has the recorded gradient\n")
    done = audit(nursery, run, "--commit", "2", "--rank", "7")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --rank 7: ranks 0 to {ranks - 1} have trained step {FLIPS_AT} of run 'r'\n")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shares"), [(2, "4, 5, 6, 7"), (4, "2, 3")])
def test_one_rank_names_the_rank_that_trained_wrongly(nursery: Lives, tmp_path: Path, ranks: int, shares: str) -> None:
    run = train(nursery, tmp_path, ranks)
    done = audit(nursery, run, "--commit", "1", "--ranks", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replayed on 1 rank to the same bytes" in done.stdout
    done = audit(nursery, run, "--commit", "2", "--ranks", "1", "--json")
    assert done.returncode == 2, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)
    assert found["first_step"] == FLIPS_AT
    assert found["first_differs_in"][0] == f"gradient of rank 1 (shares {shares})"
    assert found["judged"]["rank"] == 1
    check_parts(nursery, run, ranks, f" (shares {shares})")


@pytest.mark.slow
def test_equal_ranks_name_the_rank_without_virtual_ones(nursery: Lives, tmp_path: Path) -> None:
    run = train(nursery, tmp_path, 2, shares=0)
    done = audit(nursery, run, "--commit", "2", "--json")
    assert done.returncode == 2, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)
    assert found["first_differs_in"], done.stdout
    assert (found["first_step"], found["first_differs_in"][0]) == (FLIPS_AT, "gradient of rank 1")
    done = audit(nursery, run, "--commit", "1", "--ranks", "1")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: --ranks 1: 2 ranks trained the steps, without virtual ranks: equal bytes are not promised on "
        "another number",
        "hint: leave --ranks out, or judge one rank's part alone with --rank",
    ]
    check_parts(nursery, run, 2)


@pytest.mark.slow
def test_one_rank_of_a_loop_takes_its_own_samples_or_is_refused(nursery: Lives, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        f'recipe = "tests.support.ranked:train"\nrun = "r"\nstore = "{tmp_path}"\nchunk.steps = 2\nlog.folder = '
        f'"{tmp_path}"\ncompute.device = "cpu"\ncompute.ranks = 2\nsettings.shuffles = true\n'
    )
    divided = tmp_path / "divided.toml"
    divided.write_text(path.read_text().replace("true", "false").replace('run = "r"', 'run = "d"'))
    for each in (path, divided):
        done = nursery.call("tests.support.forked:train", str(each), [])
        assert done.returncode == 0, done.stderr
    for run, commit, code in (("r", "1", 1), ("r", "2", 0), ("d", "1", 0), ("d", "2", 0)):
        done = audit(nursery, str(tmp_path / run), "--commit", commit, "--rank", "1")
        assert done.returncode == code, done.stdout + done.stderr
        assert code == 0 or "alone, this process takes other samples in step 1 than rank 1 has taken" in done.stderr


def test_a_trail_without_single_ranks_is_refused(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    train_line(line)
    with pytest.raises(WrongUse, match="--rank 0: the trail of commit 1 has no gradient of a single rank"):
        audit_part(line.journal, line.journal.read_commit(1), 0)


@pytest.mark.parametrize("other", [("--from", "0"), ("--random", "2"), ("--ranks", "1"), ("--on-fault", "rollback")])
def test_one_rank_and_other_choices_exclude_each_other(tmp_path: Path, other: tuple[str, str]) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    train_line(line)
    with pytest.raises(WrongUse, match=f"--rank and {other[0]} exclude each other"):
        app(["audit", f"{line.journal.store_url}/{line.journal.run}", "--rank", "1", *other], exit_on_error=False)


def test_an_audit_on_no_ranks_is_refused(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    train_line(line)
    with pytest.raises(WrongUse, match="--ranks 0: expected at least 1"):
        app(["audit", f"{line.journal.store_url}/{line.journal.run}", "--ranks", "0"], exit_on_error=False)
