"""Runs of the array model, in this process: attempt, journal, store and observers are the real ones."""

import copy
import os
from pathlib import Path

import pytest

from holdfast.attempt import AttemptView, Observer, live
from holdfast.attempt.admission import check_drained
from holdfast.checkpoint import PAYLOAD, Payload
from holdfast.config import RunConfig, load_config
from holdfast.errors import ConfigError, MachineRefused, RankDied
from holdfast.journal import Commit, Journal
from holdfast.keeping.verification import verify_run
from holdfast.proof.prove import prove
from holdfast.store import open_store
from holdfast.testing.arrays import ArrayModel, array_ranks
from tests.conftest import ROOT

STEPS = 20
# The same on every machine.
CONTENT_ID = "8610013f0ae91e40bf80db24c561ee45332c8446a8d731e69084e60f33d22354"


def make_config(folder: Path, *settings: str) -> RunConfig:
    """Return the configuration of a recipe that needs minutes and libraries, for this model neither."""
    places = [f"store={folder}/runs", f"log.folder={folder}/logs"]
    return load_config(ROOT / "examples/chat/chat.toml", [*places, "epochs=2", "chunk.steps=4", *settings])


def journal_of(config: RunConfig) -> Journal:
    return Journal(open_store(config.store), config.run)


def read_newest(config: RunConfig) -> Commit:
    newest = journal_of(config).newest()
    assert newest is not None
    return newest


def read_trail(config: RunConfig) -> bytes:
    """Return the lines of all committed steps."""
    journal = journal_of(config)
    return b"".join(journal.store.read(f"metrics/{number:08d}.jsonl") for number in journal.numbers("commits"))


@pytest.mark.parametrize("kill_at", [[], [1], [4, 5, STEPS], [7, 8, 9, 13]], ids=str)
def test_a_run_ends_on_the_same_bytes_wherever_its_ranks_die(tmp_path: Path, kill_at: list[int]) -> None:
    config = make_config(tmp_path)
    with array_ranks(kill_at=kill_at) as left:
        assert live(config).complete
        assert not left
    newest = read_newest(config)
    assert (newest.step, newest.checkpoint_sha256) == (STEPS, CONTENT_ID)
    assert read_trail(config).count(b"\n") == STEPS
    report = verify_run(journal_of(config), everything=True, deep=True)
    assert (report.problems, report.notes) == ([], [])


def test_a_later_attempt_continues(tmp_path: Path) -> None:
    with array_ranks():
        live(make_config(tmp_path, "epochs=1"))
        live(make_config(tmp_path))
    config = make_config(tmp_path)
    assert [journal_of(config).attempts(), read_newest(config).checkpoint_sha256] == [2, CONTENT_ID]


def test_a_damaged_checkpoint_is_not_continued_from(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with array_ranks():
        live(make_config(tmp_path, "epochs=1"))
        payload = tmp_path / "runs" / config.run / read_newest(config).path / PAYLOAD
        payload.write_bytes(payload.read_bytes()[:-1] + b"!")
        live(config)
    assert read_newest(config).checkpoint_sha256 == CONTENT_ID
    assert len(journal_of(config).numbers("quarantine")) == 1


@pytest.mark.parametrize("part", ["_momentum", "_values", "_loss_sum"])
def test_a_part_of_the_state_that_is_forgotten_changes_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    restore = ArrayModel.restore

    def forget(model: ArrayModel, payload: Payload) -> None:
        fresh = copy.copy(getattr(model, part))
        restore(model, payload)
        setattr(model, part, fresh)

    monkeypatch.setattr(ArrayModel, "restore", forget)
    config = make_config(tmp_path)
    with array_ranks(kill_at=[7]):
        live(config)
    assert read_newest(config).checkpoint_sha256 != CONTENT_ID


def test_observers_are_told_of_each_commit_once(tmp_path: Path) -> None:
    class Steps(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            seen.append(commit.step)

    seen: list[int] = []
    with array_ranks(kill_at=[6, 18], steps_per_epoch=8):
        live(make_config(tmp_path), [Steps()])
    assert seen == [4, 8, 12, 16]


def test_an_attempt_whose_ranks_die_again_and_again_ends_and_the_next_one_continues(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with array_ranks(kill_at=[5, 6, 7]):
        with pytest.raises(RankDied, match="signal 9"):
            live(config)
        assert journal_of(config).endings()[-1].reason == "rank_crashed"
        live(config)
    assert read_newest(config).checkpoint_sha256 == CONTENT_ID


def test_what_the_array_model_cannot_do_is_refused(tmp_path: Path) -> None:
    with array_ranks(), pytest.raises(ConfigError, match="Examine"):
        prove(make_config(tmp_path), 10, 1, 1)


def test_a_machine_whose_time_is_over_by_a_drain_file_begins_no_attempt(tmp_path: Path) -> None:
    drain = tmp_path / "drain"
    config = make_config(tmp_path, f"resume.drain_file={drain}")
    drain.touch()
    with array_ranks():
        with pytest.raises(MachineRefused, match=r"this machine is drained: \S+/drain exists"):
            live(config)
        drain.write_text("3600")
        os.utime(drain, (0, 0))
        with pytest.raises(MachineRefused):
            live(config)
        assert not journal_of(config).exists()
        drain.write_text("3600")
        check_drained(str(drain))
        drain.unlink()
        assert live(config).complete
