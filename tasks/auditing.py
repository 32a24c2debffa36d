"""The task that audits one commit, and the request that a different host trains the steps again."""

import contextlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import tasks.untracked  # noqa: F401

from prefect import runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

from holdfast.config import RunConfig, load_config
from holdfast.journal import Journal
from holdfast.journal.audits import UNREADABLE
from holdfast.journal.trainers import read_machines
from holdfast.journal.verdict import Ask
from holdfast.machine.host import name_host
from holdfast.proof.audit import Audit, audit_commit, keep_audit
from holdfast.recipe.trust import BY_DEFAULT, Trust
from holdfast.store import open_store
from holdfast.store.permission import split_store
from tasks import hooks
from tasks.asking import ask_server

log = logging.getLogger("holdfast.audit")

# A host that has already trained these steps puts the flow run back into the queue. After this many seconds a worker
# may start it again.
PUT_BACK_S = 60.0


@task(
    task_run_name="audit {run} commit {commit}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=hooks.is_about_the_store,
)
def audit_one(
    store: str,
    run: str,
    commit: int,
    start: int | None = None,
    seed: int | None = None,
    share: float | None = None,
    config: str = "",
) -> Audit:
    """Train one commit's chunk again, and compare the bytes. If a resume began the chunk, resume in the same way first.

    If this task fails, the flow still audits the other commits.

    Args:
        store: The folder, or URL, that holds the run.
        run: The run's name.
        commit: The commit's number.
        start: The commit to begin with; by default the audit chooses.
        seed: The seed with which the commit was chosen, for the audit's record.
        share: The fraction of the run's training time by which the commit was chosen, for the audit's record.
        config: The file of your configuration of the run; by default the run's records are used, if they are trusted.
    """
    journal = Journal(open_store(store), run)
    trust = Trust(config=load_config(config)) if config else BY_DEFAULT
    audit = audit_commit(journal, journal.read_commit(commit), start, trust=trust)
    keep_audit(journal, audit, seed, share)
    return audit


def find_config(configs: Sequence[str], store: str, run: str) -> str:
    """Return the file, among these configurations, of a run on a store; empty if there is none."""
    place = split_store(store), run
    return next((each for each in configs if place == _read_place(load_config(each))), "")


def _read_place(config: RunConfig) -> tuple[tuple[str, ...], str]:
    return split_store(config.store), config.run


def ask_elsewhere(journal: Journal, commit: int) -> Ask:
    """Return a request for an audit of a commit by a host that hasn't trained the commit."""
    answered = frozenset[str]()
    with contextlib.suppress(*UNREADABLE):
        answered = read_machines(journal, journal.read_commit(commit))
    return Ask(commit, answered=tuple(sorted(answered)))


def is_for_another(ask: Ask, tries: int) -> bool:
    """Return whether a different host should train the steps again, because this host has already trained them.

    Args:
        tries: how often the flow run may still be put back. At 0, this host trains the steps in any case.
    """
    return name_host() in ask.answered and (tries > 0 or name_host() not in ask.repeat)


def ask_another(store: str, run: str, ask: Ask, tries: int, parameters: dict[str, Any], wait_s: float = 0.0) -> bool:
    """Schedule a replay as a flow run of the audit's deployment; return False if there is no such deployment.

    Args:
        tries: how often a worker on a host that has already trained these steps may put the flow run back.
        parameters: further parameters of the flow.
        wait_s: seconds until the flow run is due.
    """
    asked = {"store": store, "run": run, "commit": ask.commit, "from_commit": ask.from_commit, "tries": tries}

    def start(client: SyncPrefectClient) -> None:
        run_deployment(
            f"audit/{runtime.deployment.name or 'audit'}",
            parameters=asked | {"is_asked": True} | parameters,
            flow_run_name=f"audit {run} commit {ask.commit} elsewhere",
            scheduled_time=datetime.now(UTC) + timedelta(seconds=wait_s),
            timeout=0,
            as_subflow=False,
        )

    try:
        ask_server(start)
    except ObjectNotFound:
        log.info(
            "no deployment of the flow audit exists, so start the audit on a different host yourself: %s",
            ask.spell(f"{store}/{run}"),
        )
        return False
    log.info("asked for a replay of commit %d of run %s on a different host", ask.commit, run)
    return True
