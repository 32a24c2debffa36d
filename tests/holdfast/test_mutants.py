"""A resume that is almost right is refused by the gate, or `holdfast prove` names what is wrong with it."""

import re
from pathlib import Path

import pytest

from holdfast.config import RunConfig
from holdfast.prove import Proof
from tests.lives import Lives
from tests.mutants import MUTATIONS

# Twice killed, in steps 9 and 11, after chunks that end with steps 5 and 6.
STEPS, KILLS, SEED = 12, 2, 9

CONFIG = RunConfig(recipe="tests.varied:averaged", run="mutant", settings={"schedule": "cosine"})


def prove(nursery: Lives, mutation: str) -> str:
    """What `holdfast prove` prints of the mutated ranks, as JSON; or the error that it ends with."""
    done = nursery.call("tests.forked:prove_mutated", mutation, CONFIG.model_dump(mode="json"), STEPS, KILLS, SEED)
    assert done.stdout, done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_a_mutation_it_is_proved(nursery: Lives) -> None:
    proof = Proof.model_validate_json(prove(nursery, ""))
    assert proof.is_proved, str(proof)
    assert (proof.kills, proof.chunks) == ([9, 11], [5, 6, 12])


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation(nursery: Lives, name: str) -> None:
    expected = MUTATIONS[name]
    found = prove(nursery, name)
    if expected.caught_by == "start":
        assert found.startswith("DeterminismError ")
        assert expected.named in found
        return
    proof = Proof.model_validate_json(found)
    assert not proof.is_proved
    assert bool(proof.gate) == (expected.caught_by == "gate"), str(proof)
    if proof.gate:
        assert all(found.startswith(expected.named) for found in proof.different), proof.different
    else:
        assert proof.first_differs_in[0] == expected.named
        assert proof.first_step == 7
    assert expected.named in str(proof)


def test_the_documentation_has_them_all() -> None:
    """RESUME.md has a line for each, which says who catches it."""
    text = (Path(__file__).parents[2] / "holdfast" / "RESUME.md").read_text()
    table = {row[1]: row[2] for row in re.finditer(r"^\| ([\w' ]+?) +\| (gate|prove|start)\b", text, re.MULTILINE)}
    assert table == {name: mutation.caught_by for name, mutation in MUTATIONS.items()}
