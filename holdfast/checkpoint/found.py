"""Values of a program that aren't in its checkpoints: their record, and their comparison between two processes."""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

# Values of `Found.reached_by` for a built-in iterator around a run's iterator, such as ``enumerate(run.batches())``:
# inside an epoch, and at the epoch's end. A resumed process creates these iterators again, but only after its search
# for values.
ITERATOR, ENDED = "iterator", "ended iterator"


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
        is_plain: True for a value such as a number, a list or a tensor; False for an object with a state of its own.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    kind: str
    reached_by: str
    place: str = ""
    remedy: str
    sha256: str
    is_plain: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.reached_by, self.name

    def __str__(self) -> str:
        return f"{self.place}{self.name} ({self.kind}, reached by {self.reached_by})"


def find_suspects(lived: Iterable[Found], restored: Iterable[Found]) -> list[Found]:
    """Return the values that differ between two processes at the same step, because the checkpoint lacks them.

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

    return [*filter(is_suspect, lived)]
