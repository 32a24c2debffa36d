"""The audit of all runs of a store: `audit`, on a schedule or from Python."""

import logging
import random
import sys

import tasks.untracked  # noqa: F401

from pydantic import PositiveInt

from holdfast.errors import Damage, RunStopped
from holdfast.journal import Journal, list_runs
from holdfast.proof.audit import Audit, choose_commits
from holdfast.store import open_store
from tasks.auditing import audit_one
from tasks.served import served_flow

log = logging.getLogger("holdfast.audit")


@served_flow(name="audit", flow_run_name="audit {store}", retries=0, persist_result=False)
def audit(
    store: str, commits: PositiveInt = 1, seed: int | None = None, runs: PositiveInt | None = None
) -> dict[str, list[Audit]]:
    """Train chunks of each run again, and compare the bytes. Write nothing but a record of each audit.

    Args:
        store: The folder, or URL of a bucket's folder, that holds the runs.
        commits: How many commits of each run to audit, chosen at random. A run with fewer commits is audited whole.
        seed: The seed of these choices; by default another one each time.
        runs: How many runs of the store to audit, chosen at random; by default all.

    Raises:
        Damage: bytes differ that are promised to be equal, or a checkpoint is damaged. All runs were audited.
        RunStopped: a commit could not be audited for another reason. All others were audited.
    """
    audits: dict[str, list[Audit]] = {}
    damaged: list[str] = []
    failed: list[str] = []
    for journal in choose_some(list_runs(open_store(store)), runs, seed):
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
            f"damaged, or training its steps again gives other bytes: {', '.join(damaged)}",
            hint=f"to audit one commit again: holdfast audit {store}/<run> --commit <number>",
        )
    if failed:
        raise RunStopped(f"not audited: {', '.join(failed)}")
    return audits


def choose_some(journals: list[Journal], most: int | None, seed: int | None) -> list[Journal]:
    """Return at most so many runs, chosen at random, in order of their names; None returns all."""
    if most is None or len(journals) <= most:
        return journals
    chosen = random.Random(seed).sample(journals, most)
    log.info("%d of %d runs are audited, chosen at random", most, len(journals))
    return sorted(chosen, key=lambda journal: journal.run)


if __name__ == "__main__":  # earlier versions had this command
    sys.exit(
        "error: python -m flows.audit is gone\n"
        "hint: holdfast audit STORE/RUN audits a run; the flow audit, from Python, every run of a store"
    )
