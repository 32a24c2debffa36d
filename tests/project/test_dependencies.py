"""Tests of the declared dependencies: the core's are what the engine imports, an extra's what its modules import."""

import ast
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from holdfast.provenance.packages import find_owner
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OURS = {"holdfast", "tasks", "flows", "deployments"}
# Modules of the engine that are imported only if an extra is installed.
EXTRA_MODULES = {
    "s3": ["store/s3.py"],
    "azure": ["store/azure.py"],
    "gcs": ["store/gcs.py"],
    "lightning": ["adapters/lightning.py", "adapters/lightning_loop.py", "adapters/lightning_state.py"],
    "otlp": ["extensions/metrics/otlp.py"],
    "prometheus": ["extensions/metrics/prometheus.py"],
    "ray": ["extensions/ray/carrying.py", "extensions/ray/placing.py", "extensions/ray/relaying.py"],
    "testing": ["testing/stores.py"],
    "tensorboard": ["extensions/sinks/tensorboard.py"],
    "torchtitan": ["adapters/torchtitan.py", "adapters/torchtitan_parts.py"],
    "transformers": ["adapters/trainer_arguments.py", "adapters/transformers.py"],
    "vision": ["recipes/digits.py"],
    "wandb": ["extensions/sinks/wandb.py"],
}
# Extras that only make test-extras installs, in the dependency group `extras`, each with a module that it brings.
LATER = {
    "lightning": "lightning",
    "otlp": "opentelemetry.exporter.otlp.proto.http",
    "prometheus": "prometheus_client",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "torchtitan": "torchtitan",  # only .venv/titan has it
    "transformers": "transformers",
    "vision": "sklearn",
    "wandb": "wandb",
}
# Extras also name packages that fsspec loads by URL.
NOT_IMPORTED = {"s3": {"s3fs"}, "azure": {"adlfs"}, "gcs": {"gcsfs"}}


def list_imports(source: str) -> Iterator[str]:
    """Yield all modules that Python source imports, including in functions and for type checkers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def find_distributions(files: list[Path]) -> set[str]:
    """Return the installed distributions whose modules these files import."""
    imported = {module for file in files for module in list_imports(file.read_text("utf-8"))}
    third_party = {each for each in imported if each.partition(".")[0] not in OURS | sys.stdlib_module_names}
    return {find_distribution(module) for module in third_party}


def find_distribution(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} is imported and not installed"
    owner = find_owner(spec.origin or "")
    assert owner is not None, f"no installed package has {module}"
    return canonicalize_name(owner.name)


def declared(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


CORE = declared(PROJECT["dependencies"])
EXTRAS = {extra: declared(requirements) for extra, requirements in PROJECT["optional-dependencies"].items()}


def files_of(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def test_the_core_dependencies_are_what_the_engine_imports() -> None:
    optional = {ROOT / "holdfast" / name for names in EXTRA_MODULES.values() for name in names}
    assert find_distributions([path for path in files_of("holdfast") if path not in optional]) == CORE


@pytest.mark.parametrize(
    "extra",
    [pytest.param(each, marks=[pytest.mark.extras(LATER[each])] if each in LATER else []) for each in EXTRA_MODULES],
)
def test_an_extra_is_what_its_modules_import(extra: str) -> None:
    imported = find_distributions([ROOT / "holdfast" / name for name in EXTRA_MODULES[extra]])
    assert imported - CORE == EXTRAS[extra] - NOT_IMPORTED.get(extra, set())


def test_the_prefect_extra_is_what_only_the_flows_import() -> None:
    imported = find_distributions(files_of("flows", "tasks", "deployments"))
    assert imported - CORE == EXTRAS["prefect"]


def test_make_installs_the_flows_dependencies() -> None:
    assert "--editable '.[prefect]' --group dev" in (ROOT / "Makefile").read_text("utf-8")


def test_imports_in_functions_and_for_type_checkers_count() -> None:
    source = "if TYPE_CHECKING:\n    import a.b\ndef f():\n    from c.d import e\nfrom . import g\n"
    assert sorted(list_imports(source)) == ["a.b", "c.d"]
