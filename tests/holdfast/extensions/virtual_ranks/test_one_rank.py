"""A machine that computes wrongly in one of several ranks: an audit on another machine names the rank."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.app import app
from holdfast.errors import WrongUse
from holdfast.machine.host import VARIABLE
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
        "error: --ranks 1: 2 ranks trained the steps, without virtual ranks, so a different number of ranks may "
        "compute different bytes",
        "hint: leave --ranks out, and audit on a machine that can start as many ranks",
    ]


def test_an_audit_on_no_ranks_is_refused(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    train_line(line)
    with pytest.raises(WrongUse, match="--ranks 0: expected at least 1"):
        app(["audit", f"{line.journal.store_url}/{line.journal.run}", "--ranks", "0"], exit_on_error=False)
