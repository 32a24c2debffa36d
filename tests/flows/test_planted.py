"""No command opens, imports, connects to or executes what only a run's records name.

Each case plants the word in fields of the records, with consistent hashes, and watches the command's process and its
ranks with an audit hook of Python.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import COMMAND_WITHIN_S, IS_SOAK, Engine
from tests.support.forging import forge, plant
from tests.support.lives import Lives

pytestmark = pytest.mark.slow

WORD = "planted_word"
HOST = f"{WORD}.invalid:7"
TRAINING = (["audit"], ["evaluate"], ["explain", "3"], ["compare", "--replay"])
READING = (
    ["show"], ["verify"], ["report", "-o", "page.html"], ["prune", "--dry-run"], ["goodput"], ["diff"], ["plan"],
    ["export", "-o", "exported"], ["pack", "packed.tar"], ["compare"],
)  # fmt: skip
# Fields that decide what is trained: each of them is refused.
DECIDING: tuple[dict[str, Any], ...] = (
    {"settings.data": f"PLACE/{WORD}/data.txt"},
    {"settings.data": f"reference://*::file://PLACE/{WORD}/data.txt"},
    {"settings.data": f"http://{HOST}/x"},
    {"settings.data": f"s3://{WORD}/x"},
    {"settings.data": f"{WORD}:Evil"},
    {"settings.data": {f"PLACE/{WORD}/data.txt": 1}},
    {"init_from": {"run": f"PLACE/{WORD}"}},
    {"init_from": {"run": f"s3://{WORD}/x"}},
    {"recipe": f"{WORD}:toy"},
    {"recipe": f"PLACE/{WORD}/{WORD}.py:toy"},
)
# Fields that only an attempt reads: a command leaves them out, and succeeds.
OPERATIONAL: dict[str, Any] = {
    "store": f"PLACE/{WORD}", "signing_key": f"PLACE/{WORD}/data.txt", "near.folder": f"PLACE/{WORD}",
    "log.folder": f"PLACE/{WORD}", "log.sinks": [f"{WORD}:Evil"], "log.observers": [f"{WORD}:Evil"],
    "log.metrics": f"otlp:http://{HOST}", "resume.trusted_keys": [f"PLACE/{WORD}/data.txt"],
    "resume.drain_file": f"PLACE/{WORD}/data.txt", "compute.rendezvous": HOST,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Path:
    """Return a finished run of two commits."""
    engine = Engine(tmp_path_factory.mktemp("planted"), {}, nursery=nursery)
    engine.finish("epochs=2", "chunk.steps=10", "retention.keep_last=99")
    return engine.run_folder


class Planted:
    """A copy of the run in a project, and things beside the project that must not be touched."""

    def __init__(self, run: Path, folder: Path, nursery: Lives) -> None:
        self._place, self._mark, self._nursery = folder, folder / "mark", nursery
        self.project = folder / "project"
        self.run = shutil.copytree(run, self.project / "copies" / "toy")
        plant(folder / WORD, folder / "executed", WORD)
        (folder / WORD / "data.txt").write_text("a secret")

    def forge(self, fields: Mapping[str, Any]) -> None:
        forge(self.run, json.loads(json.dumps(fields).replace("PLACE", str(self._place))))

    def call(self, command: list[str], *options: str) -> tuple[int, str]:
        """Call a command in the project. Return its exit code, and what was touched."""
        name, *others = command
        runs = [str(self.run)] * (2 if name == "compare" else 1)
        arguments = [WORD, str(self._mark), name, *runs, *others, *options]
        process = self._nursery.start_command(
            "tests.support.forked:watched", *arguments, environment=dict(os.environ), folder=self.project
        )
        _, err = process.communicate(timeout=COMMAND_WITHIN_S)
        assert "Traceback" not in err, err
        return process.returncode or 0, self._mark.read_text("utf-8")


@pytest.fixture
def planted(run: Path, tmp_path: Path, nursery: Lives) -> Planted:
    return Planted(run, tmp_path, nursery)


@pytest.mark.parametrize("fields", DECIDING if IS_SOAK else DECIDING[::3], ids=str)
def test_no_command_touches_what_decides_the_training_in_a_record(planted: Planted, fields: dict[str, Any]) -> None:
    planted.forge(fields)
    for command in TRAINING if IS_SOAK else TRAINING[::2]:
        assert planted.call(command) == (1, ""), command
    for command in READING if IS_SOAK else ():
        assert planted.call(command)[1] == "", command


def test_no_command_touches_what_only_an_attempt_reads(planted: Planted) -> None:
    planted.forge(OPERATIONAL)
    for command in TRAINING if IS_SOAK else TRAINING[:1]:
        assert planted.call(command) == (0, ""), command
    for command in READING:
        assert planted.call(command)[1] == "", command


def test_no_rank_reads_the_files_in_a_checkpoints_record_of_code(planted: Planted) -> None:
    for path in planted.run.glob("*/metadata.json"):
        metadata = json.loads(path.read_bytes())
        for name in (f"../../../{WORD}/data.txt", str(planted.project.parent / WORD / "data.txt")):
            metadata["environment"]["sources"][name] = metadata["environment"]["files"][name] = "0" * 64
        path.write_text(json.dumps(metadata))
    for command in (["evaluate"], ["diff"]):
        assert planted.call(command)[1] == "", command
