"""Tests of the public names: `public.txt` has them with their signatures; all others are private."""

import ast
import inspect
import io
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support.public import NOT_PROMISED, PUBLIC, TABLE, find, list_names, make_table, spell

TEMPLATES = sorted((ROOT / "holdfast" / "cli" / "templates").glob("*.py.txt"))
# The reference of public names shows signatures, which are no code.
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "holdfast").glob("*.md")))
    if path.name != "api.md"
]


def test_public_names_and_signatures_change_only_on_purpose() -> None:
    """Users' code calls these by name and by argument: a new line is a promise, and one that goes breaks their code.

    If that is meant, `python -m tests.support.public` writes the table anew, and CHANGELOG.md tells users.
    """
    assert make_table() == TABLE.read_text("utf-8")


def test_a_changed_signature_changes_the_table() -> None:
    (node,) = ast.parse(
        "class Sink(Base):\n    step: int = 0\n    _own = 1\n    def open(self, a, *, b=1) -> int: ..."
    ).body
    assert [*spell("Sink", node)] == ["class Sink(Base)", "Sink.step: int = ...", "Sink.open(self, a, *, b=1) -> int"]
    text = TABLE.read_text("utf-8")
    assert "\nRun.keep(self, /, *, leave_out: Sequence[str]=(), **objects: Any) -> None\n" in text
    assert not [name for name in NOT_PROMISED if f"\n{name}" in text]


def list_imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import from Holdfast; the name is empty if a module is imported whole."""
    is_fragment = source.rpartition("\n")[0].rpartition("#")[0].rstrip().endswith(":")  # a loop without its body
    for node in ast.walk(ast.parse(source + "    ..." * is_fragment)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "holdfast":
            yield from ((str(node.module), each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.partition(".")[0] == "holdfast")


def read_code(path: Path) -> list[str]:
    text = path.read_text("utf-8")
    return [text] if path.suffix == ".txt" else re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


@pytest.mark.parametrize("path", [*TEMPLATES, *PAGES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_and_templates_import_public_names_alone(path: Path) -> None:
    for code in read_code(path):
        for module, name in list_imports(code):
            is_module = f"{module}.{name}" in PUBLIC or (not name and module in PUBLIC)
            assert is_module or name in list_names(module), f"from {module} import {name}"
            assert is_module or find(module, name)


def test_the_pages_do_import_from_holdfast() -> None:
    found = {module for path in (*TEMPLATES, *PAGES) for code in read_code(path) for module, _ in list_imports(code)}
    assert found >= {"holdfast", "holdfast.errors", "holdfast.store", "holdfast.looking.sinks", "holdfast.testing"}


@pytest.mark.parametrize("text", [str(holdfast.__doc__), (ROOT / "docs" / "install.md").read_text("utf-8")])
def test_what_is_private_is_said(text: str) -> None:
    said = " ".join(text.split())
    (sentence,) = re.findall(
        r"You may import the names in `+holdfast\.__all__`+, (.*?)\. All other names are private", said
    )
    named = {each.removeprefix("holdfast.") for each in re.findall(r"`+([\w.]+)`+", sentence)}
    assert {module.removeprefix("holdfast.") for module in PUBLIC if module != "holdfast"} >= named - {
        "adapters",
        "recipes",
    }
    assert all(
        any(f"{module}.".startswith(f"holdfast.{each}.") for each in named) for module in PUBLIC if "." in module
    )


# ---- what a person sees in an interpreter


def test_dir_shows_the_public_names_alone() -> None:
    assert {name for name in dir(holdfast) if not name.startswith("_")} == {*holdfast.__all__}
    assert {"__doc__", "__path__", "__version__"} <= {*dir(holdfast)}
    assert all(getattr(holdfast, name) is not None for name in holdfast.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Runs'"):
        holdfast.Runs  # noqa: B018


def test_a_name_is_imported_when_it_is_first_used() -> None:
    program = (
        "import sys, holdfast\n"
        "dir(holdfast); holdfast.live; holdfast.Observer, holdfast.AttemptView, holdfast.Commit, holdfast.Progress\n"
        "print([name for name in ('torch', 'accelerate', 's3fs', 'prefect') if name in sys.modules])\n"
        "holdfast.Run\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=COMMAND_WITHIN_S
    )
    assert done.stdout == "[]\nTrue\n"


def test_help_speaks_to_a_user() -> None:
    text = io.StringIO()
    pydoc.Helper(output=text)(holdfast)
    said = re.sub(".\x08", "", text.getvalue())  # bold letters, as a terminal shows them
    assert said.index("Say what to train in a function") < said.index("PACKAGE CONTENTS")
    assert "Holdfast makes it, and calls the function with it" in said
    for name in (r"class Run\(", r"class Observer\(", r"live\(\s*config: ", r"load_config\(\s*path: "):
        assert re.search(name, said), name  # newer Pythons break the lines of long signatures


def test_the_example_of_run_is_python() -> None:
    (example,) = re.findall(r"^(    def train.*?)^``recipe", str(inspect.getdoc(holdfast.Run)), re.M | re.S)
    assert "run.keep(" in ast.unparse(ast.parse(re.sub(r"^    ", "", example, flags=re.M)))


def test_type_checkers_see_the_default_of_every_setting() -> None:
    """Without pydantic's plugin, `mypy --strict` takes ``Field(1)`` for a field that every call has to give."""
    tree = ast.parse((ROOT / "holdfast" / "config" / "fields.py").read_text("utf-8"))
    fields = [each for each in ast.walk(tree) if isinstance(each, ast.AnnAssign) and isinstance(each.value, ast.Call)]
    unnamed = [
        ast.unparse(each)
        for each in fields
        if isinstance(each.value, ast.Call) and ast.unparse(each.value.func) == "Field" and each.value.args
    ]
    assert len(fields) > 30
    assert unnamed == []
