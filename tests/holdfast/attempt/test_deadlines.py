"""What the ranks make of the time that is left: they train on, and what they save is durable before the deadline."""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import Acts, Attempt, AttemptView, Observer, life, live
from holdfast.config import RunConfig
from holdfast.journal import Commit, Journal
from holdfast.machine import preemption
from holdfast.machine.preemption import Notice, watch
from holdfast.rank.messages import Progress
from holdfast.store import open_store
from tests.conftest import IS_SOAK
from tests.support.metadata_server import MetadataStub, be_in, metadata_server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

# The window of a notice: so many times what the ranks took for the steps before it, on any machine.
TIMES = 20
LEAST_WINDOW_S = 8.0
# Two saves, two steps and a second of the window are kept in hand.
TRAINED_ON = 3 / 8


@pytest.fixture
def stub() -> Iterator[MetadataStub]:
    with metadata_server() as stub:
        yield stub


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "watch", functools.partial(watch, every_s=0.2))
    monkeypatch.setenv("TOY_DELAY_S", "0.02")


def make_config(folder: Path, **fields: Any) -> RunConfig:
    known = {
        "recipe": "tests.support.toy:toy", "run": "toy", "epochs": 10_000, "store": f"{folder}/runs",
        "chunk": {"steps": 10}, "log": {"every": 1, "folder": f"{folder}/logs"},
    }  # fmt: skip
    return RunConfig.model_validate(known | fields)


def train(config: RunConfig, after_step: int, do: Callable[[Attempt], object]) -> tuple[Attempt, float]:
    """Live one life; return the attempt, and when something was done to it."""
    attempts: list[Attempt] = []
    done_at = 0.0

    def open_run(attempt: Attempt) -> None:
        attempts.append(attempt)
        attempt.open()

    class Do(Observer):
        def progressed(self, attempt: AttemptView, progress: Progress) -> None:
            nonlocal done_at
            if progress.step >= after_step and not done_at:
                done_at = time.time()
                do(attempts[0])

    live(config, [Do()], Acts(open=open_run))
    return attempts[0], done_at


def newest(config: RunConfig) -> Commit:
    found = Journal(open_store(config.store), config.run).newest()
    assert found is not None
    return found


def committed_at(config: RunConfig, commit: Commit) -> float:
    store = Journal(open_store(config.store), config.run).store
    return store.modified(f"commits/{commit.number:08d}.json").timestamp()


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"] if IS_SOAK else ["aws"])
def test_a_notice_leads_to_a_save_inside_its_window(
    stub: MetadataStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: str
) -> None:
    be_in(stub, cloud, monkeypatch)
    config = make_config(tmp_path)
    window_s = 0.0

    def say(_: Attempt) -> None:
        nonlocal window_s
        window_s = max(LEAST_WINDOW_S, TIMES * (time.time() - committed_at(config, newest(config))))
        monkeypatch.setattr(preemption, "GCP_WITHIN_S", window_s)
        tell: dict[str, Callable[[], object]] = {
            "aws": lambda: stub.interrupt_on_aws(window_s),
            "gcp": stub.preempt_on_gcp,
            "azure": lambda: stub.schedule_on_azure("Preempt", window_s),
        }
        tell[cloud]()

    attempt, said_at = train(config, 25, say)
    last = newest(config)
    assert attempt.notice is not None
    assert last.why == "preempted" or last.step % 10 == 0  # it may have come to the end of a chunk just then
    assert committed_at(config, last) < said_at + window_s + 0.2  # it was heard after it was said
    assert committed_at(config, last) > said_at + window_s * TRAINED_ON
    assert last.step > 50


def test_advice_is_a_checkpoint_and_nothing_else(
    stub: MetadataStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = make_config(tmp_path / "straight", epochs=4)
    train(straight, 10**9, lambda _: None)
    monkeypatch.setenv("TOY_DELAY_S", "0.2")  # the advice is heard before the last step
    be_in(stub, "aws", monkeypatch)
    config = make_config(tmp_path, epochs=4)
    attempt, _ = train(config, 3, lambda _: stub.recommend_rebalance_on_aws())
    assert attempt.notice is None
    journal = Journal(open_store(config.store), config.run)
    steps = [journal.read_commit(number).step for number in journal.numbers("commits")]
    assert [step for step in steps if step % 10], "no chunk was cut"
    assert newest(config).checkpoint_sha256 == newest(straight).checkpoint_sha256
    assert {commit.why for commit in journal.candidates()} == {"chunk"}


def test_before_the_first_save_nobody_knows_how_long_one_takes(tmp_path: Path) -> None:
    config = make_config(tmp_path, chunk={"epochs": 1000})
    _, said_at = train(config, 5, lambda attempt: attempt.notify(Notice("an hour is left", 3600)))
    last = newest(config)
    assert last.why == "preempted"
    assert committed_at(config, last) < said_at + 10


def test_what_is_not_durable_in_time_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_DELAY_S", "0.4")  # twice a step
    config = make_config(tmp_path)
    attempt, _ = train(config, 11, lambda attempt: attempt.notify(Notice("at once", 0.2)))
    assert attempt.head is not None
    assert attempt.head.step == 10
    assert attempt.next_chunk() is None


def test_in_the_next_attempt_training_goes_on(tmp_path: Path) -> None:
    config = make_config(tmp_path, epochs=4)
    train(config, 13, lambda attempt: attempt.notify(Notice("drained", 0)))
    journal = Journal(open_store(config.store), config.run)
    assert newest(config).step < 40
    train(config, 10**9, lambda _: None)
    straight = make_config(tmp_path / "straight", epochs=4)
    train(straight, 10**9, lambda _: None)
    assert newest(config).checkpoint_sha256 == newest(straight).checkpoint_sha256
    assert journal.read_attempt(2).why == "preempted"
