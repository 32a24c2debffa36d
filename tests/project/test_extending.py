"""Tests of extensions: docs/extending.md's package works as it stands, and Holdfast works without each of its own."""

import ast
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import extending
from holdfast.config import RunConfig
from holdfast.errors import ConfigError, WrongUse
from holdfast.extending import Command, Extension, call_all, check_tables, find_extensions
from holdfast.proof import audit
from holdfast.proof.audit import check_on_fault
from holdfast.training import Training
from tests.conftest import COMMAND_WITHIN_S, ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
OWN = sorted(path.parent.name for path in ROOT.glob("holdfast/extensions/*/__init__.py"))
# Programs that measure or photograph several extensions, and tests of the whole repository.
MEASURING = (
    "tests/bench/",
    "tests/infra/",
    "tests/project/",
    "tests/support/curves.py",
    "tests/support/moved.py",
    "tests/support/packing.py",
    "tests/support/pod.py",
    "tests/support/pictured.py",
    "tests/support/walked.py",
)


def read_blocks(language: str) -> list[str]:
    inside = re.split(r"^```", PAGE, flags=re.M)[1::2]
    return [text for name, _, text in (part.partition("\n") for part in inside) if name == language]


def install(folder: Path, name: str) -> Path:
    """Install the package `name`, whose modules are in `folder / name`, with the page's pyproject.toml."""
    (folder / "pyproject.toml").write_text(read_blocks("toml")[0].replace("machines", name))
    target = folder / "installed"
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(folder)], check=True)
    return target


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip has installed the page's package."""
    folder = tmp_path_factory.mktemp("made")
    (made := folder / "machines").mkdir()
    code, rules = read_blocks("python")
    (made / "__init__.py").write_text(code)
    (made / "rules.py").write_text(rules)
    return install(folder, "machines")


def run(folder: Path, installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *arguments], cwd=folder, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(installed)}, timeout=COMMAND_WITHIN_S,
    )  # fmt: skip


@pytest.mark.slow
def test_the_pages_package_adds_a_command_and_refuses_machines(installed: Path, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    table = read_blocks("toml")[1]
    config.write_text(f'recipe = "toy:toy"\nrun = "r"\n{table}')
    assert "machines     Show which machines may train" in run(tmp_path, installed, "--help").stdout
    assert run(tmp_path, installed, "machines", "my.toml").stdout == "gpu-*\n"
    refused = run(tmp_path, installed, "train", "my.toml")
    (shown,) = [block for block in read_blocks("") if block.startswith("error: ")]
    assert refused.stderr == shown.replace("laptop", platform.node())
    assert refused.returncode == 3
    assert not (tmp_path / "runs" / "r").exists()
    config.write_text(f'recipe = "toy:toy"\nrun = "r"\n{table.replace("gpu-*", platform.node())}')
    allowed = run(tmp_path, installed, "train", "my.toml")
    assert "there is no module toy" in allowed.stderr, "the machine is admitted, and the recipe is looked for"
    wrong = run(tmp_path, installed, "train", "my.toml", "--set", "extensions.machines.allowed=3")
    assert wrong.stderr.startswith("error: extensions.machines.allowed: ")
    assert wrong.returncode == 1
    config.write_text("""recipe = "toy:toy"\nrun = "r"\nextensions.machines.alowed = []""")
    unknown = run(tmp_path, installed, "machines", "my.toml")
    assert unknown.stderr == "error: unknown key extensions.machines.alowed\nhint: did you mean allowed?\n"
    assert unknown.returncode == 1


@pytest.mark.slow
def test_an_extension_copies_each_commit_in_its_own_thread(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "support" / "second_bucket", tmp_path / "second_bucket")
    installed = install(tmp_path, "second_bucket")
    shutil.copy(ROOT / "tests" / "support" / "toy.py", tmp_path)
    table = f'[extensions.second_bucket]\nstore = "{tmp_path}/second"'
    (tmp_path / "my.toml").write_text(f'recipe = "toy:toy"\nrun = "r"\nepochs = 2\n{table}')
    trained = run(tmp_path, installed, "train", "my.toml")
    assert trained.returncode == 0, trained.stderr
    assert f"copied commit 2 to {tmp_path}/second/r\n" in trained.stdout + trained.stderr
    copies = [path for path in (tmp_path / "second" / "r").rglob("*") if path.is_file()]
    assert {"commits", "epoch-0001", "epoch-0002"} <= {path.parent.name for path in copies}
    for path in copies:
        assert path.read_bytes() == (tmp_path / "runs" / path.relative_to(tmp_path / "second")).read_bytes()
    assert run(tmp_path, installed, "second-bucket", "my.toml").stdout == "1 equal\n2 equal\n"
    (tmp_path / "file").touch()
    closed = f"extensions.second_bucket.store={tmp_path}/file"
    refused = run(tmp_path, installed, "train", "my.toml", "--set", closed, "--set", "run=other")
    assert refused.stderr.startswith("error: the extension second_bucket refuses this machine: can't ")
    assert refused.returncode == 3


@pytest.mark.slow
def test_a_broken_extension_stops_training_and_hides_no_run(installed: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(installed, tmp_path / "installed")
    (broken / "machines" / "__init__.py").write_text("import no_such_module")
    (tmp_path / "my.toml").write_text('recipe = "toy:toy"\nrun = "r"\n')
    shown = run(tmp_path, broken, "show", "--store", ".")
    warning, *rest = shown.stderr.splitlines()
    assert warning.startswith("warning: the extension machines (machines:extension) can't be imported: No module named")
    assert (shown.returncode, rest) == (0, [])
    refused = run(tmp_path, broken, "train", "my.toml")
    assert refused.stderr.splitlines()[1].startswith("error: the extension machines (machines:extension) can't be")
    assert refused.returncode == 1


def fail(config: RunConfig) -> str:
    raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (Extension("mine", admission="no_module:refuse"), "the extension mine: no_module:refuse can't be imported: "),
        (Extension("mine", admission=f"{__name__}:fail"), rf"mine: {__name__}:fail failed at .*\.py:\d+: by nothing"),
    ],
)
def test_an_admission_that_fails_lets_nothing_train(
    monkeypatch: pytest.MonkeyPatch, extension: Extension, message: str
) -> None:
    monkeypatch.setattr(extending, "find_extensions", lambda: (extension,))
    with pytest.raises(ConfigError, match=message):
        list(call_all("admission", RunConfig(recipe="m:f", run="r")))


