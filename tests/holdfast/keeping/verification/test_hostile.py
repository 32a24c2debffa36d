"""Malicious files in a store: a clear error, bounded memory, no code executed, nothing outside touched."""

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import Line
from holdfast.checkpoint import METADATA, PAYLOAD
from holdfast.config import Retention
from holdfast.errors import CheckpointDamaged, Unreadable
from holdfast.journal import Commit, Journal
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support.makers import STEPS_PER_EPOCH, load, make_line, resume, train

GB = 2**30
MEMORY_MB = 700


@pytest.fixture
def line(tmp_path: Path) -> Line:
    line = make_line(LocalStore(str(tmp_path / "store")))
    for _ in range(3):
        train(line)
    return line


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Make a folder beside the store whose content must not be touched."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in (PAYLOAD, METADATA, "metrics.jsonl"):
        (folder / name).write_text("secret")
    return folder


def root(line: Line) -> Path:
    return Path(line.journal.store.url)


def fresh(line: Line) -> Journal:
    return Journal(LocalStore(str(root(line).parent)), "run")


def forge(line: Line, number: int, data: bytes) -> Commit:
    """Replace a commit's payload by these bytes and correct every hash, so that only their content is wrong."""
    commit = fresh(line).read_commit(number)
    sha256 = hashlib.sha256(data).hexdigest()
    files = [
        file.model_copy(update={"size_bytes": len(data), "sha256": sha256}) if file.name == PAYLOAD else file
        for file in commit.files
    ]
    forged = commit.model_copy(update={"files": files, "checkpoint_sha256": sha256})
    (root(line) / commit.path / PAYLOAD).write_bytes(data)
    (root(line) / "commits" / f"{number:08d}.json").write_bytes(forged.to_bytes())
    return forged


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


PAYLOADS = {
    "a header of 2^60 bytes": (2**60).to_bytes(8, "little") + b"{}",
    "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
    "a pickle": pickle.dumps(Bomb()),
    "a zip, as torch.save makes": b"PK\x03\x04" + bytes(100),
    "a nest without end": (10**6).to_bytes(8, "little") + b"[" * 10**6,
    "empty": b"",
}


@pytest.mark.parametrize("payload", PAYLOADS)
def test_hostile_payloads_are_refused(
    line: Line, payload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commit = forge(line, 3, PAYLOADS[payload])
    problem = load(line.journal.store, commit)
    assert isinstance(problem, CheckpointDamaged)
    assert "is not a safetensors file as Holdfast writes it" in str(problem)
    assert not verify_run(fresh(line), deep=True).ok
    assert not (tmp_path / "executed").exists()
    line.journal = fresh(line)
    resume(line)
    assert line.head
    assert line.head.number == 2


@pytest.mark.parametrize("name", ["latest.json", "commits/00000003.json", "epoch-0003/metadata.json", "run.json"])
def test_a_record_of_a_gigabyte_takes_no_memory(line: Line, name: str) -> None:
    """The command runs under a memory limit, so that it fails if it reads the record into memory."""
    with (root(line) / name).open("r+b") as file:
        file.truncate(GB)
    program = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY_MB * 2**20},) * 2)\n"
        "from holdfast.cli import app, run_app\n"
        "sys.exit(run_app(app, ['verify', sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(root(line))],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN_S,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert Path(name).name in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", ["../../outside", "/etc", "..", "epoch-0003/../../../outside", "commits"])
def test_a_commit_that_points_elsewhere_is_damage(line: Line, outside: Path, path: str) -> None:
    commit = fresh(line).read_commit(3).model_copy(update={"path": path})
    (root(line) / "commits" / "00000003.json").write_bytes(commit.to_bytes())
    latest = line.journal.read_latest()
    assert latest
    (root(line) / "latest.json").write_bytes(latest.model_copy(update={"path": path}).to_bytes())
    line.journal = fresh(line)
    resume(line)
    assert line.head
    assert line.head.path == "epoch-0003"  # the checkpoint itself is good, and is adopted
    assert line.head.number == 4
    prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH, debris_after_s=0)
    assert len(list(outside.iterdir())) == 3
    assert len(list((root(line) / "commits").iterdir())) == 4


@pytest.mark.parametrize("name", ["epoch-0003", f"epoch-0003/{PAYLOAD}", f"epoch-0003/{METADATA}"])
def test_links_out_of_the_run_are_refused(line: Line, outside: Path, name: str) -> None:
    path = root(line) / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(outside if "." not in name else outside / path.name)
    assert [f"{path} is a symbolic link; a run must not contain one"] == verify_run(fresh(line)).problems
    for look in (lambda: load(line.journal.store, line.journal.read_commit(3)), lambda: resume(line)):
        with pytest.raises(Unreadable, match="is a symbolic link"):
            look()
    assert [path.read_text() for path in outside.iterdir()] == ["secret"] * 3


def test_pruning_a_link_deletes_nothing_behind_it(line: Line, outside: Path) -> None:
    shutil.rmtree(root(line) / "epoch-0001")
    (root(line) / "epoch-0001").symlink_to(outside)
    prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH, debris_after_s=0)
    assert [path.read_text() for path in outside.iterdir()] == ["secret"] * 3


@pytest.mark.parametrize("name", [f"epoch-0003/{PAYLOAD}", "latest.json", "commits/00000003.json"])
def test_a_pipe_in_place_of_a_file_does_not_block(line: Line, name: str) -> None:
    (root(line) / name).unlink()
    os.mkfifo(root(line) / name)
    assert verify_run(fresh(line)).problems == [f"{root(line) / name} is not a regular file"]
