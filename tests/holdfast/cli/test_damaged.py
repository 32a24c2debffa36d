"""Every command on damaged runs: no traceback, one clear line, a documented exit code, and nothing lost."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint import METADATA, METRICS, PAYLOAD
from holdfast.cli import app, run_app
from holdfast.journal.endings import Ending
from holdfast.store.local import LocalStore
from tests.conftest import IS_SOAK
from tests.support.makers import head_step, make_line, train, write_later_format

FILES = (
    "run.json", "latest.json", "config.snapshot.json", "attempts/00000001.json", "endings/00000001.json",
    "commits/00000001.json", "commits/00000003.json", "quarantine/00000002.json", "pins/00000001.json",
    "folders/epoch-0003.json", "metrics/00000003.jsonl",
    *(f"epoch-0003/{name}" for name in (PAYLOAD, METADATA, METRICS)),
)  # fmt: skip
FOLDERS = ("attempts", "commits", "configs", "endings", "epoch-0003", "folders", "metrics", "pins", "quarantine")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("runs", "{store}"), ("show", "{run}"), ("verify", "{run}", "--all", "--deep"),
    ("report", "{store}", "-o", "{out}/index.html"),
    ("compare", "{run}", "{store}/other"), ("compare", "{run}@1", "{run}@3"),
    ("goodput", "{run}"), ("plan", "{run}"), ("diff", "{run}"), ("export", "{run}", "{out}/weights"),
    ("pack", "{run}", "{out}/packed.tar"), ("pin", "{run}", "3"), ("unpin", "{run}", "3"), ("prune", "{run}"),
    ("quarantine", "{run}", "3", "why"),
)  # fmt: skip


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def swap(path: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: swap(path, lambda path: None),
    "cut": lambda path: replace(path, path.read_bytes()[:-10]),
    "a folder": lambda path: swap(path, Path.mkdir),
    "a loop of links": lambda path: swap(path, lambda path: path.symlink_to(path.name)),
    "a pipe": lambda path: swap(path, os.mkfifo),
    "a list": lambda path: replace(path, b"[]"),
    "a nest": lambda path: replace(path, b"[" * 10**5),
    "another run's": lambda path: shutil.copy(other_of(path), path),
}
FOLDER_DAMAGES = {name: DAMAGES[name] for name in ("deleted", "a folder", "a loop of links")} | {
    "a file": lambda path: swap(path, lambda path: path.write_text("x")),
}


def other_of(path: Path) -> Path:
    """Return the same name in the other run; a commit's record where the other run has none."""
    run = next(folder for folder in path.parents if folder.name == "run")
    other = run.parent / "other" / path.relative_to(run)
    return other if other.exists() else run.parent / "other" / "commits" / "00000001.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two complete runs: of the first, commit 1 is pinned, and 2 in quarantine."""
    folder = tmp_path_factory.mktemp("made")
    for run, first in (("run", 10), ("other", 12)):
        line = make_line(LocalStore(str(folder)), run, epochs=3)
        for steps in (first, 20 - first, 10):
            train(line, steps)
        if run == "run":
            line.journal.pin(1)
            line.journal.quarantine(2, "why", 1)
        line.journal.end_attempt(1, Ending("completed", step=head_step(line)))
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "store")
    (tmp_path / "out").mkdir()
    return tmp_path / "store"


