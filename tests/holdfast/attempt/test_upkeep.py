"""The work after a commit: how often a checkpoint's bytes are read, which may be far away and large."""

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast import Recipe, checkpoint
from holdfast.attempt import Attempt
from holdfast.attempt.pipeline import Chunk
from holdfast.checkpoint import FileDamage, Saved
from holdfast.config import Checkpoint, ChunkLength, KeepBest, Log, Retention, RunConfig
from holdfast.journal import Commit
from holdfast.journal.endings import Ending
from holdfast.keeping.verification import verify_run
from holdfast.store import Store
from tests.support.toy import toy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the commits whose checkpoints this process has read, in order."""
    numbers: list[int] = []
    verify = checkpoint.verify

    def noted(folder: Store, commit: Commit, *others: Any, **named: Any) -> list[FileDamage]:
        numbers.append(commit.number)
        return verify(folder, commit, *others, **named)

    monkeypatch.setattr(checkpoint, "verify", noted)
    return numbers


def make_config(folder: Path, **fields: object) -> RunConfig:
    known = {"run": "run", "store": str(folder), "epochs": 2, "log": Log(folder=str(folder / "logs"))}
    rules = {"chunk": ChunkLength(steps=2), "retention": Retention(keep_last=1)}
    return RunConfig.model_validate({"recipe": "tests.support.toy:toy", **known, **rules, **fields})


def train_chunk(attempt: Attempt) -> None:
    _, saved = save_chunk(attempt)
    attempt.commit(saved)


def save_chunk(attempt: Attempt) -> tuple[Chunk, Saved]:
    """Train the next chunk and save it, without a commit."""
    chunk = attempt.next_chunk()
    assert chunk is not None
    saved = attempt.train_chunk(chunk)
    assert saved is not None
    return chunk, saved


def kept(config: RunConfig) -> list[str]:
    return sorted(path.name for path in (Path(config.store) / "run").glob("epoch-*"))


def test_a_prune_does_not_read_again_what_was_just_read_back(tmp_path: Path, read: list[int]) -> None:
    config = make_config(tmp_path, checkpoint=Checkpoint(read_back_every=2))
    attempt = Attempt(config)
    attempt.open()
    for number in range(1, 5):
        train_chunk(attempt)
        assert read == [*range(1, number + 1)]  # 1, 2 and 4 were read back, 3 was read by the prune alone
    attempt.end(Ending("stopped"))
    assert verify_run(attempt.journal).ok


def evaluated_later() -> Recipe:
    """Return a recipe whose evaluation gives no metric yet."""
    return dataclasses.replace(toy(), evaluate=lambda model: {})


def test_a_prune_that_fails_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best = KeepBest(metric="accuracy")
    rules = {"chunk": ChunkLength(epochs=1), "retention": Retention(keep_last=1, keep_best=best)}
    config = make_config(tmp_path, recipe=f"{__name__}:evaluated_later", **rules)
    attempt = Attempt(config)
    attempt.open()
    train_chunk(attempt)
    train_chunk(attempt)
    attempt.end(Ending("stopped"))
    assert kept(config) == ["epoch-0001", "epoch-0002"]
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned
    for message in warned:
        assert re.fullmatch(
            r"pruning failed: retention.keep_best.metric = 'accuracy': your evaluate function has returned this metric "
            r"for no checkpoint, so nothing is pruned; "
            r"the run continues \(known: avg_loss.*\)",
            message,
        )


def test_a_prune_does_not_read_again_what_was_just_restored(tmp_path: Path, read: list[int]) -> None:
    config = make_config(tmp_path, checkpoint=Checkpoint(read_back_every=0))
    preempted = Attempt(config)
    preempted.open()
    train_chunk(preempted)
    preempted.stop()
    preempted.end(Ending("preempted"))
    before = kept(config)
    assert len(before) > 1

    read.clear()
    heir = Attempt(config)
    heir.open()
    restored = heir.ranks.verified
    assert heir.upkeep.is_owed
    train_chunk(heir)
    assert read == [restored + 1]
    assert {*before} & {*kept(config)} <= {before[-1]}, "the stop's checkpoint stays while its steps are compared"
    heir.end(Ending("stopped"))
    assert verify_run(heir.journal).ok


def test_steps_whose_folder_is_being_deleted_are_trained_again(tmp_path: Path) -> None:
    """A prune that has slept since before a fallback takes the folder of a live save for debris."""
    attempt = Attempt(make_config(tmp_path))
    attempt.open()
    train_chunk(attempt)
    chunk, saved = save_chunk(attempt)
    assert attempt.journal.assign_folder(saved.path, 0) == 0
    assert attempt.commit(saved) == attempt.journal.read_commit(1)
    assert attempt.next_chunk() == chunk
    train_chunk(attempt)
    attempt.end(Ending("stopped"))
    commit = attempt.journal.read_commit(2)
    assert commit.path == f"{saved.path}.2"
    assert commit.checkpoint_sha256 == saved.metadata.checkpoint_sha256
    assert verify_run(attempt.journal).ok


def test_a_checkpoint_is_adopted_whose_number_another_one_has_taken(tmp_path: Path) -> None:
    """A kill came between a checkpoint's number and its record, and the record before that one is lost."""
    config = make_config(tmp_path)
    attempt = Attempt(config)
    attempt.open()
    train_chunk(attempt)
    chunk, saved = save_chunk(attempt)
    assert attempt.journal.assign_folder(saved.path, 2) == 2
    attempt.end(Ending("killed"))
    attempt.journal.store.replace("commits/00000001.json", b"{")
    heir = Attempt(config)
    heir.open()
    found = {each.number: (each.why, each.step) for each in heir.journal.candidates()}
    assert (found[2], found[3]) == (("adopted", chunk.start), ("adopted", saved.step))
    heir.end(Ending("stopped"))
