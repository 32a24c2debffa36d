"""Tests of the README and docs/: run each command that a page shows, in the page's order."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.cli import EXIT_CODES
from holdfast.config import load_config
from holdfast.errors import HoldfastError
from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support.lives import Command, Lives

PAGES = {path.name: path.read_text("utf-8") for path in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")}
PAGES["CONTRIBUTING.md"] = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
README = PAGES["README.md"]
# These pages continue with the README's model, in this order.
PAGES_OF_ONE_MODEL = ("README.md", "configuration.md", "operating.md", "goodput.md", "keeping.md", "storage.md")
# The lines of a proof that don't depend on the machine.
SAME_EVERYWHERE = ("proved:", "  settings", "  not reached the", "  not reached a run", "  again with")


def blocks(page: str, language: str) -> list[str]:
    """Split a page at its code fences: every second part is code."""
    inside = re.split(r"^```", PAGES[page], flags=re.M)[1::2]
    return [text for name, _, text in (part.partition("\n") for part in inside) if name == language]


def commands(page: str) -> list[list[str]]:
    """Return a page's commands that begin with .venv/bin. test_local tests make up and its processes."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(".venv/bin/")]


def run(command: list[str], folder: Path, api: dict[str, str], nursery: Lives | None = None, code: int = 0) -> str:
    """Run a page's command in a folder, assert its exit code, and return its output.

    Args:
        nursery: forks the command, which spares it and its ranks the imports; by default Python starts it.
    """
    is_ours, environment = command[0].endswith("holdfast"), os.environ | api
    done: subprocess.Popen[str] | Command
    if nursery is not None and (is_ours or command[2].startswith("flows.")):
        own = environment | {"PYTHONPATH": str(folder)}
        if is_ours:
            done = nursery.start_command("tests.support.forked:command", *command[1:], environment=own, folder=folder)
        else:
            done = nursery.start_flow(command[2], command[3:], own, folder)
        out, err = done.communicate(COMMAND_WITHIN_S)
    else:
        whole = [sys.executable, *(["-m", "holdfast.cli"] if is_ours else []), *command[1:]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(whole, cwd=folder, env=environment, text=True, **pipes) as done:  # type: ignore[call-overload]
            out, err = done.communicate(timeout=COMMAND_WITHIN_S)
    assert done.returncode == code, (command, out, err)
    return out


def test_every_page_with_commands_is_run() -> None:
    """No page has commands that the tests below don't run."""
    with_commands = {page for page in PAGES if commands(page)}
    others = {
        "adding-a-recipe.md",
        "adding-a-store.md",
        "cards.md",
        "concepts.md",
        "metrics.md",
        "moving-in.md",
        "lightning.md",
        "trainer.md",
        "your-own-loop.md",
    }
    assert with_commands == {*PAGES_OF_ONE_MODEL, *others}


def test_make_targets_exist() -> None:
    texts = [text for page, text in PAGES.items() if page != "messages.md"]  # has "make room", in English
    named = {target for text in texts for target in re.findall(r"(?:^|`|\$ )make ([a-z]+)", text, re.M)}
    assert named >= {"setup", "train", "test", "check", "soak", "bench", "docs", "up", "down"}
    for target in named:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_exit_codes_are_the_documented_ones() -> None:
    for code in (0, 1, 2, 3, 130, 143):
        assert re.search(rf"\b{code}\b", EXIT_CODES)
        assert re.search(rf"\b{code}\b", README.split("A command's exit code is")[1].split("\n\n")[0])
    assert HoldfastError.exit_code == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)  # some thirty commands take a minute on an idle machine
