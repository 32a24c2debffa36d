"""Retention for all runs of a store: ``python -m flows.prune STORE``, or `prune` from Python or on a schedule."""

import logging
import sys
from typing import Annotated

import tasks.untracked  # noqa: F401

from cyclopts import App, Parameter

from holdfast.attempt.progress import log_plain_lines
from holdfast.errors import RunStopped
from holdfast.journal import PruneReport, list_runs
from holdfast.keeping.retention import summarize_prune
from holdfast.store import open_store
from holdfast.terminal.command import EXIT_CODES, run_app
from tasks.pruning import prune_one
from tasks.served import served_flow
from tasks.server import server

log = logging.getLogger("holdfast.prune")


@served_flow(name="prune", flow_run_name="prune {store}", retries=0, persist_result=False)
def prune(store: str, dry_run: bool = False) -> dict[str, PruneReport]:
    """Delete the checkpoints that each run's own retention doesn't keep. Runs that train meanwhile go on.

    Args:
        store: The folder, or URL of a bucket's folder, that holds the runs.
        dry_run: Only report what would be deleted.
    """
    reports: dict[str, PruneReport] = {}
    failed: dict[str, str] = {}
    for journal in list_runs(open_store(store)):
        state = prune_one(store, journal.run, dry_run, return_state=True)
        if not state.is_completed():
            failed[journal.run] = str(state.message)
        elif (report := state.result()) is not None:
            reports[journal.run] = report
            log.info("run %s: %s", journal.run, summarize_prune(report))
    for run, message in failed.items():
        log.warning("run %s was not pruned: %s", run, message)
    if failed:
        raise RunStopped(f"{len(failed)} of {len(failed) + len(reports)} runs were not pruned: {', '.join(failed)}")
    return reports


app = App(
    name="python -m flows.prune",
    help="Delete the checkpoints that the runs' own retention doesn't keep.",
    help_epilogue=EXIT_CODES,
    help_format="plaintext",
    version_flags=[],
)


@app.default
def main(store: str, *, dry_run: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Prune all runs of a store.

    Args:
        store: The folder, or URL of a bucket's folder, that holds the runs.
        dry_run: Only report what would be deleted.
    """
    log_plain_lines()
    with server():
        prune(store, dry_run)


if __name__ == "__main__":
    sys.exit(run_app(app))
