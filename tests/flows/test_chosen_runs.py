"""Tests of which runs of a store an audit of some of them chooses."""

from pathlib import Path

from flows.audit import choose_some
from holdfast.journal import Journal
from holdfast.store import open_store


def test_an_audit_of_some_runs_chooses_them_at_random(tmp_path: Path) -> None:
    journals = [Journal(open_store(str(tmp_path)), f"run-{number:02d}") for number in range(50)]
    assert choose_some(journals, None, 1) == choose_some(journals, 50, 1) == journals
    chosen = choose_some(journals, 5, 1)
    assert len(chosen) == 5
    assert chosen == sorted(chosen, key=lambda journal: journal.run) == choose_some(journals, 5, 1)
    assert chosen != choose_some(journals, 5, 2)
