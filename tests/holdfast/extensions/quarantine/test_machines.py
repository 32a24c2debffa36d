"""Machines in a store's quarantine: who comes in, who comes out, and what isn't taken for a run."""

from pathlib import Path

import pytest

from holdfast.errors import WrongUse
from holdfast.extensions.quarantine.records import MACHINES, list_quarantined, quarantine_machine, release_machine
from holdfast.journal import Journal
from holdfast.journal.finding import open_place
from holdfast.journal.runs import list_runs
from holdfast.journal.verdict import AuditVerdict
from holdfast.store import Store
from holdfast.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path / "runs"))


BEFORE, LATER = "2020-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"


def verdict(host: str = "node-1", *gpus: str, commit: int = 7, deviating: int = 1, at: str = BEFORE) -> AuditVerdict:
    """A verdict on a machine; ``at`` is when its last wrong training was put on record."""
    reason = f"{host} ended on different bytes than b and c"
    return AuditVerdict("machine", commit, reason, host=host, gpus=gpus, at=at, agreeing=2, deviating=deviating)


def listed(store: Store) -> list[tuple[str, list[str]]]:
    return [(each.host, each.gpus) for each in list_quarantined(store)]


def test_a_machine_stays_in_quarantine_until_it_is_released(store: Store) -> None:
    assert list_quarantined(store) == []
    with pytest.raises(WrongUse, match="node-1 is not quarantined"):
        release_machine(store, "node-1")
    record = quarantine_machine(store, "language", verdict())
    assert record
    assert str(record).endswith(": commit 7 of run language: node-1 ended on different bytes than b and c")
    quarantine_machine(store, "language", verdict("node/2 ü"))
    assert listed(store) == [("node-1", []), ("node/2 ü", [])]
    assert release_machine(store, "node-1").number == 2
    assert release_machine(store, "node/2 ü").number == 2
    assert list_quarantined(store) == []
    with pytest.raises(WrongUse, match="node-1 is not quarantined"):
        release_machine(store, "node-1")


def test_a_released_machine_returns_only_if_it_deviates_again(store: Store) -> None:
    quarantine_machine(store, "language", verdict())
    assert quarantine_machine(store, "language", verdict(deviating=2)) is None, "it is there"
    release_machine(store, "node-1")
    assert quarantine_machine(store, "language", verdict()) is None, "the audits that were known at its release"
    assert quarantine_machine(store, "other", verdict(commit=8)) is None, "they were made before its release, too"
    assert quarantine_machine(store, "language", verdict(deviating=2, at=LATER))
    release_machine(store, "node-1")
    assert quarantine_machine(store, "language", verdict(commit=8, at=LATER))


def test_a_record_that_cannot_be_read_stops_no_run(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    quarantine_machine(store, "language", verdict())
    folder = Path(store.url) / MACHINES / "node-2"
    folder.mkdir()
    (folder / "00000001.json").symlink_to("nowhere")
    assert listed(store) == [("node-1", [])]
    assert "node-2/00000001.json" in caplog.text


def test_only_the_gpus_at_fault_are_in_quarantine_until_the_whole_machine_is(store: Store) -> None:
    quarantine_machine(store, "language", verdict("node-1", "GPU-1"))
    assert listed(store) == [("node-1", ["GPU-1"])]
    assert quarantine_machine(store, "language", verdict("node-1", "GPU-1", commit=8)) is None
    quarantine_machine(store, "language", verdict("node-1", "GPU-0", commit=9))
    assert listed(store) == [("node-1", ["GPU-0", "GPU-1"])]
    quarantine_machine(store, "language", verdict(commit=10))
    assert listed(store) == [("node-1", [])]
    assert quarantine_machine(store, "language", verdict("node-1", "GPU-0", commit=11)) is None


def test_a_damaged_record_leaves_the_one_before_in_force(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    quarantine_machine(store, "language", verdict())
    release_machine(store, "node-1")
    store.replace(f"{MACHINES}/node-1/00000002.json", b"{}")
    assert listed(store) == [("node-1", [])]
    assert "00000002.json can't be read" in caplog.text
    assert release_machine(store, "node-1").number == 3


def test_the_folder_of_machines_is_no_run(store: Store) -> None:
    Journal(store, "language").begin("m:f")
    quarantine_machine(store, "language", verdict())
    assert [journal.run for journal in list_runs(store)] == ["language"]
    assert isinstance(open_place(store.url), Store)
