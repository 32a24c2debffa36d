"""Training scripts by other people's conventions: each trains under Holdfast with at most eight changed lines.

``before/`` has the scripts as their authors would write them, ``after/`` the same scripts with a run. Both print a line
of JSON for each step.
"""

import csv
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from holdfast.config import ChunkLength, Compute, Log, RunConfig
from holdfast.journal import Journal
from holdfast.proof.result import Proof
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, IS_SOAK, ROOT
from tests.support.converted import count_changed, find_pair
from tests.support.lives import Command, Lives, ranks_of

HERE = Path(__file__).parent
MOST_CHANGED_LINES = 8
STEPS = 60
KILLS = 3
# Steps of an epoch, where the script says it and not its loader.
EPOCHS = {
    "dcgan": 10, "ppo": 1, "distillation": 5, "moco": 5, "accelerate_script": 4, "lightning_gan": 6,
    "trainer_script": 5, "sft_script": 1,
}  # fmt: skip
# Scripts of examples/gallery, whose own test kills them.
GALLERY = {"language_model": 4, "diffusion": 6, "lightning_module": 2}
# Packages of extras, by the script that needs one, and modules that the packages import late.
NEEDED = {
    "lightning_module": "lightning", "lightning_gan": "lightning", "trainer_script": "transformers",
    "sft_script": "trl",
}  # fmt: skip
LATE = {
    "lightning": ["lightning"],
    "transformers": ["transformers.trainer", "transformers.models.bert.modeling_bert"],
    "trl": ["trl.trainer.sft_trainer", "transformers.models.llama.modeling_llama"],
}
# Scripts whose samples draw from the global generators: Holdfast seeds each batch by its number instead, so that
# neither loader workers nor a death change a sample.
DRAWS_IN_SAMPLES = {"moco"}
# Seconds for a whole script by itself, on a machine that is busy.
WITHIN_S = 300.0


@pytest.fixture
def ready(request: pytest.FixtureRequest, nursery: Lives) -> Lives:
    """Return the nursery, which has imported what the test's script needs."""
    parameters = request.node.callspec.params
    needed = NEEDED.get(parameters.get("name") or parameters["row"].name)
    for module in LATE.get(needed, []):
        nursery.load(module)
    return nursery


