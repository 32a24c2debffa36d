"""The table ``[extensions.slurm]`` of the configuration."""

from typing import Literal

from holdfast.config import Section


class Slurm(Section):
    """Slurm jobs that train a run."""

    requeue: Literal["auto", "off"] = "auto"
    """auto: in a Slurm job, queue the job again if the run stops early and another attempt may complete it. off: never
    queue it again. See holdfast docs slurm.
    """
