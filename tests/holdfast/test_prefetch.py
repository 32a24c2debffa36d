"""The checkpoint that a rank reads before it is asked to: the one that it is asked for, or none."""

from pathlib import Path

import pytest

from holdfast import RunConfig
from holdfast.attempt import Line
from holdfast.checkpoint import PAYLOAD, Payload, differences, read_payload
from holdfast.errors import CheckpointDamaged
from holdfast.rank.prefetch import COMMIT_VARIABLE, CONFIG_VARIABLE, Prefetch
from holdfast.store import open_store
from tests.makers import make_line, train


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """A run of two commits, and the environment of a rank that is to go on from the second."""
    line = make_line(open_store(str(tmp_path)))
    for _ in range(2):
        train(line)
    config = RunConfig(recipe="m:f", run=line.journal.run, store=str(tmp_path))
    monkeypatch.setenv(CONFIG_VARIABLE, config.model_dump_json())
    monkeypatch.setenv(COMMIT_VARIABLE, "2")
    return line


def test_it_has_read_what_is_asked_for_and_gives_it_once(line: Line) -> None:
    commit = line.journal.read_commit(2)
    prefetch = Prefetch()
    taken = prefetch.take(commit)
    assert taken
    payload, decoded = taken
    assert differences(payload, read_payload(line.journal.store, commit)) == []
    assert decoded is None
    assert prefetch.take(commit) is None


def test_what_is_read_is_decoded_before_it_is_asked_for(line: Line) -> None:
    seen = list[Payload]()
    prefetch = Prefetch()
    prefetch.decode(lambda payload: seen.append(payload) or "decoded")  # type: ignore[func-returns-value]
    taken = prefetch.take(line.journal.read_commit(2))
    assert taken
    assert taken[1] == "decoded"
    assert seen == [taken[0]]


def test_what_was_not_read_has_to_be(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Prefetch().take(line.journal.read_commit(1)) is None
    for number in ("0", "7"):  # a fresh run; a commit that can't be read
        monkeypatch.setenv(COMMIT_VARIABLE, number)
        prefetch = Prefetch()
        prefetch.decode(lambda payload: pytest.fail("there is none"))
        assert prefetch.take(line.journal.read_commit(2)) is None
    monkeypatch.delenv(COMMIT_VARIABLE)
    assert Prefetch().take(line.journal.read_commit(2)) is None


def test_damage_is_told_when_it_is_asked_for(line: Line) -> None:
    commit = line.journal.read_commit(2)
    line.journal.store.replace(f"{commit.path}/{PAYLOAD}", b"damaged")
    prefetch = Prefetch()
    prefetch.decode(lambda payload: pytest.fail("it is damaged"))
    with pytest.raises(CheckpointDamaged):
        prefetch.take(commit)
    assert prefetch.take(commit) is None  # who asks again reads again
