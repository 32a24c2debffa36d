"""Tests of the reference: every public name, command, setting, variable, reason, error and exit code is on its page."""

import ast
import importlib
import re
import subprocess
import sys

import pytest

import holdfast
from holdfast import errors
from holdfast.cli import EXIT_CODES
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.journal.endings import REASONS
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support.api import escape, find_public, spell_text
from tests.support.pages import DOCS, list_sections
from tests.support.reference import OF_OTHERS, find_constants, find_functions, find_imported, find_messages

CODE = [path for room in ("holdfast", "tasks", "flows", "deployments") for path in sorted((ROOT / room).rglob("*.py"))]
WITH_VARIABLES = [*CODE, *ROOT.glob("infra/*.py"), ROOT / "tests" / "conftest.py", *ROOT.glob("tests/support/*.py")]
# What one row of environment.md names together with another.
TORCHRUNS = {"GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"}
# Set for another library's import, whatever the machine has.
NOT_READ = {
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT",
    "HF_HUB_OFFLINE",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START",
    "RAY_USAGE_STATS_ENABLED",
}


def read(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def list_headings(page: str, level: int) -> set[str]:
    return set(re.findall(rf"^{'#' * level} `?([^`\n]+)`?$", read(page), re.M))


def test_every_public_name_is_in_the_reference() -> None:
    public = find_public()
    assert list_headings("api.md", 2) - {"Where to read on"} == set(public)
    assert list_headings("api.md", 3) == {name for names in public.values() for name in names}
    assert set(holdfast.__all__) <= list_headings("api.md", 3)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("holdfast.adapters.lightning", "fit"),
        ("holdfast.adapters.transformers", "train"),
        ("holdfast.looking.sinks", "Sink"),
        ("holdfast.testing", "assert_resumes"),
    ],
)
def test_what_code_on_pages_imports_is_public(module: str, name: str) -> None:
    assert name in find_public()[module]


@pytest.mark.parametrize("module", [name for name in find_public() if ".adapters." not in name])
def test_public_names_exist(module: str) -> None:
    assert [name for name in find_public()[module] if not hasattr(importlib.import_module(module), name)] == []


def test_every_command_that_the_help_lists_is_in_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "--help"],
        capture_output=True, text=True, check=True, timeout=COMMAND_WITHIN_S,
    )  # fmt: skip
    listed = set(re.findall(r"^\W+ ([a-z]+)   ", done.stdout.partition("Commands")[2], re.M))
    assert {"train", "show", "verify"} <= listed
    section = read("commands.md").partition("\n## holdfast\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^### (\w+)$", section, re.M)) == listed


def test_every_program_with_a_command_line_is_in_the_reference() -> None:
    programs = {
        match
        for path in CODE
        for match in re.findall(r'^(?:app|    program) = App\(\s*name="(.+?)"', path.read_text(), re.M)
    }
    assert list_headings("commands.md", 2) == programs


def test_every_setting_is_in_the_reference() -> None:
    text = read("configuration.md")
    sections = [("", RunConfig), *((prefix, section) for _, prefix, section in list_sections(RunConfig))]
    keys = [f"{prefix}{name}" for prefix, section in sections for name in section.model_fields]
    assert {"epochs", "compute.virtual_ranks", "retention.keep_best.metric"} <= set(keys)
    assert [key for key in keys if f"`{key}`" not in text and f"[{key}]" not in text] == []


def test_every_variable_of_ours_is_in_the_reference() -> None:
    mentioned = {name for path in WITH_VARIABLES for name in re.findall(r"HOLDFAST_[A-Z_]+", path.read_text("utf-8"))}
    listed = set(re.findall(r"^\| `(HOLDFAST_[A-Z_]+)` \|", read("environment.md"), re.M))
    assert mentioned == listed


