"""Tests of ``make dist``: what the wheel and the sdist hold, the list of components, and the licences."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import holdfast
from holdfast.terminal.distribution import DISTRIBUTION
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support.tools import load, needs_tools

BUILT_FROM = ("holdfast", "docs", "CHANGELOG.md", "LICENSE", "SECURITY.md", "pyproject.toml", ".gitignore")
# Files that may be in a working tree and must never be published.
SECRETS = (
    ".env", "holdfast/.env", "holdfast/.env.local", "holdfast/server.key", "holdfast/store/id.pem",
    "holdfast/terraform.tfstate", "infra/compose.yaml", "infra/.env", "tests/test_a.py", ".venv/bin/python",
    "runs/language/run.json", "logs/a.log", "deployments/auth", "flows/train.py", "tasks/hooks.py", "dist/old.whl",
    "holdfast/__pycache__/a.pyc", ".git/config",
)  # fmt: skip


release = load("release")


def build(tree: Path, target: Path) -> tuple[set[str], set[str]]:
    """Build wheel and sdist from a tree; return the names of the files in each."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", target]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN_S)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    return {*zipfile.ZipFile(wheel).namelist()}, names


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what a distribution is built from, among files that must not be published."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    return tree


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    for name in SECRETS:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("secret")
    return build(tree, tmp_path_factory.mktemp("built"))


def list_engine() -> set[str]:
    files = (path for path in (ROOT / "holdfast").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def list_docs() -> set[str]:
    docs = ROOT / "docs"
    return {path.relative_to(ROOT).as_posix() for path in (*docs.glob("*.md"), *docs.glob("data/*.csv"))}


def test_the_wheel_holds_the_engine_and_its_pages_alone(built: tuple[set[str], set[str]]) -> None:
    info = f"{release.STEM}-{holdfast.__version__}.dist-info"
    own = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    own |= {f"{info}/licenses/holdfast/extensions/report/vendor/uPlot.LICENSE"}
    assert built[0] == list_engine() | {f"holdfast/{page}" for page in list_docs()} | own


def test_the_sdist_holds_the_engine_and_its_pages(built: tuple[set[str], set[str]]) -> None:
    assert built[1] == list_engine() | list_docs() | {*BUILT_FROM[2:], "PKG-INFO"}


def test_the_sdist_builds_the_same_wheel(built: tuple[set[str], set[str]], tree: Path, tmp_path: Path) -> None:
    build(tree, tmp_path / "first")
    (sdist,) = (tmp_path / "first").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path / f"{release.STEM}-{holdfast.__version__}", tmp_path / "second")
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob("*/*.whl")}
    assert len(digests) == 1


def test_the_version_is_semantic_and_has_an_entry() -> None:
    assert release.read_version() == holdfast.__version__
    entries = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert entries[0].rstrip(",") == holdfast.__version__
    assert len({*entries}) == len(entries)


def test_the_command_tells_its_version() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"{holdfast.__version__}\n"


