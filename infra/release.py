"""Check the wheel and the sdist that ``make wheel`` has built, and add what a release publishes: ``make dist``.

::

    .venv/tools/bin/python infra/release.py [FOLDER]

The folder, ``dist`` by default, then also contains the SHA-256 of each file and an SBOM (CycloneDX JSON): the
components of the environment in which both are tested, with their licences. The exit code is 1 if a check
finds a fault. In a GitHub workflow that a tag has started, the tag must name the version.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
# Python in the environment that make setup makes, whose packages have the versions of constraints.txt.
PYTHON = ROOT / ".venv" / "bin" / "python"
# The names of licences that allow use in a closed product, as spelled by SPDX, by a classifier, or by a package itself.
ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Apache 2.0", "Apache 2.0 License",
    "Apache Software License", "BSD", "BSD License",
    "BSD-2-Clause", "BSD-3-Clause", "3-Clause BSD License", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC",
    "ISC License (ISCL)", "MIT", "MIT License", "MIT-0", "MIT-CMU", "PSF-2.0", "Python Software Foundation License",
    "The Unlicense (Unlicense)", "Unlicense", "Zlib",
    # These licences are allowed, because their terms apply only to changed files of the package itself.
    "MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)",
    # text-unidecode lets the user choose between this licence and the GPL.
    "Artistic License",
}  # fmt: skip
# The CUDA build of torch brings NVIDIA's own packages. Holdfast distributes none of them.
PROPRIETARY = ("nvidia-", "cuda-")
PACKAGE = "holdfast"
DISTRIBUTION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["name"]
STEM = DISTRIBUTION.replace("-", "_")  # the beginning of the names of the wheel and the sdist
# Files of other projects in the wheel: npm packages by name, with version and licence. A test compares the files'
# hashes.
VENDORED = {"uplot": ("1.6.32", "MIT")}


class Fault(Exception):
    """The error of a check that has found a fault."""


def main(folder: Path) -> None:
    """Check the wheel and the sdist in a folder, and add the other files of a release."""
    version = read_version()
    if os.environ.get("GITHUB_REF_TYPE") == "tag":
        check_tag(os.environ["GITHUB_REF_NAME"], version)
    packages = [folder / f"{STEM}-{version}-py3-none-any.whl", folder / f"{STEM}-{version}.tar.gz"]
    if missing := [package.name for package in packages if not package.is_file()]:
        raise Fault(f"{folder} has no {' and no '.join(missing)}: run make wheel first")
    run(BIN / "twine", "check", "--strict", *packages)
    write_components(folder / f"{STEM}-{version}.cdx.json", version)
    write_licences(folder / f"{STEM}-{version}.licences.md")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums), "utf-8")
    for path in sorted(folder.iterdir()):
        print(path)


def read_version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / PACKAGE / "__init__.py").read_text("utf-8"), re.M)
    if not found or not re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", found[1]):
        raise Fault(f"{PACKAGE}/__init__.py has no semantic version")
    if f"\n## {found[1]}" not in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        raise Fault(f"CHANGELOG.md has no entry for {found[1]}")
    return found[1]


def check_tag(tag: str, version: str) -> None:
    """Raise Fault if a tag doesn't name this version, or if the version's heading in CHANGELOG.md has no date."""
    if tag != f"v{version}":
        raise Fault(f"the tag is {tag!r}, but {PACKAGE}/__init__.py has the version {version}: expected v{version}")
    if not re.search(
        rf"^## {re.escape(version)}, \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M
    ):
        raise Fault(f"CHANGELOG.md has no date for {version}: expected '## {version}, YYYY-MM-DD'")


def write_components(path: Path, version: str) -> None:
    """Write the components of the environment as CycloneDX JSON. Equal environments give equal bytes."""
    pyproject = ROOT / "pyproject.toml"
    options: list[str | Path] = [
        "--pyproject",
        pyproject,
        "--output-reproducible",
        "--of",
        "JSON",
        "--output-file",
        path,
    ]
    run(BIN / "cyclonedx-py", "environment", *options, PYTHON)
    known: dict[str, Any] = json.loads(path.read_text("utf-8"))
    known["metadata"]["component"]["version"] = version
    known["components"] += [
        {
            "bom-ref": f"pkg:npm/{name}@{number}",
            "licenses": [{"license": {"id": licence}}],
            "name": name,
            "purl": f"pkg:npm/{name}@{number}",
            "type": "library",
            "version": number,
        }
        for name, (number, licence) in VENDORED.items()
    ]
    path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", "utf-8")


def write_licences(path: Path) -> None:
    """Write a table of the packages of the environment.

    Raises:
        Fault: a package has a licence that isn't allowed.
    """
    packages = list_packages()
    lines = ["| package | version | licence |", "|---|---|---|"]
    lines += [f"| {each['Name']} | {each['Version']} | {shorten(each['License'])} |" for each in packages]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    if faults := [*list_refused(packages)]:
        raise Fault("not allowed by ALLOWED in infra/release.py: " + "; ".join(faults))


def list_packages() -> list[dict[str, str]]:
    """Return name, version and licence of each package in the environment, and of those vendored in the wheel."""
    options = ["--format", "json", "--from", "mixed", "--with-system", "--ignore-packages", DISTRIBUTION]
    listed: list[dict[str, str]] = json.loads(run(BIN / "pip-licenses", "--python", PYTHON, *options))
    listed += [{"Name": name, "Version": number, "License": licence} for name, (number, licence) in VENDORED.items()]
    return sorted(listed, key=lambda package: package["Name"].lower())


def list_refused(packages: Sequence[dict[str, str]]) -> Iterator[str]:
    for package in packages:
        is_exempt = package["Name"].lower().startswith(PROPRIETARY)
        if not is_exempt and not is_allowed(package["License"]):
            yield f"{package['Name']} {package['Version']}: {shorten(package['License'])}"


def is_allowed(licence: str) -> bool:
    """Return whether a licence is allowed.

    Args:
        licence: an SPDX expression; several classifiers with ";" between them, of which one suffices; or a name.
    """
    licence = shorten(licence)
    if licence in ALLOWED:
        return True
    if ";" in licence:
        return any(map(is_allowed, licence.split(";")))
    while found := re.search(r"\(([^()]* (?:AND|OR) [^()]*)\)", licence):
        licence = licence.replace(found[0], "MIT" if is_allowed(found[1]) else "refused")
    return any(all(name.strip() in ALLOWED for name in each.split(" AND ")) for each in licence.split(" OR "))


def shorten(licence: str) -> str:
    """Return the first line of a package's licence, because some packages give the whole text."""
    return (licence.strip().splitlines() or [""])[0].strip()


def run(*command: str | Path) -> str:
    """Run a command from the root of the repository, and return its output.

    Raises:
        Fault: the command failed.
    """
    environment = os.environ | {"NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False
    )  # fmt: skip
    if done.returncode:
        raise Fault(f"{Path(command[0]).name} failed: {(done.stdout + done.stderr).strip()}")
    return done.stdout


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve())
    except Fault as fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(1)