def mark(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a script's tests."""
    return [pytest.mark.extras(NEEDED[name])] if name in NEEDED else []


SCRIPTS = [pytest.param(name, marks=mark(name), id=name) for name in EPOCHS]


def test_every_script_has_both_versions() -> None:
    for folder in ("before", "after"):
        assert {path.stem for path in (HERE / folder).glob("[a-z]*.py")} == EPOCHS.keys()


@pytest.mark.parametrize("name", EPOCHS)
def test_at_most_eight_lines_are_changed(name: str) -> None:
    assert 0 < count_changed(*find_pair(name)) <= MOST_CHANGED_LINES


def make_config(folder: Path, name: str, **changes: Any) -> RunConfig:
    config: dict[str, Any] = {
        "recipe": f"{find_pair(name)[1]}:train", "run": name, "store": str(folder), "epochs": (EPOCHS | GALLERY)[name],
        "chunk": ChunkLength(steps=7), "log": Log(every=1, folder=str(folder / "logs")),
    }  # fmt: skip
    return RunConfig.model_validate(config | changes)


class Script:
    """One script under Holdfast, started as a command."""

    def __init__(self, nursery: Lives, folder: Path, name: str) -> None:
        self.name, self._nursery, self._folder = name, nursery, folder
        self.output = folder / "output"
        self._environment = {**os.environ, "OUTPUT": str(self.output)}
        folder.mkdir()
        self._config = folder / "config.toml"
        text = {"recipe": f"tests.foreign.after.{name}:train", "run": name, "store": str(folder)}
        lines = [f"{key} = {json.dumps(value)}" for key, value in text.items()]
        lines += [f"epochs = {EPOCHS[name]}", "[chunk]", "steps = 7", "[log]", "every = 1"]
        self._config.write_text("\n".join([*lines, f"folder = {json.dumps(str(folder / 'logs'))}"]))

    def start(self) -> Command:
        return self._nursery.start_command(
            "tests.support.forked:main", "train", str(self._config), environment=self._environment, folder=ROOT
        )

    def finish(self) -> str:
        """Train to the end; return the content id."""
        process = self.start()
        _, err = process.communicate(WITHIN_S)
        assert process.returncode == 0, err
        newest = self.journal.newest()
        assert newest is not None
        assert newest.step == STEPS
        return newest.checkpoint_sha256

    @property
    def journal(self) -> Journal:
        return Journal(open_store(str(self._folder)), self.name)

    def read_logged(self) -> set[frozenset[tuple[str, str]]]:
        """Return the rows that the script's CSVLogger has written in all its processes, without empty fields.

        A kill may have cut the last line of a file.
        """
        rows = set()
        for file in self.output.rglob("metrics.csv"):
            whole = [line for line in file.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
            rows |= {frozenset((key, value) for key, value in row.items() if value) for row in csv.DictReader(whole)}
        assert bool(rows) == (NEEDED.get(self.name) == "lightning")
        return rows

    def read_losses(self) -> list[dict[str, float]]:
        """Return the numbers that each step logged, from the trail of all commits."""
        lines = []
        for number in self.journal.numbers("commits"):
            commit = self.journal.read_commit(number)
            lines += map(json.loads, self.journal.store.read(f"metrics/{number:08d}.jsonl").splitlines())
            assert lines[-1]["step"] == commit.step
        return [{"loss": line["loss"], **line.get("logged", {})} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_and_stopped_it_ends_on_the_same_bytes(tmp_path: Path, ready: Lives, name: str) -> None:
    """Three times SIGKILL of the command and its ranks, then a SIGTERM in a chunk."""
    straight = Script(ready, tmp_path / "straight", name)
    content_id = straight.finish()
    killed = Script(ready, tmp_path / "killed", name)
    for kill in range(KILLS + 1):
        begun = killed.journal.attempts()
        process = killed.start()
        await_trained(killed, process, begun)
        if kill < KILLS:
            for each in [psutil.Process(process.pid), *ranks_of(process.pid)]:
                each.kill()
            process.communicate(COMMAND_WITHIN_S)
        else:
            process.send_signal(15)
            process.communicate(COMMAND_WITHIN_S)
            newest = killed.journal.newest()
            assert newest is not None
            assert killed.journal.endings()[-1].step == newest.step, killed.journal.endings()
            # In the middle of a chunk it saves; it may have come to the end of one just then.
            assert newest.why == "preempted" or newest.step % (STEPS // EPOCHS[name]) % 7 == 0
    assert killed.finish() == content_id
    assert killed.journal.attempts() > 1, "no kill came before the end"
    # What the script's own logger wrote: steps that were lost and trained again are there twice, and equal.
    logged, expected = killed.read_logged(), straight.read_logged()
    assert logged <= expected
    # CSVLogger empties its file and writes it anew when a column is added: a kill just then loses a life's rows.
    assert logged == expected or any(file.stat().st_size == 0 for file in killed.output.rglob("metrics.csv"))


def await_trained(script: Script, process: Command, begun: int) -> None:
    """Wait until the attempt after this one has committed steps of its own, or has ended."""
    deadline = time.monotonic() + WITHIN_S
    while process.poll() is None:
        newest = script.journal.newest()
        if newest is not None and newest.attempt > begun and newest.why != "adopted":
            return
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Scripts whose samples don't depend on the global generators.
ALONE = [each for each in SCRIPTS if each.id not in DRAWS_IN_SAMPLES]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE if IS_SOAK else ALONE[::2])
def test_its_losses_are_those_of_the_script_alone(tmp_path: Path, ready: Lives, name: str) -> None:
    output = {"OUTPUT": str(tmp_path / "output")}
    done = ready.call("tests.support.forked:run_script", str(HERE / "before" / f"{name}.py"), **output)
    assert done.returncode == 0, done.stderr
    alone = read_printed(done.stdout)
    assert [line.pop("step") for line in alone] == [*range(1, STEPS + 1)]
    script = Script(ready, tmp_path / "held", name)
    script.finish()
    # The trail has float32, as the tensors that the script printed.
    assert script.read_losses() == [{key: float32(value) for key, value in line.items()} for line in alone]


def read_printed(text: str) -> list[dict[str, float]]:
    """Return the numbers that a script has printed as JSON, together for each step."""
    steps: dict[int, dict[str, float]] = {}
    for line in text.splitlines():
        if line.startswith('{"step"'):
            numbers = json.loads(line)
            steps.setdefault(numbers["step"], {}).update(numbers)
    return list(steps.values())


def float32(value: float) -> float:
    return float(np.float32(value))


def prove(nursery: Lives, config: RunConfig, steps: int = 20) -> str:
    """Return the proof of a script as JSON, or its error."""
    settings, output = config.model_dump(mode="json"), {"OUTPUT": f"{config.store}/output"}
    done = nursery.call("tests.support.forked:prove_mutated", "", settings, steps, KILLS, 11, **output)
    assert done.stdout, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS if IS_SOAK else SCRIPTS[::2])
def test_it_is_proved(tmp_path: Path, ready: Lives, name: str) -> None:
    proof = Proof.model_validate_json(prove(ready, make_config(tmp_path, name)))
    assert proof.is_proved, str(proof)
    assert not proof.unchanged, str(proof)
    assert len(proof.kills) == KILLS


@dataclass(frozen=True)
class Forgotten:
    """An argument that is left out of a script's ``run.keep``.

    Args:
        named: the part of the proof that names it.
        steps: the steps of the proof, beyond the first that depends on it.
        is_read: whether a step depends on it; no byte differs otherwise.
    """

    name: str
    argument: str
    named: str
    steps: int = 20
    is_read: bool = True

    def __str__(self) -> str:
        return f"{self.name}-{self.argument}"


FORGOTTEN = [
    Forgotten("language_model", "optimizer", "optimizer (AdamW"),
    Forgotten("language_model", "carried", "optimizer.exp_avg"),
    Forgotten("accelerate_script", "lr_scheduler", "lr_scheduler (AcceleratedScheduler"),
    Forgotten("accelerate_script", "optimizer", "optimizer (AcceleratedOptimizer"),
    Forgotten("dcgan", "net_g", "net_g (train.<locals>.Generator"),
    Forgotten("dcgan", "optimizer_d", "optimizer_d (Adam"),
    Forgotten("diffusion", "ema", "ema (EMA", is_read=False),
    Forgotten("diffusion", "lr_scheduler", "lr_scheduler (LambdaLR"),
    Forgotten("distillation", "student", "student (StudentNet"),
    Forgotten("distillation", "scheduler", "scheduler (StepLR", steps=40),
    Forgotten("moco", "model", "model (MoCo"),
    Forgotten("ppo", "envs", "extras.next_obs"),
    Forgotten("ppo", "next_obs", "extras.0.envs"),
    Forgotten("lightning_module", "recent", "module.recent (deque"),
    Forgotten("lightning_gan", "pool", "gan.pool (list"),
    Forgotten("trainer_script", "collator", "collator.random (Random"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=mark(row.name), id=f"{row.name}-{row.argument}")
        for row in (FORGOTTEN if IS_SOAK else FORGOTTEN[::3])
    ],
)
def test_what_is_left_out_is_found(tmp_path: Path, ready: Lives, row: Forgotten) -> None:
    text = find_pair(row.name)[1].read_text("utf-8")
    changed, count = re.subn(rf"(run\.keep\(.*?)\b{row.argument}=[\w.]+(\(\w+\))?(, )?", r"\1", text)
    assert count == 1
    (tmp_path / "forgetful.py").write_text(changed, "utf-8")
    config = make_config(tmp_path, row.name, recipe=f"{tmp_path}/forgetful.py:train")
    found = prove(ready, config, row.steps)
    proof = Proof.model_validate_json(found) if found.startswith("{") else None
    assert (proof is None or not proof.is_proved) == row.is_read
    assert row.named in (found if proof is None else str(proof))


def test_the_file_of_faults_has_a_row_for_each() -> None:
    table = (ROOT / "docs" / "data" / "faults.csv").read_text("utf-8").splitlines()
    assert [row for row in FORGOTTEN if f"{row.name} without {row.argument},prove,{row.named}" not in table] == []


@pytest.mark.slow
def test_a_script_that_makes_its_own_process_group_is_told_what_to_do(tmp_path: Path, nursery: Lives) -> None:
    config = make_config(tmp_path, "language_model", compute=Compute(ranks=2, device="cpu"))
    done = nursery.call("tests.support.forked:train_chunks", config.model_dump(mode="json"), 1)
    error = json.loads(done.stdout.splitlines()[-1])
    line = next(
        number for number, text in enumerate(find_pair("language_model")[1].read_text("utf-8").splitlines(), 1)
        if text.lstrip().startswith("init_process_group(")
    )  # fmt: skip
    assert f"language_model.py:{line}: " in error["message"]
    assert "run.accelerator.prepare(model)" in error["hint"]
