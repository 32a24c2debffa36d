"""Tests of the program's commands: each is found, and its summary is the first paragraph of its docstring."""

import importlib
import inspect
import subprocess
import sys

import pytest

from holdfast.cli.app import list_commands
from holdfast.extending import Command

COMMANDS = list_commands()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_summary_is_the_first_paragraph_of_the_docstring(command: Command) -> None:
    module, _, name = command.function.partition(":")
    docstring = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    assert command.summary == " ".join(docstring.split("\n\n")[0].split())


def test_the_list_of_commands_imports_no_command() -> None:
    program = "import sys; from holdfast.cli import app, run_app; run_app(app, ['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()
    assert not {each.function.partition(":")[0] for each in COMMANDS} & {*imported}
