"""Slurm: a job whose run isn't complete when its command ends queues itself again."""

from holdfast.extending import Extension

extension = Extension(
    "slurm",
    settings="holdfast.extensions.slurm.table:Slurm",
    around="holdfast.extensions.slurm.job:queued_in_job",
)
