"""The cards recipe as real runs: killed, with two ranks, and with a policy that collapses."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from holdfast.checkpoint import read_metadata
from holdfast.config import ChunkLength, Compute, Log, RunConfig
from holdfast.errors import HoldfastError, Unhealthy, from_json
from holdfast.journal import Journal
from holdfast.proof.result import Proof
from holdfast.store import open_store
from tests.examples.cards.test_cards import SMALL
from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.extras]


@pytest.fixture
def ready(nursery: Lives) -> Lives:
    """Return the nursery, which has imported the games."""
    nursery.load("examples.cards")
    return nursery


def make_config(folder: Path, recipe: str = "examples.cards:cards", **fields: Any) -> RunConfig:
    known: dict[str, Any] = {
        "store": str(folder), "run": "run", "epochs": 3, "settings": SMALL, "chunk": ChunkLength(steps=4),
        "log": Log(folder=str(folder / "logs")),
    }  # fmt: skip
    return RunConfig(recipe=recipe, **(known | fields))


def prove(nursery: Lives, config: RunConfig, steps: int, kills: int) -> Proof:
    settings = config.model_dump(mode="json")
    done = nursery.call("tests.support.forked:prove_mutated", "", settings, steps, kills, 5)
    return Proof.model_validate_json(done.stdout)


def test_killed_five_times_it_ends_on_the_same_bytes(ready: Lives, tmp_path: Path) -> None:
    proof = prove(ready, make_config(tmp_path), 24, 5)
    assert proof.is_proved, str(proof)
    assert len(proof.kills) == 5
    assert not proof.unchanged


def test_two_ranks_play_games_of_their_own_and_are_proved(ready: Lives, tmp_path: Path) -> None:
    proof = prove(ready, make_config(tmp_path, compute=Compute(ranks=2, device="cpu")), 8, 1)
    assert proof.is_proved, str(proof)


def train(nursery: Lives, config: RunConfig, **environment: str) -> None:
    done = nursery.call("tests.support.forked:train_chunks", config.model_dump(mode="json"), 100, **environment)
    if done.returncode:
        raise from_json(json.loads(done.stdout))


def test_a_collapsed_policy_is_rolled_back_and_stops_the_run_when_it_comes_again(ready: Lives, tmp_path: Path) -> None:
    alone = SMALL | {"train": SMALL["train"] | {"passes": 1, "minibatches": 1}}
    make = functools.partial(make_config, tmp_path, "tests.support.collapsing:collapsing", settings=alone)
    journal = Journal(open_store(str(tmp_path)), "run")
    train(ready, make(epochs=1, chunk=ChunkLength(steps=2)), COLLAPSE_AT="4", WITHOUT_LIMITS="1")
    newest = journal.newest()
    assert newest is not None
    metadata = read_metadata(journal.store, newest.path)
    assert metadata is not None
    values = metadata.probe.values
    assert (values["entropy"] or 0.0) < 1e-4
    assert (values["noop_rate"] or 0.0) > 0.99
    with pytest.raises(HoldfastError) as stopped:
        train(ready, make(chunk=ChunkLength(steps=2)), COLLAPSE_AT="4")
    assert isinstance(stopped.value, Unhealthy)
    assert "after step 4 entropy is" in str(stopped.value)
    (reason,) = journal.quarantine_reasons()
    assert "the gate: entropy is" in reason
    healthy = journal.newest()
    assert healthy is not None
    assert healthy.step == 2
