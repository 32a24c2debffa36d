"""The events of a run: each commit, and a commit that is overdue."""

import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import AttemptView, Observer, live
from holdfast.config import load_config
from holdfast.journal import Commit
from holdfast.testing.arrays import array_ranks
from tasks import hooks
from tasks.hooks import COMMIT_EVENT, OVERDUE_EVENT, CommitEvents
from tests.conftest import ROOT
from tests.support.waiting import WITHIN_S, await_equal


class Slow(Observer):
    """Keeps the third commit from being made until an event."""

    def __init__(self, goes_on: threading.Event) -> None:
        self._goes_on = goes_on

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        assert commit.number != 2 or self._goes_on.wait(WITHIN_S)


@pytest.mark.parametrize("is_late", [True, False])
def test_an_overdue_commit_is_an_event_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    events: list[tuple[str, Any]] = []
    monkeypatch.setattr(hooks, "emit_event", lambda name, run, payload: events.append((name, run | payload)))
    monkeypatch.setattr(hooks, "OVERDUE_LEAST_S", 0.0 if is_late else WITHIN_S)
    places = [f"store={tmp_path}/runs", f"log.folder={tmp_path}/logs", "epochs=2", "chunk.steps=5"]
    config, goes_on = load_config(ROOT / "examples/chat/chat.toml", places), threading.Event()

    def is_of_second(name: str, facts: Any) -> bool:
        return name == OVERDUE_EVENT and facts["number"] == 2

    def look() -> None:
        await_equal(lambda: not is_late or any(is_of_second(*each) for each in events), True)
        goes_on.set()

    threading.Thread(target=look, daemon=True).start()
    with array_ranks(steps_per_epoch=10):
        assert live(config, [CommitEvents(), Slow(goes_on)]).complete
    assert [facts["number"] for name, facts in events if name == COMMIT_EVENT] == [1, 2, 3, 4]
    overdue = [facts for name, facts in events if name == OVERDUE_EVENT]
    assert {facts["prefect.resource.id"] for _, facts in events} == {f"holdfast.run.{tmp_path}/runs/{config.run}"}
    assert (2 in [facts["number"] for facts in overdue]) == is_late
    assert 4 not in [facts["number"] for facts in overdue]
    if not is_late:
        assert overdue == []
