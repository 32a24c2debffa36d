"""A run whose ranks another launcher starts: torchrun, accelerate launch or srun, with processes that can be killed."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support.processes import command_of, variables_of

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ACCELERATE = (
    sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2",
    "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
)  # fmt: skip
SCRIPT = """\
import holdfast

if __name__ == "__main__":
    holdfast.attach("me.toml")
"""
# Every process that a launcher starts has it, the attempt included.
MARK = "TOY_LAUNCHED"
EPOCHS, STEPS_PER_EPOCH = 10, 16


@dataclass
class Launched:
    """A run in a folder, and the launchers that have been started for it.

    Attributes:
        settings: the lines of the configuration beside those that every run has.
    """

    folder: Path
    settings: Sequence[str] = ('recipe = "tests.support.failing:failing"',)
    script: str = SCRIPT
    epochs: int = EPOCHS
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        lines = [
            'run = "r"', f"epochs = {self.epochs}", "chunk.steps = 16", 'compute.device = "cpu"', "log.every = 1",
            *self.settings,
        ]  # fmt: skip
        (self.folder / "me.toml").write_text("\n".join(lines))
        (self.folder / "train_me.py").write_text(self.script)

    @property
    def journal(self) -> Journal:
        return Journal(open_store(str(self.folder / "runs")), "r")

    def start(self, *command: str) -> "subprocess.Popen[bytes]":
        """Start a command in the folder, in a session of its own; its output goes to a file."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), MARK: str(self.folder)}
        with (self.folder / f"out{len(self.started)}").open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=self.folder, env=environment, start_new_session=True
            )
        self.started.append(process)
        return process

    def run(self, *command: str) -> int:
        """Run a command to its end, and that of all processes that it has started; return its exit code."""
        code = self.start(*command).wait(COMMAND_WITHIN_S)
        self.await_end()
        return code

    def said(self, number: int = -1) -> str:
        """Return what a command has printed; by default the last one."""
        return (self.folder / f"out{number % len(self.started)}").read_text()

    def find(self) -> dict[str, psutil.Process]:
        """Return the processes of the run that live: ``attempt``, ``0``, ``1``, and others by their command lines."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = variables_of(process)
                if variables.get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found[_name(command_of(process), variables)] = process
        return found

    def await_step(self, step: int) -> None:
        """Wait until the run has a commit at this step, or later."""
        self._wait(lambda: self.step() >= step)

    def await_process(self, name: str) -> None:
        """Wait until the run has a process of this name; see `find`."""
        self._wait(lambda: name in self.find())

    def await_end(self) -> None:
        """Wait until no process of the run is left."""
        self._wait(lambda: not self.find())

    def step(self) -> int:
        """Return the step of the newest commit; 0 if there is none."""
        newest = self.journal.newest()
        return newest.step if newest else 0

    def content_id(self) -> str:
        """Return the content id of the newest commit."""
        newest = self.journal.newest()
        return newest.checkpoint_sha256 if newest else ""

    def endings(self) -> list[str]:
        """Return the reason why each attempt has ended; "" if that is not on record."""
        records = [self.journal.read_ending(number + 1) for number in range(self.journal.attempts())]
        return [record.reason if record else "" for record in records]

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + COMMAND_WITHIN_S
        while not is_done():
            assert time.monotonic() < deadline, json.dumps([self.said(), [*self.find()]])
            time.sleep(0.1)

    def kill_all(self) -> None:
        """Kill every process of the run that is left."""
        for process in self.find().values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for started in self.started:
            started.wait(COMMAND_WITHIN_S)


def _name(words: Sequence[str], variables: dict[str, str]) -> str:
    if "holdfast.attempt.beside" in words:
        return "attempt"
    rank = variables.get("RANK", "")
    return rank if "holdfast.rank" in words and rank else f"{rank} {' '.join(words)}"
