"""The audit of all runs of a store: ``python -m flows.audit STORE``, or `audit` from Python or on a schedule."""

import logging
import sys
from typing import Annotated

import tasks.untracked  # noqa: F401

from cyclopts import App, Parameter
from cyclopts.validators import Number
from pydantic import PositiveInt

from holdfast.attempt.progress import log_plain_lines
from holdfast.errors import Damage, RunStopped
from holdfast.journal import list_runs
from holdfast.proof.audit import Audit, choose_commits
from holdfast.store import open_store
from holdfast.terminal.command import EXIT_CODES, run_app
from tasks.auditing import audit_one
from tasks.served import served_flow
from tasks.server import server

log = logging.getLogger("holdfast.audit")


@served_flow(name="audit", flow_run_name="audit {store}", retries=0, persist_result=False)
def audit(store: str, commits: PositiveInt = 1, seed: int | None = None) -> dict[str, list[Audit]]:
    """Train chunks of each run again, and compare the bytes. Change nothing on the store.

    Args:
        store: The folder, or URL of a bucket's folder, that holds the runs.
        commits: How many commits of each run to audit, chosen at random; all of them if there are no more.
        seed: The seed of that choice; by default another one each time.

    Raises:
        Damage: bytes differ that are promised to be equal, or a checkpoint is damaged. All runs were audited.
        RunStopped: a commit could not be audited for another reason. All others were audited.
    """
    audits: dict[str, list[Audit]] = {}
    damaged: list[str] = []
    failed: list[str] = []
    for journal in list_runs(open_store(store)):
        chosen = choose_commits(journal, commits, seed)
        if not chosen:
            log.info("run %s has no commit that can be replayed", journal.run)
        for commit in chosen:
            name = f"commit {commit.number} of run {journal.run}"
            found = audit_one(store, journal.run, commit.number, return_state=True).result(raise_on_failure=False)
            if not isinstance(found, Audit):
                log.warning("%s was not audited: %s", name, found)
                (damaged if isinstance(found, Damage) else failed).append(name)
                continue
            audits.setdefault(journal.run, []).append(found)
            log.log(logging.WARNING if found.is_failed else logging.INFO, "run %s: %s", journal.run, found)
            if found.is_failed:
                damaged.append(name)
    if damaged:
        raise Damage(
            f"damaged, or not what its steps give: {', '.join(damaged)}",
            hint=f"holdfast audit {store}/<run> --commit <number> audits one again",
        )
    if failed:
        raise RunStopped(f"not audited: {', '.join(failed)}")
    return audits


app = App(
    name="python -m flows.audit",
    help="Train chunks of the runs of a store again, and compare the bytes.",
    help_epilogue=EXIT_CODES,
    help_format="plaintext",
    version_flags=[],
)


@app.default
def main(
    store: str, *, commits: Annotated[int, Parameter(validator=Number(gte=1))] = 1, seed: int | None = None
) -> None:
    """Audit all runs of a store.

    Args:
        store: The folder, or URL of a bucket's folder, that holds the runs.
        commits: How many commits of each run to audit, chosen at random.
        seed: The seed of that choice; by default another one each time.
    """
    log_plain_lines()
    with server():
        audit(store, commits, seed)


if __name__ == "__main__":
    sys.exit(run_app(app))
