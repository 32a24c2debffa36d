"""Two live processes write one run: exactly one line of commits advances, and it ends on the right bytes."""

import secrets
import time
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.keeping.verification import verify_run
from holdfast.store import open_store
from tests.conftest import AZURITE, COMMAND_WITHIN_S, IS_SOAK
from tests.support import writer
from tests.support.lives import Lives
from tests.support.writer import WaitingWriter

LOCAL_ROUNDS, HTTP_ROUNDS = (20, 20) if IS_SOAK else (6, 2)
COMMITS = 6
PAUSE_S = 0.05

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def content_id() -> str:
    """What one writer, never disturbed, ends on."""
    store = f"memory://{secrets.token_hex(8)}"
    assert writer.main(store, COMMITS) == 0
    newest = Journal(open_store(store), "run").newest()
    assert newest
    return newest.checkpoint_sha256


@pytest.fixture(params=["local", "s3", "azure"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "azure" and not AZURITE.exists():
        pytest.skip("Azurite is installed where there is npm")
    fixture = {"s3": "bucket", "azure": "container"}.get(request.param)
    return str(request.getfixturevalue(fixture)) if fixture else str(tmp_path)


def test_exactly_one_line_advances(nursery: Lives, place: str, content_id: str) -> None:
    rounds = HTTP_ROUNDS if "://" in place else LOCAL_ROUNDS
    for round_ in range(rounds):
        store = f"{place}/{round_}"
        # From a race for the first attempt to one that is overtaken in the midst of its commits.
        ends = race(nursery, store, later_s=PAUSE_S * COMMITS * round_ / rounds)
        assert sorted(code for code, _ in ends) == [0, 3], ends
        (loser,) = [err for code, err in ends if code == 3]
        assert loser.splitlines()[-1].startswith("Superseded: "), loser
        check(store, content_id)


def race(nursery: Lives, store: str, later_s: float) -> list[tuple[int, str]]:
    """Let two processes write a run, the second from a little later on; return their exit codes and errors."""
    both = [WaitingWriter(nursery, store, COMMITS, PAUSE_S) for _ in range(2)]
    try:
        for writer, pause_s in zip(both, (later_s, 0), strict=True):
            writer.begin()
            time.sleep(pause_s)
        return [writer.finish(COMMAND_WITHIN_S) for writer in both]
    finally:
        for writer in both:
            writer.process.kill()


def check(store: str, content_id: str) -> None:
    journal = Journal(open_store(store), "run")
    report = verify_run(journal)
    assert report.problems == []
    newest = journal.newest()
    assert newest
    assert newest.checkpoint_sha256 == content_id
    commits = [journal.read_commit(number) for number in range(1, newest.number + 1)]
    assert [commit.epoch for commit in commits] == list(range(1, COMMITS + 1))
    assert [commit.parent for commit in commits] == list(range(COMMITS))
    attempts = [commit.attempt for commit in commits]
    assert attempts == sorted(attempts)
