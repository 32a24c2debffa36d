"""Tests of ``holdfast diff``: the changes, and whether a run would go on with a configuration."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt.lineage import Past, Present, judge_drift
from holdfast.cli import app, run_app
from holdfast.config import load_config
from holdfast.errors import ConfigDrift, ConfigError
from holdfast.journal import Journal
from holdfast.proof.differences import gives_others
from holdfast.provenance.changes import Change, find_defaults, to_lineage
from holdfast.provenance.opened_files import describe_file
from holdfast.provenance.sources import hash_sources
from holdfast.recipe.function import default_settings, find_program
from holdfast.recipe.settings import resolve_settings
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S
from tests.support.makers import make_commit, publish, save

RECIPE = """\
import diff_layers
print("imported")

def build(lr: float = 0.05, hidden: int = 64) -> "Recipe":
    return None
"""
CONFIG = """\
recipe = "diff_recipe:build"
run = "a"
store = "runs"
epochs = 2
[settings]
lr = 0.1
"""
DATA = {"sha256": "d" * 64, "samples": 64}
NOT_COMPARED = (
    "note: not compared: the machine, and the values that the recipe builds; they are known only when training starts"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a recipe and its configuration in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    write_recipe(tmp_path, RECIPE)
    write_recipe(tmp_path, "layers = 1\n", "diff_layers")
    (tmp_path / "a.toml").write_text(CONFIG)
    return tmp_path


def write_recipe(folder: Path, text: str, module: str = "diff_recipe") -> None:
    """Write a module, and let the next import read it, as in a new process."""
    (folder / f"{module}.py").write_text(text)
    importlib.invalidate_caches()
    sys.modules.pop(module, None)


def describe(path: Path) -> Present:
    """Return the identity, defaults and code with which an attempt with this configuration would train."""
    config = load_config(path)
    builder = find_program(config.recipe)
    identity = config.identity | {"settings": resolve_settings(builder, config.settings), "data": DATA}
    of_recipe = {f"settings.{name}": default for name, default in default_settings(config.recipe).items()}
    sources = hash_sources(["diff_recipe", "diff_layers"])
    return Present(identity, find_defaults() | of_recipe, {"sources": sources})


def begin_attempt(path: Path, why: str = "fresh", **lineage: Any) -> tuple[Journal, str]:
    """Claim the run as an attempt with this configuration. Return the journal and the fingerprint."""
    config, present = load_config(path), describe(path)
    journal = Journal(open_store(str(path.parent / config.store)), config.run)
    journal.begin(config.recipe)
    journal.claim_attempt(journal.attempts() + 1, why, "host", 1, present.environment, lineage)
    journal.record_config(present.fingerprint, present.identity, config.model_dump(mode="json"))
    return journal, present.fingerprint


@pytest.fixture
def run(folder: Path) -> str:
    """Return a run with one commit, by an attempt with the configuration."""
    journal, sha256 = begin_attempt(folder / "a.toml")
    saved = save(journal.store, 10, environment=describe(folder / "a.toml").environment)
    publish(journal, make_commit(1, path=saved.path, config_fingerprint=sha256))
    return f"{folder}/runs/a"


def change_config(folder: Path, old: str, new: str) -> None:
    text = (folder / "a.toml").read_text()
    assert old in text
    (folder / "a.toml").write_text(text.replace(old, new))


def ask(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> list[str]:
    """Run the command and return its output, line by line."""
    capsys.readouterr()
    assert run_app(app, ["diff", *arguments]) == exit_code
    return capsys.readouterr().out.splitlines()


def ask_json(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> Any:
    return json.loads("\n".join(ask(capsys, *arguments, "--json", exit_code=exit_code)))


# ---- a configuration


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lr = 0.1", "lr = 0.1", False),
        ("lr = 0.1", "lr = 0.2", True),
        ("lr = 0.1", "", True),  # the recipe's default may be another
        ("lr = 0.1", "lr = 0.1\nhidden = 64", True),  # or the same
        ("epochs = 2", "epochs = 9\nretention.keep_last = 1", False),
        ("epochs = 2", "epochs = 2\ncompute.ranks = 2", False),
        ("epochs = 2", "epochs = 2\nseed = 7", True),
        ("epochs = 2", 'epochs = 2\nseed = 7\nresume.accept_drift = ["seed"]', False),
    ],
)
def test_settings_that_an_attempt_has_to_judge_are_found_without_the_recipe(
    run: str, folder: Path, old: str, new: str, expected: bool
) -> None:
    write_recipe(folder, "raise ImportError")
    change_config(folder, old, new)
    journal = Journal(open_store(f"{folder}/runs"), "a")
    assert gives_others(journal, load_config("a.toml")) == expected


def test_settings_that_are_not_on_record_are_others(run: str, folder: Path) -> None:
    journal = Journal(open_store(f"{folder}/runs"), "a")
    shutil.rmtree(folder / "runs" / "a" / "configs")
    assert gives_others(journal, load_config("a.toml"))
    assert not gives_others(Journal(open_store(f"{folder}/runs"), "new"), load_config("a.toml"))


def test_the_same_configuration_changes_nothing(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules.pop("diff_recipe")  # the recipe prints when it is imported; this is not part of diff's output
    assert ask(capsys, run, "a.toml") == [NOT_COMPARED, "run a would continue with a.toml, which changes nothing"]
    sys.modules.pop("diff_recipe")
    shown = ask_json(capsys, run, "a.toml")
    assert (shown["run"], shown["config"], shown["is_refused"], shown["rows"]) == ("a", "a.toml", False, [])


def test_every_change_is_shown_with_its_class_and_its_outcome(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(folder, RECIPE.replace("hidden: int = 64", "width: int = 64, label_smoothing: float = 0.0"))
    change_config(folder, "epochs = 2", f'epochs = 4\nseed = 7\nlog.folder = "{folder}/elsewhere"')
    change_config(folder, "lr = 0.1", "lr = 0.2")
    lines = ask(capsys, run, "a.toml", exit_code=1)
    assert lines == [
        "refused        identity     seed: saved 1234, now 7",
        "refused        identity     settings.lr: saved 0.1, now 0.2",
        "refused        identity     settings.width: was settings.hidden, same value 64",
        "refused        code         sources.diff_recipe: its code has changed",
        "let through    schedule     epochs: saved 2, now 4",
        "let through    identity     settings.label_smoothing: new, with its default 0.0",
        f"needs nothing  operational  log.folder: saved 'logs', now '{folder}/elsewhere'",
        NOT_COMPARED,
        "run a would refuse to continue with a.toml",
        lines[-1],
    ]
    assert lines[-1].startswith("hint: put the saved values and code back, ")

    change_config(folder, "[settings]", "[resume]\naccept_drift = ['settings', 'seed', 'sources']\n[settings]")
    lines = ask(capsys, run, "a.toml")
    assert [line[:13].strip() for line in lines[:8]] == ["let through"] * 6 + ["needs nothing"] * 2
    assert lines[8:] == [NOT_COMPARED, "run a would continue with a.toml"]


def test_json_has_what_is_printed(run: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(folder, "lr = 0.1", "lr = 0.2")
    change_config(folder, "epochs = 2", "epochs = 3")
    shown = ask_json(capsys, run, "a.toml", exit_code=1)
    assert shown["rows"] == [
        {
            "outcome": outcome, "class": cls, "name": name, "kind": "value", "saved": saved, "now": current,
            "was": "", "default": False,
        }
        for outcome, cls, name, saved, current in [
            ("refused", "identity", "settings.lr", 0.1, 0.2), ("let through", "schedule", "epochs", 2, 3),
        ]
    ]  # fmt: skip
    assert shown["is_refused"]
    assert "resume.accept_drift=" in shown["hint"]
    assert [f"note: {note}" for note in shown["notes"]] == [NOT_COMPARED]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epochs = 2", 'log.folder = "/somewhere/else"\nepochs = 2'),
        ("epochs = 2", "chunk.steps = 3\nretention.keep_last = 9\ncheckpoint.read_back_every = 1\nepochs = 2"),
        ("epochs = 2", "epochs = 9"),
        ("lr = 0.1", "lr = 0.1\nhidden = 64"),
    ],
)
def test_changes_outside_of_the_identity_are_never_refused(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    change_config(folder, old, new)
    assert "identity" not in "".join(ask(capsys, run, "a.toml"))


def test_a_setting_with_its_default_is_the_setting_left_out(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(folder, "lr = 0.1", "")
    assert ask(capsys, run, "a.toml", exit_code=1)[0].endswith("settings.lr: saved 0.1, now 0.05")


def test_an_infinite_setting_is_refused_since_no_record_can_hold_it(folder: Path) -> None:
    change_config(folder, "lr = 0.1", "lr = inf")
    with pytest.raises(ConfigError, match=r"settings.lr: expected a finite number"):
        load_config(folder / "a.toml")


def test_fields_that_came_with_an_upgrade_are_let_through(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, present = load_config(folder / "a.toml"), describe(folder / "a.toml")
    del present.identity["determinism"]["threads"]
    journal = Journal(open_store("runs"), "a")
    journal.begin(config.recipe)
    journal.record_config(present.fingerprint, present.identity, config.model_dump(mode="json", exclude={"checkpoint"}))
    publish(journal, make_commit(1, config_fingerprint=present.fingerprint))
    first, *others = ask(capsys, "runs/a", "a.toml")
    assert first == "let through    identity     determinism.threads: new, with its default 1"
    assert "checkpoint" not in "".join(others)


def test_settings_outside_of_the_identity_are_compared_with_the_snapshot(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(folder, "epochs = 2", "epochs = 4")
    begin_attempt(folder / "a.toml", "extended")
    assert "changes nothing" in ask(capsys, run, "a.toml")[-1]


def test_neither_time_nor_comment_of_a_source_is_a_change(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(folder / "diff_recipe.py", (1, 1))
    assert "changes nothing" in ask(capsys, run, "a.toml")[-1]
    write_recipe(folder, "# explained\n" + RECIPE)
    assert "changes nothing" in ask(capsys, run, "a.toml")[-1]
    write_recipe(folder, RECIPE.replace("return None", "return 0"))
    assert ask(capsys, run, "a.toml", exit_code=1)[0].split()[:3] == ["refused", "code", "sources.diff_recipe:"]


def test_other_modules_of_the_recipe_are_compared_loaded_or_not(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(folder, "layers = 2\n", "diff_layers")
    write_recipe(folder, RECIPE)
    assert "sources.diff_layers: its code" in ask(capsys, run, "a.toml", exit_code=1)[0]
    sys.modules.pop("diff_layers")
    write_recipe(folder, RECIPE.replace("import diff_layers", ""))
    lines = ask(capsys, run, "a.toml", exit_code=1)
    assert lines[0].endswith("sources.diff_layers: its code has changed")
    assert lines[1].endswith("sources.diff_recipe: its code has changed")
    (folder / "diff_layers.py").unlink()
    importlib.invalidate_caches()
    assert "no longer among the sources" in ask(capsys, run, "a.toml", exit_code=1)[0]


def test_files_and_packages_are_compared_as_far_as_they_are_found(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data.bin").write_bytes(b"one")
    entry = describe_file(folder / "data.bin")
    record = describe(folder / "a.toml").environment | {
        "files": {"data.bin": entry, "gone/data.bin": entry},
        "packages": {"pydantic": "1.0", "no-such-package": "1.0"},
        "holdfast": "0.0.1 (abc)",
        "built": {"clip_norm": 1.0},
    }
    record["sources"] = record["sources"] | {"shared/kernel.h": "0" * 64}
    journal = Journal(open_store("runs"), "a")
    saved = save(journal.store, 20, environment=record)
    first = journal.newest()
    assert first
    publish(journal, make_commit(2, path=saved.path, config_fingerprint=first.config_fingerprint))
    lines = ask(capsys, run, "a.toml")
    assert [line[:60].split("  ")[0] for line in lines[:3]] == ["let through"] * 3
    assert [line.partition("package      ")[2].partition(":")[0] for line in lines[:3]] == [
        "holdfast", "packages.no-such-package", "packages.pydantic",
    ]  # fmt: skip
    assert lines[4] == "note: not compared, because these files aren't found from here: gone/data.bin, shared/kernel.h"
    (folder / "data.bin").write_bytes(b"two")
    lines = ask(capsys, run, "a.toml", exit_code=1)
    assert lines[0] == "refused        data         files.data.bin: its content has changed"


@pytest.mark.parametrize("accept", [[], ["lr"], ["sources"], ["lr", "sources"], ["settings.hidden", "lr", "sources"]])
@pytest.mark.parametrize(
    "recipe", [RECIPE, RECIPE.replace("hidden", "width"), RECIPE.replace("64", "32"), "# \n" + RECIPE]
)
@pytest.mark.parametrize("lr", ["0.1", "0.2"])
def test_diff_and_resume_refuse_the_same_changes(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str], lr: str, recipe: str, accept: list[str]
) -> None:
    write_recipe(folder, recipe)
    change_config(folder, "[settings]\nlr = 0.1", f"[resume]\naccept_drift = {accept}\n[settings]\nlr = {lr}")
    journal = Journal(open_store("runs"), "a")
    newest = journal.newest()
    assert newest
    refused, hint = [], ""
    try:
        past, config = Past.read(journal, newest), load_config("a.toml")
        judge_drift(past, describe(folder / "a.toml"), config, journal.read_epochs())
    except ConfigDrift as error:
        refused, hint = sorted(error.data["fields"]), error.hint
    shown = ask_json(capsys, run, "a.toml", exit_code=1 if refused else 0)
    assert [row["name"] for row in shown["rows"] if row["outcome"] == "refused"] == refused
    assert (shown["is_refused"], shown["hint"]) == (bool(refused), hint)


def test_settings_are_compared_with_those_of_the_newest_commit(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "a.toml").read_text()
    change_config(folder, "lr = 0.1", "lr = 0.2")
    begin_attempt(folder / "a.toml", "continued")  # this attempt died before its first commit
    assert ask(capsys, run, "a.toml", exit_code=1)[0].endswith("settings.lr: saved 0.1, now 0.2")
    (folder / "a.toml").write_text(text)
    assert "changes nothing" in ask(capsys, run, "a.toml")[-1]


def test_code_is_compared_with_that_of_the_attempt_that_trained(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained_with = describe(folder / "a.toml").environment
    write_recipe(folder, RECIPE.replace("return None", "return 0"))
    journal, sha256 = begin_attempt(folder / "a.toml", "continued")
    saved = save(journal.store, 20, environment=trained_with)
    publish(journal, make_commit(2, attempt=2, path=saved.path, config_fingerprint=sha256))
    assert "its code has changed" in ask(capsys, run, "a.toml", exit_code=1)[0]
    write_recipe(folder, RECIPE)
    assert "changes nothing" in ask(capsys, run, "a.toml")[-1]


def test_code_without_a_record_is_not_compared(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(run, "epoch-0001/metadata.json").unlink()
    lines = ask(capsys, run, "a.toml")
    assert "note: the code isn't compared: the run has no record of its code" in lines
    assert "sources" not in "".join(lines)


def test_a_run_that_has_committed_nothing_refuses_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin_attempt(folder / "a.toml")
    change_config(folder, "lr = 0.1", "lr = 0.2")
    assert ask(capsys, "runs/a", "a.toml") == [
        "needs nothing  identity     settings.lr: saved 0.1, now 0.2",
        "note: nothing is committed: with any settings, training begins with step 0",
        "run a would continue with a.toml",
    ]


@pytest.mark.parametrize(("old", "new"), [('run = "a"', 'run = "b"'), ('store = "runs"', 'store = "moved"')])
def test_a_note_says_that_a_configuration_belongs_to_another_run(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    change_config(folder, old, new)
    config = load_config(folder / "a.toml")
    lines = ask(capsys, run, "a.toml")
    assert lines[0].startswith("needs nothing  operational ")
    place = f"{folder}/{config.store}/{config.run}"
    assert f"note: the configuration trains the run in {place}, not the run in {folder}/runs/a" in lines


def test_init_from_changes_only_with_its_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commit that init_from found when the run began is part of its identity, though the file doesn't name it."""
    change_config(folder, "[settings]", 'init_from = { run = "elder" }\n[settings]')
    present, config = describe(folder / "a.toml"), load_config(folder / "a.toml")
    present.identity["init_from"] |= {"commit": 3, "checkpoint_sha256": "e" * 64}
    journal = Journal(open_store("runs"), "a")
    journal.begin(config.recipe)
    journal.record_config(present.fingerprint, present.identity, config.model_dump(mode="json"))
    publish(journal, make_commit(1, config_fingerprint=present.fingerprint))
    assert "changes nothing" in ask(capsys, "runs/a", "a.toml")[-1]
    change_config(folder, 'run = "elder"', 'run = "elder", load_optimizer = true')
    (row, *_) = ask(capsys, "runs/a", "a.toml", exit_code=1)
    assert row.endswith("identity     init_from.load_optimizer: saved False, now True")


