"""Values of a program that aren't in its checkpoints: their record, and their comparison between two processes."""

import re
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

# Values of `Found.reached_by` for a built-in iterator around a run's iterator, such as ``enumerate(run.batches())``:
# inside an epoch, and at the epoch's end. A resumed process creates these iterators again, but only after its search
# for values.
ITERATOR, ENDED = "iterator", "ended iterator"
# The order of suspects, for `Found.order`: modules and optimizers, generators, numbers and tensors, other values, and
# the values of loggers and meters.
FIRST, GENERATORS, NUMBERS, OTHERS, LOGS = range(5)
# The remedy that keeps all attributes of an object.
KEEPS_ALL = re.compile(r"run\.keep\(\w+=vars\((.+)\)\)")


class Found(BaseModel):
    """A value that a program's variables refer to and that isn't in its saved state.

    Attributes:
        name: the value's name in the user's code, which begins with a variable: ``learner.target``.
        kind: the name of its class.
        reached_by: where the search found the value: in a field of the recipe, such as ``loss`` or ``data``; in the
            ``loop``; in an `ITERATOR`, or in an `ENDED` iterator.
        place: the file and line of the user's code that changes the value, with a colon and a space; empty if no line
            is known.
        remedy: the line for the user's code that would save the value.
        sha256: a digest of the value; equal values have equal digests in all processes. Empty if the value can't be
            read.
        is_plain: True for a value such as a number, a list or a tensor; False for an object with its own state.
        is_module: whether it is a module or an optimizer.
        is_assigned: whether a function of the user's other than ``__init__`` assigns it.
        order: the value's place among suspects: a value of a lower order is likelier to change a step.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    kind: str
    reached_by: str
    place: str = ""
    remedy: str
    sha256: str
    is_plain: bool = False
    is_module: bool = False
    is_assigned: bool = False
    order: int = OTHERS

    @property
    def key(self) -> tuple[str, str]:
        return self.reached_by, self.name

    @property
    def warning(self) -> str:
        """The warning of a run whose steps change the value."""
        return (
            f"{self.place}steps change {self.name} ({self.kind}), and no checkpoint contains it, so a resumed run "
            f"would continue with another one: {self.remedy}"
        )

    def __str__(self) -> str:
        return f"{self.place}{self.name} ({self.kind}, reached by {self.reached_by})"


def find_suspects(lived: Iterable[Found], restored: Iterable[Found]) -> list[Found]:
    """Return the values that differ between two processes at the same step, because the checkpoint lacks them.

    The likeliest causes of a different step come first: modules and optimizers, then generators.

    If only the first process has a value, return the value in two cases: the second process has other attributes of the
    same object, or the value is an iterator inside an epoch. Otherwise leave it out, because the processes may be in
    different functions of a loop.

    Args:
        lived: the values of the process that has trained all steps.
        restored: the values of the process that has resumed from a checkpoint.
    """
    known = {found.key: found.sha256 for found in restored}
    owners = {(root, name.rpartition(".")[0]) for root, name in known}

    def is_suspect(found: Found) -> bool:
        owner = found.name.rpartition(".")[0]
        is_new = found.reached_by == ITERATOR or (owner and (found.reached_by, owner) in owners)
        missing = "missing" if is_new else found.sha256
        return bool(found.sha256) and known.get(found.key, missing) != found.sha256

    return leave_out_repeated(sorted(filter(is_suspect, lived), key=lambda found: found.order))


def find_unkept(lived: Iterable[Found], restored: Iterable[Found]) -> list[Found]:
    """Return the attributes of models and optimizers that differ between two processes whose steps were equal.

    No compared step depended on them, but a later step may. The attributes of other objects, and local variables, are
    left out: a run may have logs, counts and values to plot.
    """
    suspects = [each for each in find_suspects(lived, restored) if each.reached_by in ("model", "optimizer")]
    return [each for each in suspects if each.place and each.is_plain and not each.is_module and each.order < LOGS]


def leave_out_repeated(suspects: Sequence[Found]) -> list[Found]:
    """Return the values without those that another value's remedy saves, too: ``vars(owner)`` has all attributes.

    Of several values of one owner, the first one stays, with this remedy.
    """
    remedies = {match[1]: found.remedy for found in suspects if (match := KEEPS_ALL.fullmatch(found.remedy))}
    left: dict[tuple[str, str], Found] = {}
    for found in suspects:
        owner = found.name if found.name in remedies else found.name.rpartition(".")[0]
        if owner in remedies:
            left.setdefault((found.reached_by, owner), found.model_copy(update={"remedy": remedies[owner]}))
        else:
            left[found.key] = found
    return [*left.values()]
