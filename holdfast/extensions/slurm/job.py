"""The Slurm job of this process, if it is in one."""

from contextlib import AbstractContextManager, nullcontext

from holdfast.config import RunConfig
from holdfast.config.slurm import find_job
from holdfast.extensions.slurm.table import Slurm


def queued_in_job(config: RunConfig, settings: Slurm) -> AbstractContextManager[None]:
    """Return a context manager that queues this process's Slurm job again; outside a job it does nothing."""
    job = find_job()
    if job is None:
        return nullcontext()
    from holdfast.extensions.slurm.requeue import queued_again  # not imported outside a job

    return queued_again(config, settings, job)
