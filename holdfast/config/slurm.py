"""The Slurm job of this process, by its environment variables: its nodes, and the address where they meet."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError

# An entry in Slurm's list of tasks per node: 4, or 4(x2) for two nodes with 4 tasks each.
TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")
# The first host in Slurm's list of hosts: node1 in node[1-3,7] and in node1,node2. Source: scontrol(1), show hostnames.
FIRST_HOST = re.compile(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)")
OF_A_BATCH_FILE = "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"
FIRST_PORT, PORTS = 15000, 15000  # below the ports that Linux gives to clients
# The factors have no divisor in common with `PORTS`. So jobs with close numbers get different ports, and so do the
# steps of a job. A job that is queued again gets another port, too, because another program may use the earlier one.
PER_JOB, PER_RESTART = 31, 1009


@dataclass(frozen=True)
class SlurmJob:
    """A Slurm job, as one of its processes sees it.

    Attributes:
        name: the job's number, as scontrol takes it: 7; or 7_3 for task 3 of array 7.
        restarts: how often Slurm has queued the job again.
        nodes: the number of nodes of the process's step; of the job, if srun has not started the process.
        is_step: whether srun has started the process.
        tasks: the number of processes of the step on each node; one number for several nodes in a row with equal ones.
            Empty without a step.
        address: host:port of the first node. MASTER_ADDR replaces the host, and MASTER_PORT the port.
    """

    name: str
    restarts: int
    nodes: int
    is_step: bool
    tasks: tuple[int, ...]
    address: str


def find_job(environ: Mapping[str, str] = os.environ) -> SlurmJob | None:
    """Return the Slurm job of a process with these environment variables; None if the process is in no job."""
    if not environ.get("SLURM_JOB_ID", "").isdecimal():
        return None
    is_step = "SLURM_STEP_NUM_NODES" in environ
    hosts, nodes = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES") if is_step else OF_A_BATCH_FILE
    number, step = int(environ["SLURM_JOB_ID"]), _read_number(environ, "SLURM_STEP_ID", 0)
    restarts = _read_number(environ, "SLURM_RESTART_COUNT", 0)
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    host = FIRST_HOST.match(environ.get(hosts, ""))
    first = environ.get("MASTER_ADDR") or ("".join(part or "" for part in host.groups()) if host else "127.0.0.1")
    port = environ.get("MASTER_PORT") or FIRST_PORT + (PER_JOB * number + step + PER_RESTART * restarts) % PORTS
    return SlurmJob(
        name=f"{array}_{task}" if array and task else str(number),
        restarts=restarts,
        nodes=_read_number(environ, nodes, 1),
        is_step=is_step,
        tasks=tuple(int(found) for found in TASKS.findall(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))),
        address=f"{first}:{port}",
    )


def settle_nodes(fields: dict[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Put a Slurm job's number of nodes, and the address where they meet, in place of ``compute.nodes = "slurm"``.

    Args:
        fields: a configuration before its validation; it is changed in place.

    Raises:
        ConfigError: the process belongs to no job, or it is one of several nodes' without the others.
    """
    compute = fields.get("compute")
    if not isinstance(compute, dict) or compute.get("nodes") != "slurm":
        return
    job = find_job(environ)
    if job is None:
        raise ConfigError(
            'compute.nodes = "slurm": this process belongs to no Slurm job',
            hint="start the command with sbatch, or give a number: --set compute.nodes=1; docs/slurm.md has more",
        )
    if job.nodes > 1 and not job.is_step:
        raise ConfigError(
            f'compute.nodes = "slurm": job {job.name} has {job.nodes} nodes, but this command runs on one of them only',
            hint="start the command on each node: srun --ntasks-per-node=1 --kill-on-bad-exit=1 holdfast train ...",
        )
    compute["nodes"] = job.nodes
    if job.nodes > 1:
        compute.setdefault("rendezvous", job.address)


def _read_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default
