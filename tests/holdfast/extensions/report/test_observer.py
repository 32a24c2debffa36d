"""The report in a run's folder: there while the run trains and at its end, and never in the way of training."""

import logging
import threading
from pathlib import Path

import pytest

from holdfast.attempt import AttemptView, Observer, live
from holdfast.config import ChunkLength, Log, RunConfig
from holdfast.errors import Superseded
from holdfast.extensions.report import observer
from holdfast.extensions.report.publishing import Publisher
from holdfast.journal import REPORT, Commit, Journal
from holdfast.keeping.verification import verify_run
from holdfast.store import open_store
from tests.support.makers import claim, make_line, train
from tests.support.waiting import await_equal


def make_config(folder: Path, every: float = 60.0) -> RunConfig:
    return RunConfig(
        recipe="tests.support.toy:toy", run="run", store=str(folder), epochs=2, chunk=ChunkLength(steps=5),
        log=Log(folder=str(folder / "logs"), report_every_s=every),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_run_leaves_a_report_of_its_end_and_verifies(tmp_path: Path) -> None:
    assert live(make_config(tmp_path)).complete
    page = (tmp_path / "run" / REPORT).read_text("utf-8")
    assert "<dd>complete</dd>" in page
    assert ">completed</span>" in page
    found = verify_run(Journal(open_store(str(tmp_path)), "run"))
    assert (found.problems, found.notes) == ([], [])


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_run_that_trains_has_a_report(tmp_path: Path) -> None:
    seen: list[str] = []

    class Look(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            if commit.number == 2:  # the thread of the first commit, or of this one, writes meanwhile
                await_equal((tmp_path / "run" / REPORT).exists, True)
                seen.append((tmp_path / "run" / REPORT).read_text("utf-8"))

    assert live(make_config(tmp_path, every=0.01), [Look()]).complete
    assert "being trained by attempt 1" in seen[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_no_report_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    assert live(make_config(tmp_path, every=0)).complete
    assert not (tmp_path / "run" / REPORT).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_report_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(publisher: Publisher, attempt: int) -> None:
        raise ZeroDivisionError("a planted fault")

    monkeypatch.setattr(Publisher, "publish", fail)
    with caplog.at_level(logging.WARNING):
        assert live(make_config(tmp_path, every=0.01)).complete
    assert caplog.text.count("the report can't be written: a planted fault; the run continues") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_report_that_hangs_stops_no_run_and_says_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()

    def hang(publisher: Publisher, attempt: int) -> None:
        free.wait()
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(Publisher, "publish", hang)
    monkeypatch.setattr(observer, "COMPLETE_WITHIN_S", 0.1)
    try:
        assert live(make_config(tmp_path, every=0.01)).complete
    finally:
        free.set()
    for thread in threading.enumerate():
        if thread.name == "report":
            thread.join()
    assert "the report can't be written" not in caplog.text


def test_a_superseded_attempt_leaves_the_report_to_its_successor(tmp_path: Path) -> None:
    line = make_line(open_store(str(tmp_path)))
    train(line)
    publisher = Publisher(Journal(open_store(str(tmp_path)), "run"))
    publisher.publish(1)
    claim(line.journal, 2)
    before = (tmp_path / "run" / REPORT).read_bytes()
    with pytest.raises(Superseded):
        publisher.publish(1)
    assert (tmp_path / "run" / REPORT).read_bytes() == before
