"""Weights & Biases: the id at W&B is derived from the run, so that all attempts continue the same curve, offline too.

Online, the server says which step is the last. Offline, each attempt writes its own folder, and `wandb sync` joins
these folders. Offline, the last step is the highest step in the folders on this machine and in the note that an
earlier attempt has left on the store.
"""

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal import Commit, now
from holdfast.journal.records import Record, Time, read_record
from holdfast.looking.sinks import Facts, Point, Sink
from holdfast.store.modules import python_command

NOTE = "sinks/wandb.json"
OFFLINE = ("offline", "dryrun")


class Position(Record):
    """``sinks/wandb.json``: the last step that an attempt has written to a folder of W&B's offline mode."""

    id: str
    step: int
    attempt: int
    created_at: Time


class Wandb(Sink):
    """A run at W&B. W&B can't delete steps, so steps up to the last step at W&B are not sent again."""

    hint = "wandb login, or WANDB_MODE=offline and later wandb sync"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._run: Any = None
        self._is_offline = wandb.setup().settings.mode in OFFLINE

    def open(self) -> None:
        if self._is_offline:  # create W&B's folder only at the first step, because many attempts have no step to write
            self.step = max(self._read_note(), self._read_folders())
            return
        self._begin()
        self.step = self._run.step - 1 if self._run.resumed else 0

    def _begin(self) -> None:
        facts = self.facts
        facts.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=facts.project, id=facts.id, name=facts.run, resume="allow", dir=facts.folder, config=facts.settings,
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True,
                x_disable_stats=True, x_disable_meta=True,  # no system statistics, because this process doesn't train
            ),
        )  # fmt: skip

    def write(self, commit: Commit, points: Sequence[Point]) -> None:
        if self._run is None:
            self._begin()
        for point in points:
            self._run.log({**point.values, "_timestamp": point.time}, step=point.step, commit=True)
            if point.note:
                self._run.summary[f"attempts/{commit.attempt}"] = point.note

    def close(self, is_complete: bool) -> None:
        if self._run is None:
            return
        self._run.finish(exit_code=0 if is_complete else 1)
        self._run = None
        if self._is_offline:
            self._note()

    def _note(self) -> None:
        """Record on the store the last step that is durable in the offline folder."""
        facts = self.facts
        facts.journal.check_fence(facts.attempt)
        position = Position(id=facts.id, step=self.step, attempt=facts.attempt, created_at=now())
        facts.journal.store.replace(NOTE, position.to_bytes())

    def _read_note(self) -> int:
        with contextlib.suppress(NameMissing, RecordDamaged):  # if the record is damaged, steps may be sent twice
            position = read_record(self.facts.journal.store, Position, NOTE)
            return position.step if position.id == self.facts.id else 0
        return 0

    def _read_folders(self) -> int:
        """Return the last step in the newest folder on this machine that contains a step; 0 if no folder does."""
        paths = self.facts.folder.glob(f"wandb/*run-*-{self.facts.id}/run-{self.facts.id}.wandb")
        newest_first = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
        return next(filter(None, map(_read_last_step, newest_first)), 0)


def _read_last_step(path: Path) -> int:
    """Return the last step in a W&B file, read with W&B's own reader; 0 if it contains no step.

    A file that W&B couldn't finish is read as far as it goes. Its summary may be one step ahead of its steps.
    """
    command = python_command("-m", "wandb", "leet", "inspect", "--json", str(path))
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as reader:
        assert reader.stdout is not None
        for line in reader.stdout:
            last = line if '"type":"history"' in line else last
    return int(json.loads(last)["history"]["item"]["_step"]) if last else 0
