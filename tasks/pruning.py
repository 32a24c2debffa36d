"""The task that prunes one run. If it fails, the flow still prunes the other runs."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from holdfast.journal import Journal, PruneReport
from holdfast.keeping.retention import prune_run
from holdfast.store import open_store
from tasks import hooks


@task(
    task_run_name="prune {run}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=hooks.is_about_the_store,
)
def prune_one(store: str, run: str, dry_run: bool) -> PruneReport | None:
    """Prune one run by the retention policy of its last training.

    Args:
        store: The folder, or URL, that holds the run.
        run: The run's name.
        dry_run: Only report what would be deleted.
    """
    return prune_run(Journal(open_store(store), run), dry_run=dry_run)
