"""The task that audits one commit. If it fails, the flow still audits the other commits."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from holdfast.journal import Journal
from holdfast.proof.audit import Audit, audit_commit, keep_audit
from holdfast.store import open_store
from tasks import hooks


@task(
    task_run_name="audit {run} commit {commit}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=hooks.is_about_the_store,
)
def audit_one(store: str, run: str, commit: int) -> Audit:
    """Train one commit's chunk again and compare the bytes. If the run was resumed before the chunk, begin before that.

    Args:
        store: The folder, or URL, that holds the run.
        run: The run's name.
        commit: The commit's number.
    """
    journal = Journal(open_store(store), run)
    audit = audit_commit(journal, journal.read_commit(commit))
    keep_audit(journal, audit)
    return audit
