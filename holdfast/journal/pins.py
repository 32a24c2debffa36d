"""The pins of a run that explains or skips a step: they keep the checkpoints before it, and name the step's commit.

If the process dies meanwhile, the next attempt finds the commit by these pins, and removes them after the explanation,
or at once if it explains no spikes. A person's pin is never taken away.
"""

import contextlib
from itertools import islice

from holdfast.errors import NameMissing, RecordDamaged, WrongUse
from holdfast.journal.journal import Journal
from holdfast.journal.records import Commit, Pin, read_record, record_name

# How many commits before the spike's commit are pinned. If the spike's step is skipped, the run goes back to the first
# commit before it. An explanation may begin with the second, because it has to train the step before the spike, too.
KEPT = 2


def pin_before(journal: Journal, commit: Commit) -> None:
    """Pin the checkpoints from which the steps of a commit can be trained again."""
    for before in islice(journal.walk_back(commit), 1, 1 + KEPT):
        with contextlib.suppress(WrongUse):  # the checkpoint was already pruned
            journal.pin(before.number, explains=commit.number)


def unpin_before(journal: Journal, number: int) -> None:
    """Remove the pins that `pin_before` has made for the commit of this number."""
    for pin in _read_pins(journal):
        if pin.explains == number:
            journal.unpin(pin.commit)


def list_unexplained(journal: Journal) -> list[int]:
    """Return the numbers of the commits whose spikes an attempt had not explained when it ended."""
    return sorted({pin.explains for pin in _read_pins(journal) if pin.explains})


def _read_pins(journal: Journal) -> list[Pin]:
    pins = []
    for number in journal.numbers("pins"):
        with contextlib.suppress(NameMissing, RecordDamaged):
            pins.append(read_record(journal.store, Pin, record_name("pins", number)))
    return pins
