"""One predicate says which code is the user's, wherever the recipe's package is installed."""

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.provenance import ownership
from holdfast.provenance.ownership import claim, is_own, is_own_file


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


class Bare:
    pass


def test_a_class_without_a_function_of_its_own_is_judged_by_its_module() -> None:
    assert is_own(Settings)
    assert is_own(Settings.__init__), "its code was made from a text"
    assert is_own(Bare)
    assert not is_own(dataclasses.Field)
    assert not is_own(dict)


@pytest.mark.parametrize(
    ("file", "other"),
    [
        ("site-packages/shipped/recipe.py", "site-packages/beside/recipe.py"),
        ("site-packages/shipped/deep/recipe.py", "site-packages/shipped_too/recipe.py"),
        ("dist-packages/recipe.py", "dist-packages/recipe_too.py"),
    ],
)
def test_the_recipes_package_alone_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, other: str
) -> None:
    monkeypatch.setattr(ownership, "_claimed", set())
    own, beside = str(tmp_path / file), str(tmp_path / other)
    assert not is_own_file(own)
    claim(own)
    assert is_own_file(own)
    assert not is_own_file(beside)


@pytest.mark.parametrize("module", ["torch", "json", "holdfast.config"])
def test_what_is_no_recipes_package_is_not_claimed_by_a_recipe_elsewhere(module: str) -> None:
    claim(__file__)
    assert not is_own_file(str(importlib.import_module(module).__file__))


def test_python_and_holdfast_cannot_be_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_claimed", set())
    for module in ("json", "holdfast.config"):
        claim(str(importlib.import_module(module).__file__))
    assert ownership._claimed == set()


INSTALLED = """
import torch
from holdfast import Recipe
from tests.support.careless import fit, net
from tests.support.varied import Points

target = net()
target.requires_grad_(False)

def loss(model, batch):
    with torch.no_grad():
        for mine, other in zip(target.parameters(), model.parameters()):
            mine.lerp_(other, 0.1)
    return fit(model, batch) + target(batch[0]).square().mean()

def recipe() -> Recipe:
    model = net()
    return Recipe(model=model, data=Points(False), optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=loss)
"""


def test_the_search_sees_a_recipe_that_is_installed(tmp_path: Path) -> None:
    """`pip install .` in an image puts it into site-packages."""
    package = tmp_path / "site-packages" / "shipped"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "recipe.py").write_text(INSTALLED)
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "from holdfast.recipe.function import build_recipe\n"
        "from holdfast.training import examine_recipe\n"
        "searched = examine_recipe(build_recipe('shipped.recipe:recipe', {})[0])\n"
        "print([each.name for each in searched.found if not each.is_plain], searched.looked_at > 0)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['target'] True", done.stderr