@pytest.mark.parametrize("version", ["1.0", "1.0.0-final", "", "9.9.9"])
def test_a_version_without_an_entry_is_refused(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "holdfast").mkdir()
    (tmp_path / "holdfast" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    with pytest.raises(release.Fault, match=r"semantic version|no entry for 9\.9\.9"):
        release.read_version()


@pytest.mark.parametrize(
    ("tag", "heading", "said"),
    [
        ("v1.2.0", "## 1.2.0, 2027-01-31", ""),
        ("v1.2.1", "## 1.2.0, 2027-01-31", "the tag is 'v1.2.1', but .* version 1.2.0: expected v1.2.0"),
        ("1.2.0", "## 1.2.0, 2027-01-31", "expected v1.2.0"),
        ("v1.2.0", "## 1.2.0, not released yet", "no date for 1.2.0"),
    ],
)
def test_a_tag_is_that_of_the_version_which_has_a_date(
    tag: str, heading: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "holdfast").mkdir()
    (tmp_path / "holdfast" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n## 1.1.0, 2026-01-31\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setenv("GITHUB_REF_NAME", tag)
    # It looks for the packages only if the tag is right.
    for kind, expected in (("branch", "run make wheel first"), ("tag", said or "run make wheel first")):
        monkeypatch.setenv("GITHUB_REF_TYPE", kind)
        with pytest.raises(release.Fault, match=expected):
            release.main(tmp_path / "dist")


# ---- licences


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", True),
        ("MIT License\n\nCopyright (c) 2020", True),
        ("ISC License (ISCL)", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("Apache-2.0 AND GPL-3.0-only", False),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("MPL-2.0 AND (GPL-2.0-only OR AGPL-3.0-only)", False),
        ("(MIT OR GPL-2.0-only) AND (BSD-3-Clause AND Zlib)", True),
        ("Artistic License; GNU General Public License (GPL)", True),
        ("GNU General Public License v3 (GPLv3)", False),
        ("GNU Affero General Public License v3", False),
        ("LGPL-3.0-or-later", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Other/Proprietary License", False),
        ("UNKNOWN", False),
        ("", False),
    ],
)
def test_licences_are_judged(licence: str, expected: bool) -> None:
    assert release.is_allowed(licence) is expected


def test_a_licence_that_is_not_allowed_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = [
        {"Name": "good", "Version": "1", "License": "MIT"},
        {"Name": "nvidia-cublas-cu12", "Version": "12", "License": "LicenseRef-NVIDIA-Proprietary"},
        {"Name": "bad", "Version": "2", "License": "GPL-3.0-only"},
    ]
    monkeypatch.setattr(release, "list_packages", lambda: packages)
    with pytest.raises(release.Fault, match=r"ALLOWED in infra/release.py: bad 2: GPL-3.0-only$"):
        release.write_licences(tmp_path / "licences.md")
    assert "| bad | 2 | GPL-3.0-only |" in (tmp_path / "licences.md").read_text()


# ---- the whole


def test_the_packages_are_built_without_the_environments_of_the_checks() -> None:
    """Those have torch and the checks' own commands: more than a gigabyte for a wheel of one megabyte."""

    def list_commands(target: str) -> str:
        command = ["make", "--dry-run", "--always-make", target]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "-m build" in list_commands("wheel")
    assert ".venv" not in list_commands("wheel")
    assert list_commands("dist").index("-m build") < list_commands("dist").index("infra/release.py")


@needs_tools
@pytest.mark.slow
def test_make_dist(tmp_path: Path) -> None:
    build(ROOT, tmp_path / "dist")
    release.main(tmp_path / "dist")
    version = holdfast.__version__
    names = {path.name for path in (tmp_path / "dist").iterdir()}
    assert names == {
        f"holdfast_train-{version}-py3-none-any.whl", f"holdfast_train-{version}.tar.gz",
        f"holdfast_train-{version}.cdx.json", f"holdfast_train-{version}.licences.md", "SHA256SUMS",
    }  # fmt: skip
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path / "dist", check=True, capture_output=True)
    text = (tmp_path / "dist" / f"{release.STEM}-{version}.cdx.json").read_text("utf-8")
    assert str(ROOT) not in text
    known = json.loads(text)
    assert (known["bomFormat"], known["metadata"]["component"]["name"]) == ("CycloneDX", DISTRIBUTION)
    assert known["metadata"]["component"]["version"] == version
    components = {normal(each["name"]): each["version"] for each in known["components"]}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    locked = {normal(name): pin for name, pin in pins.items()}
    others = {name for name, found in components.items() if locked.get(name) != found.partition("+")[0]}
    assert others <= {DISTRIBUTION, "setuptools", *release.VENDORED}  # venv may bring its own setuptools
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {normal(re.split(r"[^\w.-]", each)[0]) for each in project["dependencies"]} <= components.keys()
    table = (tmp_path / "dist" / f"{release.STEM}-{version}.licences.md").read_text("utf-8")
    listed = {normal(name) for name in re.findall(r"^\| ([\w.-]+) \| \d", table, re.M)}
    assert listed >= components.keys() - {DISTRIBUTION}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
