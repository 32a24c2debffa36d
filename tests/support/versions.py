"""Test Holdfast with the oldest and with the newest versions of the libraries it relies on: ``make test-versions``.

::

    python -m tests.support.versions [oldest] [newest]

Each has an environment of its own in ``.venv/versions``: the package and its extras, with the libraries of `TESTED` in
the oldest versions that pyproject.toml allows, or in the newest that pip is offered, and all other libraries as a user
gets them who installs today. A narrow part of the suite then shows whether the libraries still do what the code expects
of them. It prints what docs/versions.md has in its table; the exit code is 1 if a test fails.
"""

import json
import re
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from holdfast.machine.libraries import TESTED
from tests.conftest import ROOT

ENDS = ("oldest", "newest")
FOLDER = ROOT / ".venv" / "versions"
EXTRAS = "prefect,transformers,lightning"
# What the tests themselves need, in the versions of constraints.txt.
TOOLS = (
    "editables", "hatchling", "hypothesis", "moto[server]", "pytest", "pytest-timeout", "s3fs", "safetensors",
    "securesystemslib",
)  # fmt: skip
PINNED_TOOLS = {"editables", "hatchling", "hypothesis", "moto", "pytest", "pytest-timeout", "safetensors"}
# Tests of what another library does, and not of what only Holdfast does.
QUICK = (
    "tests/project/test_private_names.py", "tests/holdfast/adapters", "tests/holdfast/data/test_streams.py",
    "tests/holdfast/state/test_generators.py", "tests/holdfast/state/test_round_trips.py",
    "tests/holdfast/training/test_composed_schedulers.py", "tests/holdfast/training/sharded",
    "tests/holdfast/extensions/virtual_ranks/test_step.py", "tests/tasks", "tests/flows",
)  # fmt: skip
# A run through Prefect's flow, killed and continued.
REAL = ("tests/flows/test_main_job.py",)


def main(ends: Sequence[str]) -> int:
    """Test each end of the table, and return the exit code."""
    if unknown := {*ends} - {*ENDS}:
        print(f"error: expected {' or '.join(ENDS)}, not {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    return max(test_end(end) for end in ends or ENDS)


def test_end(end: str) -> int:
    python = prepare(end)
    print(f"{end}: {', '.join(f'{name} {number}' for name, number in read_versions(python).items())}", flush=True)
    began_s = time.monotonic()
    codes = [
        subprocess.run([python, "-m", "pytest", "--quiet", *arguments], cwd=ROOT, check=False).returncode
        for arguments in (("-m", "not slow", *QUICK), REAL)
    ]
    verdict = "failed" if any(codes) else "passed"
    print(f"{end}: {verdict} in {(time.monotonic() - began_s) / 60:.0f} minutes", flush=True)
    return 1 if any(codes) else 0


def prepare(end: str) -> Path:
    """Make the environment, or bring it up to date, and return its Python."""
    folder = FOLDER / end
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    pins = [f"{name}=={oldest}" for name, (oldest, _) in TESTED.items()] if end == "oldest" else []
    options = ["--quiet", "--constraint", write_constraints(), "--editable", f".[{EXTRAS}]", *pins, *TOOLS]
    if end == "newest":
        options += ["--upgrade", "--upgrade-strategy", "eager"]
    subprocess.run([python, "-m", "pip", "install", *options], cwd=ROOT, check=True)
    return python


def write_constraints() -> Path:
    """Write the versions of the tools alone: the libraries' own are what is tried."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0].lower() in PINNED_TOOLS]
    path = FOLDER / "constraints.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(kept) + "\n", "utf-8")
    return path


def read_versions(python: Path) -> dict[str, str]:
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True, encoding="utf-8"
    )
    installed = {re.sub("[-_.]+", "-", each["name"]).lower(): each["version"] for each in json.loads(listed.stdout)}
    return {name: installed[name] for name in TESTED}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
