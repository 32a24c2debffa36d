"""A long run without training, on a disk: records and trails of any number of commits and steps, written in seconds."""

import json
import math
import random
from pathlib import Path
from typing import Any

from holdfast.journal import Commit, FileRecord, Journal, Record, metrics_name, record_name
from holdfast.journal.endings import Ending
from holdfast.journal.records import AttemptRecord, EndingRecord, Pruned, Quarantine
from holdfast.store import open_store
from tests.support.makers import IDENTITY, SETTINGS, make_latest, save

BEGAN = 1_780_000_000  # seconds since 1970
REASONS = ("preempted", "vanished", "crashed", "unhealthy")


class LongRun:
    """Writes a run. Its losses fall, with noise; every attempt but the last ends early.

    Args:
        folder: the store.
        commits: how many commits it has.
        steps: how many steps each commit has.
        metrics: how many numbers each step logs beside loss, gradient norm and rate.
        attempts: how many attempts made the commits.
        rolled_back: how many commits are quarantined in a row, in the middle, and trained again.
    """

    def __init__(
        self, folder: Path, run: str = "long", *, commits: int = 20, steps: int = 10, metrics: int = 0,
        attempts: int = 4, rolled_back: int = 0,
    ) -> None:  # fmt: skip
        self.folder = folder / run
        self.journal = Journal(open_store(str(folder)), run)
        self._random = random.Random(7)
        self._steps, self._metrics = steps, metrics
        for name in ("commits", "metrics", "attempts", "endings", "pruned", "quarantine"):
            (self.folder / name).mkdir(parents=True)
        self.journal.begin("m:f")
        config: dict[str, Any] = {"recipe": "m:f", "run": run, "epochs": commits * steps // 10, "seed": 1}
        self.journal.record_config(SETTINGS, IDENTITY, config)
        self._write_commits(commits, attempts, rolled_back)

    def _write(self, name: str, record: Record) -> None:
        (self.folder / name).write_bytes(record.to_bytes())

    def _write_commits(self, count: int, attempts: int, rolled_back: int) -> None:
        middle, step, parent = count // 2, 0, 0
        parents: dict[int, int] = {0: 0}
        for number in range(1, count + 1):
            attempt = 1 + (number - 1) * attempts // count
            if number - 1 == 0 or 1 + (number - 2) * attempts // count != attempt:
                self._begin_attempt(attempt, number, step)
            if rolled_back and number == middle + rolled_back:  # what came since the middle was bad
                for bad in range(middle, number):
                    record = Quarantine(commit=bad, reason="a planted fault", attempt=attempt, created_at=_time(number))
                    self._write(record_name("quarantine", bad), record)
                parent, step = middle - 1, parents[middle - 1]
            step += self._steps
            self._write_commit(number, parent, attempt, step, is_newest=number == count)
            parents[number] = step
            parent = number
        end = EndingRecord(number=attempts, created_at=_time(count), **vars(Ending("completed", "", step)))
        self._write(record_name("endings", attempts), end)

    def _begin_attempt(self, attempt: int, number: int, step: int) -> None:
        record = AttemptRecord(
            number=attempt, why="fresh" if attempt == 1 else "preempted", created_at=_time(number - 0.8),
            host=f"host-{attempt % 3}", pid=attempt, environment={"device": "cpu", "torch": "2.13.0"},
        )  # fmt: skip
        self._write(record_name("attempts", attempt), record)
        if attempt > 1:
            ending = Ending(REASONS[attempt % len(REASONS)], "as planned", step)
            before = EndingRecord(number=attempt - 1, created_at=_time(number - 0.95), **vars(ending))
            self._write(record_name("endings", attempt - 1), before)

    def _write_commit(self, number: int, parent: int, attempt: int, step: int, *, is_newest: bool) -> None:
        saved = save(self.journal.store, step, steps=1, config_fingerprint=SETTINGS) if is_newest else None
        sha256 = saved.metadata.checkpoint_sha256 if saved else f"{number:064x}"
        files = saved.files if saved else [FileRecord(name="checkpoint.safetensors", size_bytes=10**6, sha256=sha256)]
        lines = [self._make_line(each) for each in range(step - self._steps + 1, step + 1)]
        before = self.journal.record_sha256(number - 1)
        previous = self.journal.read_commit(parent).checkpoint_sha256 if parent else ""
        commit = Commit(
            number=number, parent=parent, attempt=attempt, step=step, epoch=step // 10,
            path=saved.path if saved else f"epoch-0001-step-{number:08d}", files=files,
            metrics={"avg_loss": lines[-1]["loss"]}, checkpoint_sha256=sha256, previous_checkpoint_sha256=previous,
            previous_record_sha256=before, config_fingerprint=SETTINGS, why="chunk", created_at=_time(number),
            train_s=40.0 + self._random.random(), save_s=2.0 + self._random.random(), stall_s=0.1,
        )  # fmt: skip
        self._write(record_name("commits", number), commit)
        (self.folder / metrics_name(number)).write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
        if is_newest:
            self.journal.publish_latest(make_latest(commit))
        else:
            gone = Pruned(
                commit=number, path=commit.path, checkpoint_sha256=sha256, size_bytes=10**6, created_at=_time(number)
            )
            self._write(record_name("pruned", number), gone)

    def _make_line(self, step: int) -> dict[str, Any]:
        noise = self._random.random
        line: dict[str, Any] = {
            "step": step, "epoch": step // 10, "loss": 4 / math.sqrt(1 + step / 50) + 0.3 * noise(),
            "grad_norm": 1 + noise(), "lrs": [1e-3 / (1 + step / 1000)],
        }  # fmt: skip
        if self._metrics:
            line["logged"] = {f"metric_{number:02d}": noise() * number for number in range(self._metrics)}
        return line


def _time(minutes: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(BEGAN + round(60 * minutes), UTC).isoformat(timespec="seconds")
