"""The command ``report``: a run, several runs or a store as one HTML page."""

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.errors import RunUnknown, StoreError, WrongUse
from holdfast.journal import Journal
from holdfast.journal.finding import open_journal
from holdfast.journal.runs import MOST_SHOWN, choose_runs
from holdfast.store import Store, open_store
from holdfast.store.local import LocalStore
from holdfast.terminal import counted
from holdfast.terminal.options import Limit

DEFAULT_FILE = "report.html"


def report(
    *what: Annotated[str, Parameter(name="RUN")],
    out: Annotated[str, Parameter(name=["--out", "-o"])] = DEFAULT_FILE,
    limit: Limit = None,
) -> int:
    """Draw a run as one HTML page that needs no network. For several runs, compare their curves; for a store, write
    an index.

    Args:
        what: <store>/<run>, one or several; or a store, a folder or URL that holds runs.
        out: The file to write.
        limit: The number of runs in a store's index, the newest first. By default 100.
    """
    # Import this package here, because it imports numpy, which takes a quarter of a second.
    from holdfast.extensions.report.comparing import make_comparison
    from holdfast.extensions.report.gathering import Gatherer
    from holdfast.extensions.report.index import make_index, read_rows
    from holdfast.extensions.report.page import make_page

    if not what:
        raise WrongUse("expected a run, several runs or a store", hint="for example: holdfast report runs/language")
    path = Path(out).absolute()
    store = _find_store(what)
    if store is not None:
        chosen = choose_runs(store, limit or MOST_SHOWN)
        rows = read_rows(chosen)
        page = make_index(store, rows, _find_way(path.parent, store), note=chosen.note)
        problems = [f"run {row.run}: {row.problem}" for row in rows if row.problem]
        shown = counted(len(rows), "run")
        if chosen.note:
            print(f"{chosen.note}; --limit {chosen.count} draws all", file=sys.stderr)
    else:
        histories = [Gatherer(open_journal(each)).gather() for each in what]
        page = make_page(histories[0]) if len(histories) == 1 else make_comparison(histories)
        problems = [f"run {history.run}: {each}" for history in histories for each in history.problems]
        commits = sum(len(history.commits) for history in histories)
        shown = f"{counted(len(histories), 'run')}, {counted(commits, 'commit')}"
    _write(path, page)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{out}: {shown}, {len(page.encode()) / 1e6:.1f} MB")
    return 2 if problems else 0


def _find_store(what: tuple[str, ...]) -> Store | None:
    """Return the store that the user has named; None if all names are names of runs.

    Raises:
        WrongUse: there are several names, and one of them names a store.
    """
    for each in what:
        if not _is_run(each):
            store = open_store(each)
            if any(Journal(store, name).exists() for name in store.list()):
                if len(what) > 1:
                    raise WrongUse(
                        f"{each} is a store, and a report of a store takes no further names",
                        hint="name runs of the store instead",
                    )
                return store
    return None


def _is_run(name: str) -> bool:
    """Return whether a run has this name, even a damaged run."""
    try:
        journal = open_journal(name)
    except RunUnknown:
        return False
    return journal.exists() or bool(journal.numbers("attempts") or journal.numbers("commits"))


def _find_way(folder: Path, store: Store) -> str:
    """Return the path from the page's folder to a store on this machine's disk; empty for any other store."""
    return os.path.relpath(Path(store.url).absolute(), folder) if isinstance(store, LocalStore) else ""


def _write(path: Path, page: str) -> None:
    if path.is_dir():
        raise WrongUse(
            f"{path} is a folder: expected the name of an output file", hint="-o FILE names the file to write"
        )
    if not path.parent.is_dir():
        raise WrongUse(
            f"the folder {path.parent} for the output file doesn't exist", hint="-o FILE names the file to write"
        )
    try:
        LocalStore(str(path.parent)).replace(path.name, page.encode())
    except StoreError as error:
        raise WrongUse(str(error), hint="-o FILE names the file to write") from None
