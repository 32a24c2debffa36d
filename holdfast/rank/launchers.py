"""The rank number that a launcher gave this process in environment variables.

The launchers are torchrun, accelerate launch, srun, and others that set the variables of one of these. With
`holdfast.attach` the launcher starts the ranks. Any other command that starts an attempt raises an error if the
launcher has started several processes of it, because each process would start the same attempt. Nothing here imports
torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config import Compute
from holdfast.config.slurm import find_job
from holdfast.errors import ConfigError

# This variable shows that srun started this process, because Slurm doesn't set it for a batch script. Slurm's other
# variables with the number of tasks and the task's number don't show it: a batch script has them, too.
STEP_SIZE = "SLURM_STEP_NUM_TASKS"
DOCS = "holdfast docs launchers shows the lines"


@dataclass(frozen=True)
class Slot:
    """The place of this process among the processes that a launcher started.

    Attributes:
        launcher: the launcher's name for messages; empty without a launcher.
        rank, size: this process's number among all processes, from 0, and the number of all processes.
        local_rank, local_size: this process's number among this machine's processes, from 0, and how many there are.
        node: this machine's number, from 0.
        address: host:port of the rendezvous of the processes; None for a single process.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    address: str | None = None

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables with which torch finds the other processes."""
        if self.address is None:
            return {}
        host, _, port = self.address.rpartition(":")
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
        }
        return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": host, "MASTER_PORT": port}


def find_slot(environ: Mapping[str, str] = os.environ) -> Slot:
    """Return the place that a launcher gave this process, from the launcher's environment variables.

    Raises:
        ConfigError: a variable is missing or invalid, or the nodes have different numbers of processes.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        slot = _read_torchs(environ)
    elif "SLURM_PROCID" in environ and STEP_SIZE in environ:
        slot = _read_slurms(environ)
    else:
        return Slot()
    if not (slot.rank < slot.size and slot.local_rank < slot.local_size):
        raise ConfigError(
            f"{slot.launcher} gave this process rank {slot.rank} of {slot.size}, and local rank {slot.local_rank} of "
            f"{slot.local_size} on this machine: expected ranks counted from 0"
        )
    if slot.size % slot.local_size:
        raise ConfigError(
            f"{slot.launcher} started {slot.size} processes, {slot.local_size} of them on this machine: "
            "expected the same number on each machine"
        )
    return slot


def _read_torchs(environ: Mapping[str, str]) -> Slot:
    """Return this process's place among the launcher's processes, from the variables that torch reads."""
    launcher = name_launcher(environ)
    rank, size = _read_number(environ, "RANK"), _read_number(environ, "WORLD_SIZE")
    local_rank, local_size = 0, 1
    if "LOCAL_RANK" in environ:
        local_rank, local_size = _read_number(environ, "LOCAL_RANK"), _read_number(environ, "LOCAL_WORLD_SIZE")
    node = _read_number(environ, "GROUP_RANK") if "GROUP_RANK" in environ else rank // max(1, local_size)
    if size == 1 and "MASTER_ADDR" not in environ:
        return Slot(launcher)
    address = f"{_read(environ, 'MASTER_ADDR')}:{_read_number(environ, 'MASTER_PORT')}"
    return Slot(launcher, rank, size, local_rank, local_size, node, address)


def _read_slurms(environ: Mapping[str, str]) -> Slot:
    """Return this process's place among the tasks of srun, from the variables that srun sets."""
    job = find_job(environ)
    if job is None or not job.tasks:
        raise _make_missing_error("SLURM_STEP_TASKS_PER_NODE" if job else "SLURM_JOB_ID", environ)
    if len(job.tasks) > 1:
        raise ConfigError(
            f"srun started {','.join(map(str, job.tasks))} processes on its nodes: expected the same number on each",
            hint="use srun --ntasks-per-node=..., which starts the same number on each node",
        )
    size, local_size = _read_number(environ, STEP_SIZE), job.tasks[0]
    is_alone = size == local_size and "MASTER_ADDR" not in environ
    return Slot(
        "srun",
        _read_number(environ, "SLURM_PROCID"),
        size,
        _read_number(environ, "SLURM_LOCALID"),
        local_size,
        _read_number(environ, "SLURM_NODEID"),
        f"127.0.0.1:{job.address.rpartition(':')[2]}" if is_alone else job.address,
    )


def _read(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise _make_missing_error(name, environ)
    return environ[name]


def _make_missing_error(name: str, environ: Mapping[str, str]) -> ConfigError:
    started = f"{name_launcher(environ)} started this process without the variable {name}"
    return ConfigError(started, hint="start the process with torchrun or srun")


def _read_number(environ: Mapping[str, str], name: str) -> int:
    text = _read(environ, name)
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r}: expected a number, as a launcher sets it")
    return int(text)


def name_launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the launcher for messages."""
    if any(name.startswith("ACCELERATE_") for name in environ):
        return "accelerate launch"
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    return "srun" if "SLURM_PROCID" in environ else "a launcher"


def count_processes(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes of this command a launcher has started; 1 without a launcher, or if that is unknown."""
    sizes = [environ.get("WORLD_SIZE", "")] if "RANK" in environ else []
    sizes += [environ.get("LOCAL_WORLD_SIZE", "")] if "LOCAL_RANK" in environ else []
    sizes += [environ.get(STEP_SIZE, "")] if "SLURM_PROCID" in environ else []
    return max([1, *(int(size) for size in sizes if size.isdecimal())])


def refuse_launcher(compute: Compute, environ: Mapping[str, str] = os.environ) -> None:
    """Raise an error if a launcher has started several processes, because each would start the same attempt.

    If the configuration has several nodes, one process on each node is allowed.

    Raises:
        ConfigError: a launcher has started several processes.
    """
    count, launcher = count_processes(environ), name_launcher(environ)
    job = find_job(environ)
    if job is not None and job.is_step and max(job.tasks, default=1) > 1:
        instead = f"once on each node: srun --ntasks-per-node=1 ... --set compute.ranks={max(job.tasks)}"
    elif count < 2 or compute.has_nodes:
        return
    elif job is not None and job.is_step:
        instead = "with --set compute.nodes=slurm"
    else:
        instead = f"once, with --set compute.ranks={count}"
    raise ConfigError(
        f"{launcher} has started {count} processes of this command, and each would train the run; start it once, "
        "because it starts its ranks itself",
        hint=f"start the command {instead}; or let {launcher} start a script that calls holdfast.attach; {DOCS}",
    )
