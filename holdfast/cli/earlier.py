"""Commands under the names of earlier versions: each still works, and prints its new name."""

import sys

from holdfast.cli.keeping import pin
from holdfast.cli.looking import print_runs
from holdfast.config import DEFAULT_STORE
from holdfast.terminal.options import Json


def runs_earlier(store: str = DEFAULT_STORE, /, *, json: Json = False) -> int:
    """List the runs of a store; the present command is holdfast show --store STORE."""
    _tell("runs", "show --store STORE")
    return print_runs(store, json=json)


def unpin_earlier(run: str, commit: str, /) -> None:
    """Undo a pin; the present command is holdfast pin RUN COMMIT --off."""
    _tell("unpin", "pin RUN COMMIT --off")
    pin(run, commit, off=True)


def _tell(name: str, now: str) -> None:
    print(f"holdfast {name} is now holdfast {now}", file=sys.stderr)
