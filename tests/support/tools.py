"""The scripts of infra/, as modules that take their commands from .venv/tools, which `make check-infra` installs."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.conftest import ROOT

TOOLS = ROOT / ".venv" / "tools" / "bin"
needs_tools = pytest.mark.skipif(not TOOLS.exists(), reason="make check-infra installs its tools")


def load(name: str) -> ModuleType:
    """Load a script of infra/: ``check``, ``release`` or ``website``. As a script it imports its neighbours by name."""
    sys.path.insert(0, str(ROOT / "infra"))
    spec = importlib.util.spec_from_file_location(f"infra_{name}", ROOT / "infra" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "infra"))
    module.BIN = TOOLS
    return module


checks = load("check")
