"""Packing a checkpoint: the same bytes everywhere, in a file that other tar programs read."""

import io
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from holdfast.checkpoint import METRICS, PAYLOAD
from holdfast.errors import Damage, RunUnknown, WrongUse
from holdfast.extensions.pack.pack import pack, tar_header, unpack
from holdfast.journal import Journal
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from tests.support.makers import FILES, SETTINGS, make_line, train
from tests.support.packing import contents, members, packed

needs_tar = pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar")


def copy_in_any_order(made: Path, folder: Path) -> None:
    """Copy the run's files in a different order, with other times and modes."""
    paths = [path for path in made.rglob("*") if path.is_file()]
    random.Random(str(folder)).shuffle(paths)
    for path in paths:
        copy = folder / path.relative_to(made)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
        os.utime(copy, (1, 1))


def test_a_checkpoint_is_packed_into_the_same_bytes_wherever_it_is(made: Path, good: bytes, tmp_path: Path) -> None:
    journals = []
    for name in ("a", "another/folder"):
        copy_in_any_order(made, tmp_path / name)
        journals.append(Journal(LocalStore(str(tmp_path / name)), "run"))
    memory = MemoryStore(str(tmp_path))
    for name, data in reversed(contents(made).items()):
        memory.create(name, data)
    journals.append(Journal(memory, "run"))
    assert {packed(journal) for journal in journals} == {good}


def test_a_packed_file_has_sorted_plain_members_with_fixed_metadata(good: bytes) -> None:
    found = [member for member, _ in members(good)]
    assert [member.name for member in found] == [
        "run/commits/00000003.json", f"run/configs/{SETTINGS}.json",
        f"run/epoch-0003/{PAYLOAD}", "run/epoch-0003/metadata.json", f"run/epoch-0003/{METRICS}", "run/run.json",
    ]  # fmt: skip
    for member in found:
        assert member.isreg()
        assert (member.mode, member.uid, member.gid, member.uname, member.gname) == (0o644, 0, 0, "", "")
        assert member.mtime == 0
    assert len(good) % tarfile.RECORDSIZE == 0


def test_a_run_extracted_with_tarfile_verifies(good: bytes, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(good)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian 12's Python 3.11.2 has none
        tar.extractall(tmp_path)
    report = verify_run(Journal(LocalStore(str(tmp_path)), "run"), everything=True, deep=True)
    assert report.problems == []
    assert [entry.commit for entry in report.checkpoints] == [3]


@needs_tar
@pytest.mark.parametrize("run", ["run", "r" * 100])
def test_gnu_tar_extracts_a_packed_run(tmp_path: Path, store: LocalStore, run: str) -> None:
    line = make_line(store, run)
    train(line)
    path = tmp_path / "packed.tar"
    path.write_bytes(packed(line.journal))
    listed = subprocess.run(["tar", "tvf", path], capture_output=True, text=True, check=True)
    assert [row.split()[-1] for row in listed.stdout.splitlines()] == [m.name for m, _ in members(path.read_bytes())]
    assert listed.stderr == ""
    (tmp_path / "extracted").mkdir()
    subprocess.run(["tar", "xf", path, "-C", tmp_path / "extracted"], check=True)
    assert verify_run(Journal(LocalStore(str(tmp_path / "extracted")), run)).ok


@pytest.mark.parametrize("name", ["run/a", f"{'r' * 100}/epoch-0001-step-000000000001.123456/{PAYLOAD}"])
@pytest.mark.parametrize("size_bytes", [0, 2**33 - 1, 2**33, 2**50])
def test_any_size_and_name_fit_into_a_header(name: str, size_bytes: int) -> None:
    block = tar_header(name, size_bytes)
    assert len(block) == tarfile.BLOCKSIZE
    info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    assert (info.name, info.size, info.type) == (name, size_bytes, tarfile.REGTYPE)
    if shutil.which("tar"):
        listed = subprocess.run(["tar", "tvf", "-"], input=block, capture_output=True, check=False)
        assert listed.stdout.decode().split()[2::3] == [str(size_bytes), name]


def change(path: Path, data: bytes | None) -> None:
    path.unlink() if data is None else path.write_bytes(data)


@pytest.mark.parametrize("name", [*(f"epoch-0003/{name}" for name in FILES), f"configs/{SETTINGS}.json", "run.json"])
@pytest.mark.parametrize("how", ["flipped", "shorter", "longer", "gone"])
def test_a_damaged_checkpoint_is_not_packed(made: Path, tmp_path: Path, name: str, how: str) -> None:
    shutil.copytree(made, tmp_path / "copy")
    path = tmp_path / "copy" / "run" / name
    data = path.read_bytes()
    changed = {"flipped": bytes([data[0] ^ 1]) + data[1:], "shorter": data[:-2], "longer": data + b"{", "gone": None}
    change(path, changed[how])
    journal = Journal(LocalStore(str(tmp_path / "copy")), "run")
    out = LocalStore(str(tmp_path / "out"))
    if how == "gone" and name.startswith("configs"):  # a checkpoint is complete without its settings
        unpack(io.BytesIO(packed(journal)), out)
        return
    # Without run.json the run is unknown.
    expected = RunUnknown if (how, name) == ("gone", "run.json") else Damage
    with pytest.raises(expected) as caught, out.creating("packed.tar") as writer:
        pack(journal, journal.read_commit(3), writer)
    assert expected is RunUnknown or name in str(caught.value)
    assert out.list() == []


def test_a_copy_under_another_name_is_refused(made: Path, tmp_path: Path) -> None:
    """Its archive couldn't be unpacked: run.json in it would name a different run than its folder."""
    shutil.copytree(made / "run", tmp_path / "mine")
    journal = Journal(LocalStore(str(tmp_path)), "mine")
    with pytest.raises(WrongUse, match=r"is the record of a run 'run', and this folder is 'mine'") as caught:
        packed(journal)
    assert "under its own name" in caught.value.hint
    assert "run.json is the record of a run 'run'" in verify_run(journal).problems[0]
