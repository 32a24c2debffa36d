"""A resume that is almost right is refused by the gate, or `holdfast prove` names what is wrong with it."""

import re
from pathlib import Path

import pytest

from holdfast.config import RunConfig
from holdfast.errors import DeterminismError
from holdfast.prove import prove
from tests.mutants import MUTATIONS, VARIABLE, install

# Twice killed, in steps 9 and 11, after chunks that end with steps 5 and 6.
STEPS, KILLS, SEED = 12, 2, 9

CONFIG = RunConfig(recipe="tests.varied:averaged", run="mutant", settings={"schedule": "cosine"})


@pytest.mark.slow
def test_without_a_mutation_it_is_proved() -> None:
    proof = prove(CONFIG, STEPS, KILLS, SEED)
    assert proof.is_proved, str(proof)
    assert (proof.kills, proof.chunks) == ([9, 11], [5, 6, 12])


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(VARIABLE, name)
    expected = MUTATIONS[name]
    if expected.caught_by == "start":
        with pytest.raises(DeterminismError, match=expected.named):
            prove(CONFIG, STEPS, KILLS, SEED)
        return
    proof = prove(CONFIG, STEPS, KILLS, SEED)
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