def tell(store: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command on a damaged run; return its exit code and what it has printed."""
    out = store.parent / "out"
    arguments = [each.format(store=store, run=store / "run", out=out) for each in command]
    exit_code = run_app(app, arguments)
    printed = capsys.readouterr()
    assert exit_code in (0, 1, 2, 3), command
    assert "Traceback" not in printed.err, command
    assert printed.err.count("error: ") <= 1, (command, printed.err)
    if exit_code:
        assert printed.err or re.search("^(problem|note|different): |different$", printed.out, re.M), (
            command,
            printed.out,
        )
    return exit_code, printed.out + printed.err


def restore(made: Path, store: Path) -> None:
    shutil.rmtree(store)
    shutil.copytree(made, store)


def choose(damage: str, name: str) -> list[tuple[str, ...]]:
    """Return a quarter of the commands, another one for each damage and name; in a soak, all of them."""
    first = ([*DAMAGES, *FOLDER_DAMAGES].index(damage) + [*FILES, *FOLDERS].index(name)) % 4
    return list(COMMANDS if IS_SOAK else COMMANDS[first::4])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_breaks_no_command(
    made: Path, store: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FILES:
        for command in choose(damage, name):
            restore(made, store)
            DAMAGES[damage](store / "run" / name)
            _, printed = tell(store, command, capsys)
            if command[0] == "runs":
                assert "\nother " in f"\n{printed}", (name, printed)  # a damaged run hides no other
            for path in ("epoch-0001", "epoch-0003"):  # nothing is lost that was readable before
                for file in (made / "run" / path).iterdir():
                    if name != f"{path}/{file.name}":
                        assert (store / "run" / path / file.name).read_bytes() == file.read_bytes(), (name, command)


@pytest.mark.parametrize("damage", FOLDER_DAMAGES)
def test_a_damaged_folder_breaks_no_command(
    made: Path, store: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FOLDERS:
        for command in choose(damage, name):
            restore(made, store)
            FOLDER_DAMAGES[damage](store / "run" / name)
            tell(store, command, capsys)


# ---- one run that can't be read hides no other


@pytest.mark.parametrize("name", ["", "run.json", "commits/00000003.json", "epoch-0003/metadata.json"])
@pytest.mark.parametrize(
    "command", [("runs", "{store}"), ("report", "{store}", "-o", "{out}/index.html"), ("compare", "{store}", "{store}")]
)
def test_a_link_in_one_run_hides_no_other(
    store: Path, name: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES["a loop of links"](store / "run" / name)
    exit_code, printed = tell(store, command, capsys)
    assert exit_code == 2
    assert "ymbolic link" in printed
    if command[0] == "report":
        printed = (store.parent / "out" / "index.html").read_text("utf-8")
    assert "other" in printed


def test_a_run_of_a_later_version_hides_no_other(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_later_format(make_line(LocalStore(str(store)), "later").journal)
    exit_code, printed = tell(store, ("runs", "{store}"), capsys)
    assert exit_code == 1
    assert "run later: run 'later' is stored in format" in printed
    assert "30 of 30" in printed


def test_verify_names_a_link_and_checks_the_rest(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (f"epoch-0001/{PAYLOAD}", "commits/00000003.json", "endings/00000001.json"):
        DAMAGES["a loop of links"](store / "run" / name)
    exit_code, printed = tell(store, ("verify", "{run}"), capsys)
    assert exit_code == 2
    assert printed.count("is a symbolic link; a run must not contain one") == 3
    assert "3 problems" in printed


def test_a_checkpoint_with_another_runs_metadata_is_not_shown(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGES["another run's"](store / "run" / "epoch-0003" / METADATA)
    exit_code, printed = tell(store, ("show", "{run}"), capsys)
    assert exit_code == 2
    assert f"error: epoch-0003/{METADATA} can't be read: it has the SHA-256 " in printed
    assert " but was committed with " in printed


# ---- watch ends when nothing is left to wait for


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("attempts", "attempts/00000001.json is missing"),
        ("commits", "commits/00000003.json is missing"),
        (f"epoch-0003/{METADATA}", f"epoch-0003/{METADATA} is missing"),
    ],
)
def test_watch_of_a_complete_run_with_lost_records_ends(
    store: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES["deleted"](store / "run" / name)
    exit_code, printed = tell(store, ("watch", "{run}"), capsys)
    assert exit_code == 2
    assert f"note: {said}" in printed


# ---- paths that can't be written


@pytest.mark.parametrize(
    "command",
    [
        ("pack", "{run}", "{out}/file/packed.tar"), ("unpack", "{out}/packed.tar", "{out}/file"),
        ("unpack", "{out}/packed.tar", "{out}/taken"),
    ],
)  # fmt: skip
def test_a_path_that_cannot_be_written_is_wrong_use(
    store: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out = store.parent / "out"
    assert tell(store, ("pack", "{run}", "{out}/packed.tar"), capsys)[0] == 0
    (out / "file").write_text("")
    (out / "taken").mkdir()
    (out / "taken" / "run").write_text("")
    exit_code, printed = tell(store, command, capsys)
    assert exit_code == 1
    assert "\nhint: " in printed
