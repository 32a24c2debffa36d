"""The search names a value wherever a loop hides it, and its remedy is a line that can be pasted into the loop."""

import ast
import hashlib
import re
from pathlib import Path

import pytest

from holdfast import RunConfig
from holdfast.checkpoint.found import Found, find_suspects
from holdfast.config import Determinism
from holdfast.training import Training, examine_recipe, run_program, steps
from tests.conftest import IS_SOAK
from tests.support.hiding import Hidden, list_hidden

HIDDEN = list_hidden()
# 23 has no common factor with the numbers of kinds, places and readers, so that the tried programs have all of them.
TRIED = HIDDEN if IS_SOAK else HIDDEN[::23]
NAMES = re.compile(r"\b(_?it|some|change)\b")


def find_changed(folder: Path, text: str) -> list[Found]:
    """Return the values outside of checkpoints that differ after the first and the third step of a program."""
    # a name of its own, because a process imports only one module of a name
    file = folder / f"hidden_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    file.write_text(text)
    config = RunConfig(
        recipe=f"{file}:train", run="run", store=str(folder), epochs=1, determinism=Determinism(mode="fast")
    )
    found: list[list[Found]] = []

    def serve(training: Training):  # type: ignore[no-untyped-def]
        for step in (1, 3):
            yield from steps(training, step, lambda: False)
            found.append(examine_recipe(training.recipe).found)

    run_program(config, serve)
    return find_suspects(found[1], found[0])


@pytest.mark.parametrize("hidden", TRIED, ids=str)
def test_a_hidden_value_is_named_and_its_remedy_can_be_pasted(tmp_path: Path, hidden: Hidden) -> None:
    found = next(each for each in find_changed(tmp_path, hidden.write()) if NAMES.search(each.name))
    assert re.match(r".+\.py:\d+: $", found.place)
    ast.parse(found.remedy)
    again = find_changed(tmp_path, hidden.write(found.remedy))
    needs_use = "in place of" in found.remedy  # the program has to use the new dict, too
    assert needs_use or found.key not in [each.key for each in again]
