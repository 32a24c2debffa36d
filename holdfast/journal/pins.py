"""The pins of a run that explains a spike: they keep the checkpoints before it, and name the commit that has it.

If the attempt dies meanwhile, the next one finds the commit by these pins. A person's pin is never taken away.
"""

import contextlib
from itertools import islice

from holdfast.errors import NameMissing, RecordDamaged, WrongUse
from holdfast.journal.journal import Journal
from holdfast.journal.records import Commit, Pin, read_record, record_name

# The commits to keep: the way back begins with the first one, and a replay perhaps with the second one, because it has
# to train the step before the spike, too.
KEPT = 2


def pin_before(journal: Journal, commit: Commit) -> None:
    """Pin the checkpoints from which the steps of a commit can be trained again."""
    for before in islice(journal.walk_back(commit), 1, 1 + KEPT):
        with contextlib.suppress(WrongUse):  # it was pruned already
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