# ---- a run's own life


def test_a_life_without_a_change(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    (attempt, last) = ask(capsys, run)
    assert attempt.startswith("attempt 1  20")
    assert attempt.endswith("  fresh")
    assert last == "nothing that changes the mathematics has changed"


def test_a_life_lists_the_changes_that_each_attempt_let_through(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drift = to_lineage([Change(name="settings.lr", kind="value", saved=0.1, current=0.2)])
    begin_attempt(folder / "a.toml", "continued", drift=drift, continues={"commit": 1})
    begin_attempt(folder / "a.toml", "preempted", continues={"commit": 1})
    lines = ask(capsys, run)
    assert [line.split()[-1] for line in lines if line.startswith("attempt")] == ["fresh", "continued", "preempted"]
    assert [line for line in lines if not line.startswith("attempt")] == ["  settings.lr: saved 0.1, now 0.2"]
    assert lines[2] == "  settings.lr: saved 0.1, now 0.2"
    shown = ask_json(capsys, run)
    assert [(each["number"], each["why"], each["changes"]) for each in shown["attempts"]] == [
        (1, "fresh", {}), (2, "continued", drift), (3, "preempted", {}),
    ]  # fmt: skip


def test_a_life_without_lineages_is_computed_from_the_records(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_attempt(folder / "a.toml", "continued")
    change_config(folder, "lr = 0.1", "lr = 0.2")
    journal, sha256 = begin_attempt(folder / "a.toml", "continued")
    publish(journal, make_commit(2, attempt=3, config_fingerprint=sha256))
    write_recipe(folder, RECIPE.replace("return None", "return 0"))
    begin_attempt(folder / "a.toml", "continued")
    change_config(folder, "lr = 0.2", "lr = 0.3")
    begin_attempt(folder / "a.toml", "continued")  # this attempt has no commit; its settings are in the snapshot
    Path(run, "attempts/00000002.json").write_text("damaged")
    assert [line.partition("  20")[0] for line in ask(capsys, run)] == [
        "attempt 1",
        "attempt 3",
        "  settings.lr: saved 0.1, now 0.2",
        "attempt 4",
        "  sources.diff_recipe: its code has changed",
        "attempt 5",
        "  settings.lr: saved 0.2, now 0.3",
    ]


def test_a_run_without_attempts_has_no_life(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(open_store("runs"), "begun").begin("m:f")
    assert ask(capsys, "runs/begun") == ["the run has no attempt yet"]
    assert ask_json(capsys, "runs/begun") == {"run": "begun", "attempts": []}


# ---- wrong use


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error"),
    [
        ([], 1, "RUN requires an argument"),
        (["runs/none"], 1, "there is no run 'none' in"),
        (["runs/a", "runs/none"], 1, "'runs/none' is not a .toml file"),
        (["runs/a", "none.toml"], 1, "there is no configuration none.toml"),
        (["runs/begun", "a.toml"], 1, "run 'begun' has no record of its settings"),
        (["runs/a", "typo.toml"], 1, "unknown key settings.hiden"),
        (["runs/a", "gone.toml"], 1, "recipe 'no_such:build': there is no module no_such"),
        (["runs/lost", "a.toml"], 2, "the settings that trained commit 1 are lost"),
    ],
)
def test_wrong_use_is_one_line(
    run: str, folder: Path, arguments: list[str], exit_code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Journal(open_store("runs"), "begun").begin("m:f")
    lost = Journal(open_store("runs"), "lost")
    lost.begin("m:f")
    publish(lost, make_commit(1))
    (folder / "typo.toml").write_text(CONFIG + "hiden = 1\n")
    (folder / "gone.toml").write_text(CONFIG.replace("diff_recipe", "no_such"))
    capsys.readouterr()
    assert run_app(app, ["diff", *arguments]) == exit_code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"error: {error}" in shown.err or error in shown.err.splitlines()[0]
    assert "Traceback" not in shown.err


def test_help_shows_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    usage, _, _ = "\n".join(ask(capsys, "--help")).partition("\n\n")
    assert " ".join(usage.split()) == "Usage: holdfast diff RUN [CONFIG.toml]"


def test_the_command_finds_a_recipe_in_the_working_directory(run: str, folder: Path) -> None:
    """A console script's sys.path begins with its own folder, that of ``python -m`` with the working directory."""
    program = "from holdfast.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "diff", run, "a.toml"],
        cwd=folder, capture_output=True, text=True, timeout=COMMAND_WITHIN_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "imported\n")
    assert "changes nothing" in done.stdout