def test_every_variable_of_others_that_the_code_reads_is_in_the_reference() -> None:
    pattern = (
        r"environ(?:\.get\(|\.setdefault\(|\[)['\"]([A-Z_]+)|"
        r"^\w*_VARIABLES? = \(?['\"]([A-Z_]+)|\b(SLURM_[A-Z]+)\b"
    )
    found = {"".join(groups) for path in CODE for groups in re.findall(pattern, path.read_text("utf-8"), re.M)}
    others = {name for name in found if not name.startswith("HOLDFAST_")} - TORCHRUNS - NOT_READ
    assert {"RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"} <= others
    text = read("environment.md")
    assert [name for name in others | TORCHRUNS if f"`{name}`" not in text] == []
    assert [name for name in OF_OTHERS if not any(name in path.read_text("utf-8") for path in CODE)] == []


def test_every_reason_error_and_exit_code_is_in_the_reference() -> None:
    text = read("errors.md")
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, HoldfastError)]
    names = [*REASONS, *(each.__name__ for each in classes if each is not HoldfastError)]
    assert [name for name in names if f"\n| `{name}` |" not in text] == []
    codes = set(re.findall(r"\b(\d+)\b", EXIT_CODES))
    assert codes == {"0", "1", "2", "3", "130", "143"}
    assert codes == {each for row in re.findall(r"^\| ([\d, ]+) \|", text, re.M) for each in row.split(", ")}
    assert {str(each.exit_code) for each in classes} <= codes


def test_messages_are_found() -> None:
    source = (
        'SETTING = "log.sinks"\n'
        "def check(name):\n"
        '    hint = "try another"\n'
        '    raise ConfigError(f"{SETTING}: no {name!r}, but {len(name)}", hint=hint)\n'
        'raise errors.StoreFull("no `space`")\n'
        "raise RankDied(text)\n"
    )
    tree = ast.parse(source)
    assert list(find_messages(tree, find_constants([tree]))) == [
        ("StoreFull", "no `space`", ""),
        ("ConfigError", "log.sinks: no {name}, but {number of name}", "try another"),
    ]


def test_hints_that_are_imported_chosen_or_returned_are_found() -> None:
    source = (
        "from holdfast.other import HINT\n"
        "def suggest(name):\n"
        '    return f"did you mean {name}?" if name else "known: none"\n'
        "def check(name, more):\n"
        '    hint = "first" if name else "second" + (f": {more}" if more else "")\n'
        '    raise RankDied("it is gone", hint=HINT)\n'
        '    raise RankDied("no such name", hint=suggest(name))\n'
        '    raise RankDied("one of two", hint=hint)\n'
    )
    tree, other = ast.parse(source), ast.parse('HINT = f"call it"')
    imported = find_imported(tree, {"holdfast.other": find_constants([other])})
    assert list(find_messages(tree, imported, find_functions([tree]))) == [
        ("RankDied", "it is gone", "call it"),
        ("RankDied", "no such name", "did you mean {name}?"),
        ("RankDied", "no such name", "known: none"),
        ("RankDied", "one of two", "first"),
        ("RankDied", "one of two", "second: {more}"),
    ]


def test_docstrings_become_markdown() -> None:
    assert spell_text("Read ``a<b>`` of <store>::\n\n    x<y") == ["Read `a<b>` of &lt;store>:", "", "    x<y"]
    assert escape("`<a>` <b>") == "`<a>` &lt;b>"


def test_troubleshooting_has_a_row_for_each_reason_and_error() -> None:
    text = read("troubleshooting.md")
    reasons = re.findall(r"^\| ([a-z ]+) \| ", text.partition("## What to do when")[2].partition("\n## ")[0], re.M)
    assert sorted(name.replace(" ", "_") for name in reasons if name != "reason") == sorted(REASONS)
    rows = re.findall(r"^\| (`.+?) \| ", text.partition("## What to do after")[2].partition("\n## ")[0], re.M)
    classes = [
        each.__name__ for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)
    ]
    assert sorted(name.strip("`") for row in rows for name in row.split(", ")) == sorted(
        set(classes) - {"HoldfastError"}
    )
