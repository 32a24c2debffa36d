"""Retention for all runs of a store: `prune`, on a schedule or from Python."""

import logging
import sys

import tasks.untracked  # noqa: F401

from holdfast.errors import RunStopped
from holdfast.journal import PruneReport
from holdfast.journal.runs import list_runs
from holdfast.keeping.retention import summarize_prune
from holdfast.store import open_store
from tasks.pruning import prune_one
from tasks.served import served_flow

log = logging.getLogger("holdfast.prune")


@served_flow(name="prune", flow_run_name="prune {store}", retries=0, persist_result=False)
def prune(store: str, dry_run: bool = False) -> dict[str, PruneReport]:
    """Delete the checkpoints of each run that its own retention policy doesn't keep. Runs may train at the same time.

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


if __name__ == "__main__":  # earlier versions had this command, so say what replaces it
    sys.exit(
        "error: python -m flows.prune is gone\n"
        "hint: holdfast prune STORE/RUN prunes a run; the flow prune, called from Python, prunes every run of a store"
    )
