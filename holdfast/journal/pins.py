"""The pins of a process that skips a step: they keep the checkpoint to go back to, and name the step's commit.

If the process dies meanwhile, the next attempt removes these pins. A person's pin is never taken away.
"""

import contextlib

from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal.journal import Journal
from holdfast.journal.records import Pin, read_record, record_name


def unpin_before(journal: Journal, number: int) -> None:
    """Remove the pins that a process has made for the commit of this number."""
    for pin in _read_pins(journal):
        if pin.explains == number:
            journal.unpin(pin.commit)


def unpin_left(journal: Journal) -> None:
    """Remove the pins that explain a commit: those of processes that have died, and those of earlier versions."""
    for pin in _read_pins(journal):
        if pin.explains:
            journal.unpin(pin.commit)


def _read_pins(journal: Journal) -> list[Pin]:
    pins = []
    for number in journal.numbers("pins"):
        with contextlib.suppress(NameMissing, RecordDamaged):
            pins.append(read_record(journal.store, Pin, record_name("pins", number)))
    return pins