def test_the_readmes_own_model_in_twenty_lines(tmp_path: Path, prefect_api: dict[str, str], nursery: Lives) -> None:
    """Python starts the README's first command, as a reader's shell does; the nursery forks the others."""
    recipe, program = blocks("README.md", "python")
    (config,), (retention,) = blocks("README.md", "toml"), blocks("keeping.md", "toml")
    assert len([line for line in recipe.splitlines() if line]) <= 22
    (tmp_path / "my_model.py").write_text(recipe)
    (tmp_path / "my_model.toml").write_text(config)
    (tmp_path / "kept.toml").write_text(f"{config}\n{retention}")
    assert load_config(tmp_path / "kept.toml").retention.keep_best
    for number, command in enumerate(each for page in PAGES_OF_ONE_MODEL for each in commands(page)):
        said = run(command, tmp_path, prefect_api, nursery if number else None)
        if number == 1:
            assert "step 1240, epoch 20" in said
            accuracy = re.search(r"accuracy +([0-9.]+)", said)
            assert accuracy
            assert float(accuracy[1]) > 0.9
        if "prove" in command:
            (shown,) = [block for block in blocks("README.md", "") if block.startswith("proved:")]
            assert [line for line in shown.splitlines() if line.startswith(SAME_EVERYWHERE)] == [
                line for line in said.splitlines() if line.startswith(SAME_EVERYWHERE)
            ]
    assert Journal(open_store(str(tmp_path / "elsewhere")), "spirals").newest()
    assert run(["python", "-c", program], tmp_path, prefect_api) == "True\n"
    for page, name in (("concepts.md", "my_observer.py"), ("metrics.md", "my_sink.py")):
        (code, *_), (command,) = blocks(page, "python"), commands(page)
        (tmp_path / name).write_text(code)
        said = run(command, tmp_path, {})
        if page == "concepts.md":
            assert re.search(r"^62 .*\n(.*\n)*124 .*'accuracy': ", said, re.M)
    lines = (tmp_path / "spirals.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines] == [*range(1, 1241)]  # of all commits, before this sink too


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_recipe_step_by_step(tmp_path: Path, prefect_api: dict[str, str], nursery: Lives) -> None:
    (recipe, points, *tests), (config,) = blocks("adding-a-recipe.md", "python"), blocks("adding-a-recipe.md", "toml")
    (tmp_path / "my_average.py").write_text(recipe)
    for name, test in zip(("test_my_average.py", "test_my_observer.py"), tests, strict=True):
        (tmp_path / name).write_text(test)
    (tmp_path / "my_average.toml").write_text(config)
    for command in commands("adding-a-recipe.md"):
        said = run(command, tmp_path, prefect_api, nursery)
        assert "prove" not in command or said.startswith("proved: 12 steps of my_average:waves")
    (tmp_path / "my_points.py").write_text(points)
    (tmp_path / "my_points.toml").write_text(config.replace("my_average:waves", "my_points:points"))
    prove = [".venv/bin/holdfast", "prove", "my_points.toml", "--steps", "9", "--seed", "7"]
    said = run(prove, tmp_path, prefect_api, nursery)
    assert said.startswith("proved: 9 steps of my_points:points")


@pytest.mark.slow
def test_the_forgetful_recipe_is_told_what_it_forgets(tmp_path: Path, nursery: Lives) -> None:
    (recipe, *_), (config,) = blocks("adding-a-recipe.md", "python"), blocks("adding-a-recipe.md", "toml")
    (forgetful, count) = re.subn(r"^ *extras=.*\n", "", recipe, flags=re.M)
    assert count == 1
    (tmp_path / "my_average.py").write_text(forgetful)
    (tmp_path / "my_average.toml").write_text(config)
    (command,) = [each for each in commands("adding-a-recipe.md") if "prove" in each]
    said = run(command, tmp_path, {}, nursery)
    (shown,) = [block for block in blocks("adding-a-recipe.md", "") if "  not kept" in block]
    assert set(shown.splitlines()) <= set(said.replace(f"{tmp_path}/", "").splitlines())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_loop_step_by_step(tmp_path: Path, nursery: Lives) -> None:
    (loop, tests, shares), (config,) = blocks("your-own-loop.md", "python"), blocks("your-own-loop.md", "toml")
    (tmp_path / "my_loop.py").write_text(loop)
    (tmp_path / "test_my_loop.py").write_text(tests)
    (tmp_path / "my_shares.py").write_text(shares)
    (tmp_path / "my_loop.toml").write_text(config)
    for command in commands("your-own-loop.md"):
        said = run(command, tmp_path, {}, nursery)
        assert "prove" not in command or said.startswith(
            ("proved: 20 steps of my_loop.py", "proved: 12 steps of my_shares.py")
        )


@pytest.mark.slow
def test_the_forgetful_loop_is_told_what_it_forgets(tmp_path: Path, nursery: Lives) -> None:
    (loop, *_), (config,) = blocks("your-own-loop.md", "python"), blocks("your-own-loop.md", "toml")
    forgetful = loop.replace('state = {"best": float("inf")}', 'best = float("inf")').replace(", state=state", "")
    (tmp_path / "my_loop.py").write_text(forgetful.replace('state["best"]', "best"))
    (tmp_path / "my_loop.toml").write_text(config)
    command, _ = [each for each in commands("your-own-loop.md") if "prove" in each]
    said = run(command, tmp_path, {}, nursery)
    (shown,) = [block for block in blocks("your-own-loop.md", "") if "not kept  " in block]
    assert shown.strip().removeprefix("not kept").strip() in said.replace(f"{tmp_path}/", "/home/me/")


@pytest.mark.slow
def test_moving_in_step_by_step(tmp_path: Path, nursery: Lives) -> None:
    (script, _), (config,) = blocks("moving-in.md", "python"), blocks("moving-in.md", "toml")
    (tmp_path / "my_script.py").write_text(script)
    (tmp_path / "my_script.toml").write_text(config)
    said = [run(command, tmp_path, {}, nursery) for command in commands("moving-in.md")]
    assert said[1].startswith("run moved: commit 1, step 16 of 40\n")
    assert "imported from  " in said[3]


@pytest.mark.extras("lightning")
@pytest.mark.slow
def test_the_lightning_module_step_by_step(tmp_path: Path, nursery: Lives) -> None:
    nursery.load("lightning")
    (module, _), (config,) = blocks("lightning.md", "python"), blocks("lightning.md", "toml")
    (tmp_path / "my_module.py").write_text(module)
    (tmp_path / "my_module.toml").write_text(config)
    for command in commands("lightning.md"):
        said = run(command, tmp_path, {}, nursery)
        assert "prove" not in command or said.startswith("proved: 20 steps of my_module.py:train")


@pytest.mark.extras("transformers")
@pytest.mark.slow
def test_the_trainer_step_by_step(tmp_path: Path, nursery: Lives) -> None:
    (script, _), (config,) = blocks("trainer.md", "python"), blocks("trainer.md", "toml")
    (tmp_path / "my_trainer.py").write_text(script)
    (tmp_path / "my_trainer.toml").write_text(config)
    for command in commands("trainer.md"):
        said = run(command, tmp_path, {}, nursery)
        assert "prove" not in command or said.startswith("proved: 20 steps of my_trainer.py:train")
    exported, saved = (load_file(tmp_path / folder / "model.safetensors") for folder in ("counts", "out"))
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], value) for name, value in saved.items())
    config = json.loads((tmp_path / "counts" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]


@pytest.mark.extras("pyspiel")
@pytest.mark.slow
def test_the_cards_step_by_step(tmp_path: Path, prefect_api: dict[str, str], nursery: Lives) -> None:
    """The policy learns: NashConv is 0.917 for a policy that knows nothing, and 0.10 where the page was written."""
    nursery.load("examples.cards")
    config = Path("examples", "cards", "cards.toml")
    (tmp_path / config).parent.mkdir(parents=True)
    (tmp_path / config).write_text((ROOT / config).read_text("utf-8"))
    train, prove = (run(command, tmp_path, prefect_api, nursery) for command in commands("cards.md"))
    nash_conv = re.search(r"nash conv +([0-9.]+)", train)
    assert nash_conv
    assert float(nash_conv[1]) < 0.2
    assert prove.startswith("proved: 24 steps of examples.cards:cards")


@pytest.mark.slow
def test_the_store_step_by_step(tmp_path: Path) -> None:
    store, tests = blocks("adding-a-store.md", "python")
    (tmp_path / "my_store.py").write_text(store)
    (tmp_path / "test_my_store.py").write_text(tests)
    (recipe, _), (config,) = blocks("README.md", "python"), blocks("README.md", "toml")
    (tmp_path / "my_model.py").write_text(recipe)
    (tmp_path / "my_model.toml").write_text(config.replace("epochs = 20", "epochs = 2"))
    (allowed,) = re.findall(r"^export (\w+)=(.*)$", PAGES["adding-a-store.md"], re.M)
    suite, *others = commands("adding-a-store.md")
    assert re.search(r"[5-9]\d passed", run(suite, tmp_path, {}))
    train, verify, doctor = (run(command, tmp_path, dict([allowed])) for command in others)
    assert "run spirals is complete: step 124" in train
    assert ", 0 problems" in verify
    assert "a run can use my_store:SqliteStore://runs.db" in doctor
    run(others[1], tmp_path, {}, code=1)  # where no list allows it
