"""The user's modules are distinguished from Python's, from installed ones, and from those loaded before the recipe."""

import base64
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.provenance.imports import find_code, find_file, find_spec, is_users, list_imports
from holdfast.provenance.packages import (
    _read_hashes,
    describe_holdfast,
    find_contents,
    find_owner,
    find_packages,
    find_versions,
)

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes a file into a folder on the path. Modules from there are unloaded afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = {*sys.modules}

    def write_file(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()

    yield write_file
    for name in {*sys.modules} - known:
        del sys.modules[name]


def load(name: str, before: set[str] | None = None) -> list[str]:
    """Import a recipe's module, and return the modules that are then recorded."""
    before = {*sys.modules} if before is None else before
    importlib.import_module(name)
    return find_code([name], before)


def test_imported_modules_are_found_recursively(write: Write) -> None:
    write("own/__init__.py", "")
    write("own/recipe.py", "import json\nfrom . import layers\nfrom own.deep import rates\n")
    write("own/layers.py", "import torch\n")
    write("own/deep/rates.py", "x = 1\n")  # in a namespace package
    write("own/unused.py", "x = 1\n")
    assert load("own.recipe") == ["own", "own.deep.rates", "own.layers", "own.recipe"]


def test_a_module_loaded_before_counts_only_if_the_recipe_imports_it(write: Write) -> None:
    write("recipe_a.py", "def build():\n    import helper_a\n")
    write("helper_a.py", "")
    write("injected_a.py", "")
    for name in ("helper_a", "injected_a"):
        importlib.import_module(name)
    assert load("recipe_a") == ["helper_a", "recipe_a"]


def test_a_lazy_import_counts_once_it_is_loaded(write: Write) -> None:
    write("recipe_b.py", "def after_step():\n    import lazy_b\n")
    write("lazy_b.py", "")
    before = {*sys.modules}
    assert load("recipe_b", before) == ["recipe_b"]
    sys.modules["recipe_b"].after_step()
    assert find_code(["recipe_b"], before) == ["lazy_b", "recipe_b"]


def test_a_module_loaded_without_an_import_statement_counts(write: Write) -> None:
    write("recipe_c.py", "import importlib\nimportlib.import_module('plug' + 'in_c')\n")
    write("plugin_c.py", "")
    assert load("recipe_c") == ["plugin_c", "recipe_c"]


def test_modules_that_torch_compile_generates_do_not_count(write: Write, tmp_path: Path) -> None:
    """torch.compile loads its generated modules under names that no import finds."""
    write("recipe_d.py", "")
    write("made/kernel.py", "")
    before = {*sys.modules}
    spec = importlib.util.spec_from_file_location("cabc.kernel", tmp_path / "made" / "kernel.py")
    assert spec
    sys.modules["cabc.kernel"] = importlib.util.module_from_spec(spec)
    assert load("recipe_d", before) == ["recipe_d"]


@pytest.mark.parametrize("name", ["json", "torch.nn", "pytest", "holdfast.config", "sys", "no.such.module"])
def test_installed_modules_are_not_the_users(name: str) -> None:
    assert not is_users(name)


def test_the_recipes_own_package_counts_even_if_installed(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("site-packages/shipped/__init__.py", "")
    write("site-packages/shipped/recipe.py", "import shipped.layers\n")
    write("site-packages/shipped/layers.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    assert not is_users("shipped.layers")
    assert load("shipped.recipe") == ["shipped", "shipped.layers", "shipped.recipe"]
    assert is_users("shipped.layers")
    assert not is_users("shipped_beside")


def test_a_recipe_of_holdfasts_own_counts_with_what_it_imports_from_its_package() -> None:
    importlib.import_module("holdfast.recipes.language")
    importlib.import_module("holdfast.recipes.digits")  # another recipe's
    parts = ["holdfast.recipes", "holdfast.recipes.language", "holdfast.recipes.texts"]
    assert find_code(["holdfast.recipes.language"], {*sys.modules}) == parts
    before = {name for name in sys.modules if name not in parts}
    assert find_code(["holdfast.recipes.language"], before) == parts


def test_a_package_beside_its_record_is_installed(write: Write) -> None:
    """pip install --target puts packages there."""
    write("target_e/__init__.py", "")
    write("target_e-2.0.dist-info/RECORD", "target_e/__init__.py,sha256=x,0\n")
    write("target_e-2.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: Target-E\nVersion: 2.0\n")
    write("recipe_e.py", "import target_e\n")
    assert load("recipe_e") == ["recipe_e"]
    assert find_packages(["recipe_e"]) == {"Target-E": "2.0"}


def test_a_module_is_found_without_importing_its_parents(write: Write) -> None:
    write("parent_f/__init__.py", "raise RuntimeError('imported')\n")
    write("parent_f/inner/child.py", "")
    assert find_file("parent_f.inner.child").endswith("parent_f/inner/child.py")
    assert find_spec("parent_f.none") is None
    assert find_spec("parent_f.inner.child.none") is None
    assert "parent_f" not in sys.modules


def test_every_kind_of_import_statement_is_found(write: Write) -> None:
    write("pack_g/__init__.py", "from .near import x\n")
    write("pack_g/near.py", "import a.b\nfrom c import d, e as f\nfrom . import g\nfrom .. import h\nfrom i import *\n")
    importlib.import_module("importlib")
    assert list_imports("pack_g.near") >= {"a", "a.b", "c", "c.d", "c.e", "pack_g", "pack_g.g", "i"}
    assert list_imports("pack_g") == {"pack_g", "pack_g.near", "pack_g.near.x"}
    write("broken_g.py", "x = (\n")
    assert list_imports("broken_g") == list_imports("sys") == list_imports("none_g") == set()


# ---- packages


def install(write: Write, text: str) -> None:
    """Install a package of one module, whose RECORD has the module's hash."""
    sha256 = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    write("target_j/core.py", text)
    write("target_j-2.0.dist-info/RECORD", f"target_j/core.py,sha256={sha256},{len(text)}\nother.py,sha256=x,1\n")
    write("target_j-2.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: target-j\nVersion: 2.0\n")


def test_a_package_that_was_edited_or_installed_again_has_other_contents(write: Write, tmp_path: Path) -> None:
    install(write, "x = 1\n")
    importlib.import_module("target_j.core")
    first = find_contents(["target-j"], {})
    assert first.keys() == {"target-j"}
    assert first["target-j"].keys() == {"record"}
    write("target_j/core.py", "x = 2\n")
    edited = find_contents(["target-j"], {})
    assert edited["target-j"]["edited"].keys() == {"target_j/core.py"}
    del sys.modules["target_j.core"]
    assert find_contents(["target-j"], {}) == edited, "it is newer than the RECORD"
    assert find_contents(["target-j"], edited) == edited, "it is looked at although it isn't loaded"
    _read_hashes.cache_clear()
    install(write, "x = 3\n")
    assert find_contents(["target-j"], {})["target-j"]["record"] != first["target-j"]["record"]
    assert find_contents(["pydantic", "no-such-package"], {}).keys() == {"pydantic"}


def test_the_owner_of_a_file_is_found() -> None:
    import psutil
    import pydantic

    for module in (psutil, pydantic):
        owner = find_owner(str(module.__file__))
        assert owner
        assert (owner.name, owner.version) == (module.__name__, find_versions([owner.name])[owner.name])
    assert find_owner(__file__) is None


def test_packages_are_those_that_the_users_modules_import(write: Write) -> None:
    write("recipe_h.py", "import torch\nimport numpy\nimport holdfast\nimport pydantic.main\nimport recipe_i\n")
    write("recipe_i.py", "")
    modules = load("recipe_h")
    # Not pytest, which is loaded too; torch and NumPy are terms of the contract.
    assert find_packages(modules).keys() == {"pydantic"}


def test_packages_that_are_not_installed_are_left_out() -> None:
    assert find_versions(["pydantic", "no-such-package"]).keys() == {"pydantic"}


def test_holdfasts_version_changes_with_its_code() -> None:
    assert describe_holdfast("0.1") == describe_holdfast("0.1")
    assert describe_holdfast("0.1").startswith("0.1 (")
