"""The gate, `holdfast prove` or an audit catches each resume that is almost right, and names what is wrong."""

import csv
import json
from pathlib import Path

import pytest

from holdfast.config import ChunkLength, Compute, Log, Resume, RunConfig
from holdfast.proof.audit import Audit
from holdfast.proof.result import Proof
from tests.conftest import IS_SOAK
from tests.support.lives import Lives
from tests.support.mutants import MUTATIONS, Mutation

# Killed in two epochs of six steps: after a chunk that ends inside the first, and inside the second.
STEPS, KILLS, SEED = 12, 2, 9

AUDITED = [mutation for mutation in MUTATIONS if mutation.caught_by == "audit"]
PROVED = [mutation for mutation in MUTATIONS if mutation.caught_by != "audit"]


def make_config(mutation: Mutation, folder: Path) -> RunConfig:
    return RunConfig(
        recipe=mutation.recipe, run="mutant", settings=dict(mutation.settings), store=str(folder), epochs=9,
        chunk=ChunkLength(steps=3), log=Log(folder=str(folder / "logs")),
        compute=Compute(ranks=mutation.ranks, virtual_ranks=mutation.virtual_ranks),
        resume=Resume(training_probe=mutation.caught_by != "audit"),
    )  # fmt: skip


def prove(nursery: Lives, mutation: Mutation, folder: Path) -> str:
    """Run `holdfast prove` on mutated ranks. Return the proof that it prints as JSON, or its error."""
    config = make_config(mutation, folder).model_dump(mode="json")
    done = nursery.call("tests.support.forked:prove_mutated", mutation.name, config, STEPS, KILLS, SEED)
    assert done.stdout, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_recipe_without_a_mutation_is_proved(nursery: Lives, tmp_path: Path) -> None:
    proof = Proof.model_validate_json(prove(nursery, Mutation("", "prove", ""), tmp_path))
    assert proof.is_proved, str(proof)
    assert (proof.kills, proof.chunks) == ([10, 12], [1, 11, 12])


@pytest.mark.slow
@pytest.mark.parametrize("mutation", PROVED if IS_SOAK else PROVED[::3], ids=lambda row: row.name)
def test_a_mutation_is_caught(nursery: Lives, tmp_path: Path, mutation: Mutation) -> None:
    found = prove(nursery, mutation, tmp_path)
    if mutation.caught_by == "start":
        assert found.startswith(("DeterminismError ", "RecipeError "))
        assert mutation.named in found
        return
    proof = Proof.model_validate_json(found)
    assert mutation.named in str(proof)
    caught_by = "gate" if proof.gate else "search" if proof.is_proved else "prove"
    assert caught_by == mutation.caught_by, str(proof)
    if proof.gate:
        assert proof.lost or all(found.startswith(mutation.named) for found in proof.different), proof.different
    elif caught_by == "prove":
        assert proof.lost or proof.first_differs_in[0] == mutation.named
        assert proof.first_step is not None
        assert proof.first_step > proof.resumed_from[0]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", AUDITED, ids=lambda row: row.name)
def test_a_mutation_is_caught_by_an_audit(nursery: Lives, tmp_path: Path, mutation: Mutation) -> None:
    """The audited chunk is the first after a resume, and the audit's ranks have the same fault."""
    config = make_config(mutation, tmp_path).model_dump(mode="json")
    done = nursery.call("tests.support.forked:audit_mutated", mutation.name, config)
    assert done.stdout, done.stderr
    audit = Audit.model_validate(json.loads(done.stdout))
    assert audit.is_failed
    assert audit.first_differs_in[0] == mutation.named
    assert audit.resumes
    assert audit.start < audit.resumes[0]
    assert audit.first_step == audit.start + 1


def test_the_file_of_faults_has_a_row_for_each_mutation() -> None:
    """The row says what catches the mutation, and the name in the message."""
    with (Path(__file__).parents[3] / "docs" / "data" / "faults.csv").open(encoding="utf-8") as file:
        rows = [tuple(row) for row in csv.reader(file)][1:]
    assert rows[: len(MUTATIONS)] == [(each.name, each.caught_by, each.named) for each in MUTATIONS]
