"""The task of pruning a run; its failure is its own, and doesn't keep the next run from being pruned."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from holdfast.journal import Journal, PruneReport
from holdfast.retention import prune_run
from holdfast.store import open_store
from tasks import hooks


@task(
    task_run_name="prune {run}",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=hooks.is_about_the_store,
)
def prune_one(store: str, run: str, dry_run: bool) -> PruneReport | None:
    """Prune one run by the policy that it was last trained with.

    Args:
        store: The folder, or URL, that holds the run.
        run: The run's name.
        dry_run: Only report.
    """
    return prune_run(Journal(open_store(store), run), dry_run=dry_run)