def test_a_rollback_needs_an_extension_that_follows_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "find_extensions", lambda: ())
    check_on_fault("record")
    with pytest.raises(WrongUse, match="--on-fault rollback: no installed extension does this after a verdict"):
        check_on_fault("rollback")


def test_a_table_that_no_extension_reads_is_refused() -> None:
    config = RunConfig(recipe="m:f", run="r", extensions={"nothing": {"a": 1}})
    with pytest.raises(ConfigError, match=r"extensions\.nothing: no installed extension reads this table"):
        check_tables(config)


def test_a_launcher_that_no_extension_has_is_refused() -> None:
    config = RunConfig.model_validate({"recipe": "m:f", "run": "r", "compute": {"launcher": "mine"}})
    with pytest.raises(ConfigError, match=r'compute.launcher = "mine": no installed extension has this launcher') as it:
        check_tables(config)
    assert it.value.hint.startswith("known: torchrun")


def test_without_an_extension_virtual_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extending, "find_extensions", lambda: ())
    where = {"recipe": "tests.support.toy:toy", "run": "r", "store": str(tmp_path)}
    how = {"compute": {"device": "cpu", "virtual_ranks": 4}, "determinism": {"mode": "fast"}}
    config = RunConfig.model_validate(where | how)
    with pytest.raises(ConfigError, match=r"compute.virtual_ranks = 4: no installed extension trains the same bytes"):
        Training(config)


def test_every_folder_is_found() -> None:
    assert [each.name for each in find_extensions()] == OWN
    assert all(isinstance(each, Command) for extension in find_extensions() for each in extension.commands)


def list_named(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what a file names as text to import it later: each module, and a name in it, or an empty text."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        texts = [node] if isinstance(node, ast.Constant) else []
        if isinstance(node, ast.Call):  # python -m MODULE
            pairs = itertools.pairwise(node.args)
            modules = [module for flag, module in pairs if isinstance(flag, ast.Constant) and flag.value == "-m"]
            yield from ((str(each.value), "") for each in modules if isinstance(each, ast.Constant))
        for text in texts:
            if isinstance(text.value, str) and (found := re.fullmatch(r"(holdfast(?:\.\w+)+):(\w+)", text.value)):
                yield found[1], found[2]


def test_what_the_code_names_as_text_exists() -> None:
    """No import fails before the text is used, so a moved module would be missed only by whoever uses it."""
    files = {*ROOT.glob("holdfast/**/*.py")} - {ROOT / "holdfast" / "config" / "earlier.py"}  # that names what is gone
    named = {each for path in files for each in list_named(path) if each[0].startswith("holdfast.")}
    assert ("holdfast.extensions.sinks.wandb", "Wandb") in named
    assert ("holdfast.extensions.sinks", "") in named
    for module, name in named:
        file = ROOT.joinpath(*module.split("."))
        source = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text("utf-8")
        body = ast.parse(source).body
        defined = {getattr(node, "name", "") for node in body}
        defined |= {ast.unparse(each) for node in body if isinstance(node, ast.Assign) for each in node.targets}
        assert not name or name in defined, f"{module}:{name}"


def list_extensions_imported(path: Path) -> set[str]:
    """Return the extensions that a file imports at its top, where a missing module fails all of its tests."""
    tree = ast.parse(path.read_text("utf-8"))
    modules = {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    return {module.split(".")[2] for module in modules if module.startswith("holdfast.extensions.")}


def test_only_an_extensions_own_tests_need_it() -> None:
    """import-linter checks the code in the same way."""
    needed = {path.relative_to(ROOT).as_posix(): list_extensions_imported(path) for path in ROOT.glob("tests/**/*.py")}
    own = {f"tests/holdfast/extensions/{name}/": {name} for name in OWN}
    for path, names in needed.items():
        allowed = next((found for folder, found in own.items() if path.startswith(folder)), set[str]())
        assert names <= allowed or path.startswith(MEASURING), path


@pytest.mark.slow
def test_holdfast_works_without_any_extension(tmp_path: Path) -> None:
    for room in ("holdfast", "tasks", "flows", "deployments", "docs", "tests"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in OWN:
        shutil.rmtree(tmp_path / "holdfast" / "extensions" / name)
        shutil.rmtree(tmp_path / "tests" / "holdfast" / "extensions" / name)
    kernel = ("tests/holdfast/attempt/test_attempt.py", "tests/holdfast/journal", "tests/holdfast/cli/test_app.py")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-m", "not slow and not extras", "-p", "no:cacheprovider", *kernel],
        cwd=tmp_path, text=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
