"""Tests of the distribution's name: what pages and messages install, and the other project called holdfast."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.starting import TEMPLATES
from holdfast.extensions.sinks.classes import CLASSES
from holdfast.machine.contract import list_changed
from holdfast.provenance.packages import find_packages
from holdfast.store.opening import STORES
from holdfast.terminal.distribution import DISTRIBUTION, find_other, spell_install, warn_of_other
from tests.conftest import COMMAND_WITHIN_S, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text("utf-8")
# Other projects' packages that a page, the Makefile or an image may install.
OTHERS = {name.lower() for name in re.findall(r"^([\w.-]+)==", CONSTRAINTS, re.M)} | {"mlflow"}
# What a person or a machine may copy a command from. Code spells no command: see the test of `spell_install`.
TEXTS = sorted(
    path
    for path in (*ROOT.glob("*"), *(each for room in ("docs", "holdfast", "infra", ".github", ".ci", "deployments")
                                    for each in (ROOT / room).rglob("*")))
    if path.is_file() and (path.suffix in (".md", ".yaml", ".yml", ".txt", ".sh") or not path.suffix)
)  # fmt: skip
INSTALL = re.compile(r"\b(?:pip3?|pipx|uv|uvx|poetry|conda)\s(?:install|add|download|tool install)\s([^`#;&|>]*)")
TAKES_VALUE = {"--constraint", "--requirement", "--find-links", "--group", "--index-url", "-c", "-r", "-f"}
REQUIREMENT = re.compile(r"([A-Za-z][\w.-]*)(?:\[([\w,-]+)\])?(?:[=<>~!@].*)?")


def list_named(text: str) -> Iterator[tuple[str, str]]:
    """Yield what the text's commands would fetch by name: each name, and its extras."""
    for command in INSTALL.findall(re.sub(r"\\\n", " ", text)):
        before = ""
        for word in re.split(r"[\s'\"]+", command.partition("\n")[0]):
            found = REQUIREMENT.fullmatch(word)
            if found and before not in TAKES_VALUE:
                yield found[1], found[2] or ""
            before = word
    # A requirement without a command, as in "holdfast[s3]". The command itself takes no bracket.
    yield from ((name, extras) for name, extras in re.findall(r"\b(holdfast[\w-]*)\[([a-z][\w,-]*)\]", text))


def is_ours(name: str, extras: str) -> bool:
    return name == DISTRIBUTION and all(extra in EXTRAS for extra in extras.split(",") if extra)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_text_installs_another_projects_holdfast(path: Path) -> None:
    """On PyPI `holdfast` is another project: its code would run in place of ours, on a machine that trains."""
    named = list_named(path.read_text("utf-8", errors="replace"))
    assert [each for each in named if not is_ours(*each) and each[0].lower() not in OTHERS] == []


def test_commands_that_would_install_another_project_are_found() -> None:
    text = """
      pip install holdfast pytest
    `pip install -U 'holdfast[s3]'`, or 'holdfast[chat]' alone
    uv add "holdfast==0.5" --index-url https://example.com -r requirements.txt # holdfast
    pip install --constraint constraints.txt \\
        hold-fast
    pip install . ; pip install '.[prefect]' ./holdfast_train-0.2.0-py3-none-any.whl "holdfast-train[s3,no] @ git+x"
    """
    bad = [each for each in list_named(text) if not is_ours(*each) and each[0].lower() not in OTHERS]
    assert sorted(bad) == [
        ("hold-fast", ""), ("holdfast", ""), ("holdfast", ""), ("holdfast", "chat"), ("holdfast", "s3"),
        ("holdfast", "s3"), ("holdfast-train", "s3,no"), ("holdfast-train", "s3,no"),
    ]  # fmt: skip


def test_one_function_spells_every_hint() -> None:
    """So the name is right everywhere, and every extra that a message names exists."""
    named = {*CLASSES, *(extra for *_, extra in STORES.values()), *(each.needs for each in TEMPLATES.values())} - {""}
    for path in (ROOT / "holdfast").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "spell_install":
                named |= {each.value for each in node.args if isinstance(each, ast.Constant)}
            elif isinstance(node, ast.Constant) and "pip install" in str(node.value):
                assert path.name == "distribution.py", (path, node.value)
    assert named <= EXTRAS.keys()
    assert named >= {"s3", "vision", "lightning"}
    assert spell_install("s3") == "pip install 'holdfast-train[s3]'"


def test_the_distribution_has_this_name() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["scripts"].keys() == {"holdfast"}


# ---- the other project in the same environment


def test_importing_warns_in_one_line_of_the_other_project(tmp_path: Path) -> None:
    """Both have a folder `holdfast`: whichever is installed last replaces files of the other."""
    (tmp_path / "holdfast").symlink_to(ROOT / "holdfast")
    program = [sys.executable, "-c", "import holdfast; print(holdfast.__file__)"]

    def say() -> tuple[str, list[str]]:
        done = subprocess.run(
            program, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=COMMAND_WITHIN_S
        )  # fmt: skip
        return done.stdout, done.stderr.splitlines()

    (tmp_path / "holdfast_train-0.2.0.dist-info").mkdir()
    (tmp_path / "holdfasts-1.0.dist-info").mkdir()
    assert say() == (f"{tmp_path / 'holdfast' / '__init__.py'}\n", [])
    (tmp_path / "holdfast-0.5.1.dist-info").mkdir()
    _, (line,) = say()
    assert line == (
        f"{tmp_path / 'holdfast-0.5.1.dist-info'}:1: RuntimeWarning: the package holdfast (another project, or an "
        "earlier Holdfast) is installed beside holdfast-train, and may have overwritten its files: "
        "pip uninstall holdfast holdfast-train, then install holdfast-train again"
    )


def test_a_folder_that_cannot_be_listed_is_no_reason_to_warn(tmp_path: Path) -> None:
    assert find_other(tmp_path / "app.zip") == ""
    warn_of_other(tmp_path / "app.zip")


# ---- records


@pytest.mark.parametrize("now", [{}, {DISTRIBUTION: "0.3.0"}])
@pytest.mark.parametrize("name", ["holdfast", DISTRIBUTION])
def test_a_run_recorded_under_another_distribution_name_has_no_drift(name: str, now: dict[str, str]) -> None:
    saved = {"packages": {name: "0.1.0", "einops": "0.8"}}
    assert list_changed(saved, {"packages": {"einops": "0.8", **now}}) == []
    assert list_changed(saved, {"packages": now}) == [("einops", "0.8", "")]


def test_the_record_of_packages_leaves_holdfast_itself_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version and its code are on record by themselves, whatever distribution installed it."""
    site = tmp_path / "site-packages"
    (site / f"holdfast_train-{holdfast.__version__}.dist-info").mkdir(parents=True)
    (site / "installed_recipe.py").write_text("import installed_beside\n")
    (site / "installed_beside.py").write_text("")
    info = site / f"holdfast_train-{holdfast.__version__}.dist-info"
    (info / "RECORD").write_text("installed_beside.py,,\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 9\n")
    monkeypatch.syspath_prepend(str(site))
    __import__("installed_recipe")
    assert find_packages(["installed_recipe"]) == {}
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: einops\nVersion: 9\n")
    assert find_packages(["installed_recipe"]) == {"einops": "9"}
