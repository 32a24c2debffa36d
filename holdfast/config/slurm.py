"""This process's Slurm job, from environment variables: its nodes, and the address at which they find each other."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError

# Matches an entry in Slurm's list of tasks per node: 4, or 4(x2) for two nodes with 4 tasks each.
TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")
# Matches the first host in Slurm's list of hosts: node1 in node[1-3,7] and in node1,node2. Source: scontrol(1), show
# hostnames.
FIRST_HOST = re.compile(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)")
OF_A_BATCH_FILE = "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"
FIRST_PORT, PORTS = 15000, 15000  # below the ports that Linux assigns to outgoing connections
# The factors have no common divisor with `PORTS`. So jobs with close numbers get different ports, and so do the steps
# of a job. A requeued job gets another port, too, because another program may use the earlier port.
PER_JOB, PER_RESTART = 31, 1009


@dataclass(frozen=True)
class SlurmJob:
    """A Slurm job, as described by the environment variables of one of its processes.

    Attributes:
        name: the job's number in the form that scontrol accepts: 7; or 7_3 for task 3 of array 7.
        restarts: how often Slurm has requeued the job.
        nodes: the number of nodes of the process's Slurm step. If srun has not started the process, the number of nodes
            of the job.
        is_step: whether srun has started the process, which then belongs to a Slurm step.
        tasks: how many processes of the Slurm step each node has: one number for all consecutive nodes that have
            equally many. Empty without a Slurm step.
        address: host:port of the first node. MASTER_ADDR replaces the host, and MASTER_PORT the port.
    """

    name: str
    restarts: int
    nodes: int
    is_step: bool
    tasks: tuple[int, ...]
    address: str


def find_job(environ: Mapping[str, str] = os.environ) -> SlurmJob | None:
    """Return the Slurm job of a process with these environment variables; None if the process isn't in a job."""
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


def settle_nodes(compute: dict[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Replace ``compute.nodes = "slurm"`` by the Slurm job's number of nodes, and set the address where the nodes meet.

    Args:
        compute: the table ``compute`` of a configuration before its validation, which is changed in place.

    Raises:
        ConfigError: the process isn't in a job. Or the job has several nodes, but a process was started on one node
            only.
    """
    job = find_job(environ)
    if job is None:
        raise ConfigError(
            'compute.nodes = "slurm": this process isn\'t in a Slurm job',
            hint="start the command with sbatch, or give a number: --set compute.nodes=1; holdfast docs slurm has more",
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
