"""Tests of prove: a recipe that survives kills is proved; for another, the first differing step is named."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.config import load_config
from holdfast.proof.prove import prove as prove_recipe
from holdfast.proof.result import Proof
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Event
from tests.conftest import Engine, Reference
from tests.support.lives import is_rank
from tests.support.processes import log_of

pytestmark = pytest.mark.slow

# State that no checkpoint holds changes the loss, and the probe doesn't see it.
RECIPE = """
import os
import torch
from torch.nn import functional as F
from holdfast import Recipe
from tests.support.toy import Made

calls = 0

def build(noise, **probe):
    model = torch.nn.Linear(8, 1)
    def loss(model, batch):
        x, y = batch
        return F.mse_loss(model(x), y) * (1 + noise() / 1000)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return Recipe(model=model, data=Made(), optimizer=optimizer, loss=loss, batch_size=8, **probe)

def count():
    global calls
    calls += 1
    return calls

def counting() -> Recipe:
    return build(count, probe=lambda model: {"output": model(torch.ones(2, 8))})

def restless() -> Recipe:
    return build(lambda: os.urandom(1)[0])
"""


@pytest.fixture
def own(engine: Engine) -> Engine:
    """Return an engine whose processes find the recipe on PYTHONPATH."""
    (engine.folder / "unproved.py").write_text(RECIPE)
    engine.environment = engine.environment | {"PYTHONPATH": str(engine.folder)}
    return engine


def prove(engine: Engine, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run the command, and assert that it leaves neither a file nor a process."""
    temporary = engine.folder / "temporary"
    temporary.mkdir()
    done = engine.command("prove", str(engine.config), *options, TMPDIR=str(temporary))
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")]  # torch's own cache
    assert not Path(engine.store).exists()
    assert not (engine.folder / "logs").exists()
    assert not [rank for rank in psutil.process_iter() if is_rank(rank) and str(temporary) in log_of(rank.pid)]
    assert all(line.startswith(("straight: ", "resumed: ")) for line in done.stderr.splitlines()), done.stderr
    return done


def read_proof(done: "subprocess.CompletedProcess[str]") -> tuple[Proof, Any]:
    found = json.loads(done.stdout)
    return Proof.model_validate(found), found


def test_a_recipe_that_survives_kills_is_proved(engine: Engine, reference: Reference) -> None:
    """The proof ends on the bytes of the undisturbed run, which was trained in other chunks."""
    done = prove(engine, "--steps", "30", "--kills", "1", "--seed", "7", "--json")
    assert done.returncode == 0, done.stdout
    proof, found = read_proof(done)
    assert found["is_proved"] is True
    assert proof.straight == proof.resumed == reference.standing.checkpoint_sha256
    assert proof.config_fingerprint == reference.standing.config_fingerprint
    assert (proof.steps, proof.seed, len(proof.kills), proof.chunks[-1]) == (30, 7, 1, 30)
    assert proof.chunks[0] < proof.kills[0], "there has to be something to resume from"
    lines = done.stderr.splitlines()
    assert lines[0] == "straight: trained to step 30 of 30"
    assert f"resumed: SIGKILL in step {proof.kills[0]}" in lines
    assert f"resumed: continues from step {proof.resumed_from[0]}" in lines
    assert lines[-1] == "resumed: trained to step 30 of 30"
    assert str(proof).startswith(
        "proved: 30 steps of tests.support.toy:toy end on the same bytes, straight and with SIGKILL"
    )


def test_a_recipe_with_unregistered_state_is_not_proved(own: Engine) -> None:
    """The first step after the resume differs, and no step before it."""
    without = ("--set", "resume.training_probe=false")
    done = prove(own, "--set", "recipe=unproved:counting", *without, "--steps=8", "--kills=1", "--seed=2", "--json")
    assert done.returncode == 2, done.stdout
    proof, found = read_proof(done)
    assert found["is_proved"] is False
    assert proof.first_step is not None
    assert proof.first_step - 1 in proof.chunks
    assert proof.first_differs_in == ["loss", "grad_norm", "model"]
    assert {"model.weight", "model.bias"} < set(proof.different)
    text = str(proof)
    assert text.startswith("not proved: 8 steps of unproved:counting end on different bytes with SIGKILL in step ")
    assert f"first in step {proof.first_step}: loss, grad_norm" in text
    assert "differs from itself" not in text


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_are_killed_inside_their_chunk_even_by_a_slow_watcher(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the ranks were faster than their watcher, they would save the chunk, and no resume would be tested."""
    next_event = Ranks.next_event

    def late(ranks: Ranks, within_s: float | None = None) -> Event:
        time.sleep(0.2)
        return next_event(ranks, within_s)

    monkeypatch.setattr(Ranks, "next_event", late)
    proof = prove_recipe(load_config(engine.config), 5, 2, seed=7)
    assert proof.is_proved
    assert (proof.kills, proof.chunks, proof.resumed_from) == ([2, 4], [1, 3, 5], [1, 3])


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("is_whole", [False, True])
def test_with_time_enough_a_proof_has_all_steps_of_the_run(
    engine: Engine, reference: Reference, is_whole: bool
) -> None:
    proof = prove_recipe(
        load_config(engine.config), None, 1, seed=7, within_s=1 if is_whole else 3600, is_whole=is_whole
    )
    assert proof.is_proved
    assert (proof.epochs == proof.own_epochs) == is_whole
    assert ("--whole" in str(proof).splitlines()[-1]) == is_whole
    assert (proof.steps, proof.chunks[-1]) == (30, 30)
    assert proof.straight == reference.standing.checkpoint_sha256
    assert proof.steps_per_epoch == proof.own_steps_per_epoch


def test_a_recipe_that_does_not_repeat_itself_is_reported(own: Engine) -> None:
    done = prove(own, "--set", "recipe=unproved:restless", "--steps", "8", "--kills", "1", "--seed", "5")
    assert done.returncode == 2, done.stdout
    assert done.stdout.startswith("not proved: 8 steps of unproved:restless")
    assert "first in step 1: loss, grad_norm" in done.stdout
    assert "the recipe gives different bytes each time" in done.stdout
    assert "again with  --seed 5 --steps 8 --kills 1" in done.stdout


def test_an_audit_names_the_first_step_too(own: Engine) -> None:
    done = own.run("recipe=unproved:counting", "epochs=1", "retention.keep_last=99", "resume.training_probe=false")
    assert done.returncode == 0, done.stderr
    done = own.command("audit", str(own.run_folder), "--commit", "2")
    assert done.returncode == 2
    first, *rows = done.stdout.splitlines()
    assert first.startswith("commit 2 (epoch-0001, steps 4-8): the replay ends on different bytes: ")
    assert rows[0] == "  first in step 5: loss, grad_norm"  # the run was trained without checksums
    assert rows[1].startswith("  then, at the end: model.bias, model.weight, progress.")
