"""The table of RESUME.md: ways to forget or to change state, and what stops each.

The programs are the functions of ``forgotten/``; a function's docstring is its row's first column. ``make docs`` and
``python -m tests.programs.ways`` don't write the table: a test compares it with RESUME.md, and prints the right one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.rehearsed import list_functions

FORGOTTEN = Path(__file__).parent / "forgotten"
# The first step in which a program's state acts, and the settings of its run.
EARLY, LATE = 3, 20
STOPPED = ("rehearsal, step 8", "rehearsal, step 24", "rehearsal, step 32")
SAME = ("the same bytes",) * 3
REFUSED = ("refused",) * 3
GATE = ("gate, step 8", "gate, step 24", "rehearsal, step 32")

# The outcomes that aren't STOPPED.
OUTCOMES: dict[str, tuple[str, str, str]] = {}


@dataclass(frozen=True)
class Way:
    """A way to forget or to change state.

    Args:
        program: ``module:function`` below ``forgotten/``.
        kind: ``recipe`` or ``loop``.
        does: the program's docstring.
        early: what stops it if its state acts from step 3 on, rehearsed at each commit of eight steps; or that it ends
            on the bytes of a straight run, though it is killed.
        late: the same, if its state acts from step 20 on.
        unseen: the same, if it is killed at step 8, before its state acts.
    """

    program: str
    kind: str
    does: str
    early: str
    late: str
    unseen: str


def list_ways() -> Iterator[Way]:
    """Yield all rows, by module."""
    for file in sorted(FORGOTTEN.glob("*.py")):
        for name, kind, does in list_functions(file):
            program = f"{file.stem}:{name}"
            yield Way(program, kind, does.rstrip("."), *OUTCOMES.get(program, STOPPED))


def make_table() -> str:
    """Return the table of RESUME.md."""
    lines = [
        "| the program, which forgets it | acts from step 3 | acts from step 20 | killed at step 8 |",
        "|---|---|---|---|",
    ]
    lines += [f"| {way.does} ({way.kind}) | {way.early} | {way.late} | {way.unseen} |" for way in list_ways()]
    return "\n".join(lines)


WAYS = list(list_ways())

if __name__ == "__main__":
    print(make_table())
