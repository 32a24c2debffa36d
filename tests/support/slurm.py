"""A real Slurm cluster on this machine: a controller and several node daemons, without root, munge or cgroups.

All nodes are this machine (slurmd's ``-N``), so that a job's commands find each other at 127.0.0.1. Node names are not
host names here: jobs of several nodes set MASTER_ADDR.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tasks.server import free_port
from tests.support.processes import variables_of

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
UP_WITHIN_S, DOWN_WITHIN_S, JOB_WITHIN_S = 60.0, 30.0, 400.0
NODE_LOST_AFTER_S = 10
# AuthInfo: a job that is queued again waits for its credential to expire, which is 120 s by default.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=1000000
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=10
SlurmdTimeout={lost_after_s}
SlurmctldTimeout=10
InactiveLimit=0
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
{nodes}
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"


def find_missing() -> list[str]:
    """Return the programs of Slurm that this machine lacks."""
    return [each for each in PROGRAMS if not shutil.which(each)]


@dataclass
class Cluster:
    """A cluster that runs.

    Attributes:
        daemons: the process of each daemon, by the name of its node; slurmctld's is under that name.
    """

    folder: Path
    daemons: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def run(self, *command: str, **environment: str) -> str:
        """Run one of Slurm's commands; return what it printed."""
        variables = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | environment
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, script: Path, *options: str, **environment: str) -> str:
        """Submit a batch file; return the job's number. Its steps inherit this process's environment."""
        return self.run("sbatch", "--parsable", *options, str(script), **environment).strip()

    def read_job(self, job: str) -> dict[str, str]:
        """Return what the controller says of a job, such as its JobState, Restarts and ExitCode."""
        fields = self.run("scontrol", "show", "job", "-o", job).split()
        return dict(each.split("=", 1) for each in fields if "=" in each)

    def await_state(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job has one of these states; return what the controller says of it."""
        deadline = time.monotonic() + JOB_WITHIN_S
        while (found := self.read_job(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {job} is {found}"
            time.sleep(0.2)
        return found

    def await_ended(self, job: str) -> dict[str, str]:
        """Wait until a job has ended and will not run again; return what the controller says of it."""
        return self.await_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

    def await_idle(self) -> None:
        """Wait until all nodes are up and have no job."""
        deadline = time.monotonic() + UP_WITHIN_S
        while len({*self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()}) < len(self.daemons) - 1:
            assert time.monotonic() < deadline, self.run("sinfo")
            time.sleep(0.2)

    def lose_node(self, name: str) -> None:
        """Kill a node's daemon, and every process of the jobs on it."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        for process in find_processes(SLURMD_NODENAME=name, SLURM_CONF=self.conf):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        (self.folder / name).mkdir(exist_ok=True)
        _start(self, name, "slurmd", "-D", "-N", name, "-f", self.conf)

    @property
    def conf(self) -> str:
        return str(self.folder / "slurm.conf")


def find_processes(**variables: str) -> list[psutil.Process]:
    """Return the processes that have these environment variables."""
    return [process for process in psutil.process_iter() if variables.items() <= variables_of(process).items()]


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: int, *, tracking: str = "linuxproc", is_up: bool = True) -> Iterator[Cluster]:
    """Bring up a cluster, and end it and everything that runs on it after the block.

    Args:
        tracking: how the nodes find a step's processes. With ``cgroup`` they need root.
        is_up: whether to start the nodes, too; if not, only the controller answers.
    """
    host = socket.gethostname()
    (folder / "state").mkdir(parents=True)
    names = [f"n{number}" for number in range(nodes)]
    lines = [NODE.format(name=name, host=host, port=free_port()) for name in names]
    (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=host,
            port=free_port(),
            user=getpass.getuser(),
            tracking=tracking,
            folder=folder,
            lost_after_s=NODE_LOST_AFTER_S,
            nodes="\n".join(lines),
        )
    )
    cluster = Cluster(folder)
    try:
        _start(cluster, "slurmctld", "slurmctld", "-D", "-c", "-f", cluster.conf)
        if is_up:
            for name in names:
                cluster.start_node(name)
            cluster.await_idle()
        yield cluster
    finally:
        _end(cluster)


def _start(cluster: Cluster, name: str, *command: str) -> None:
    with (cluster.folder / f"{name}.out").open("ab") as out:
        cluster.daemons[name] = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _end(cluster: Cluster) -> None:
    """End the jobs, then the daemons, by their numbers."""
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        jobs = cluster.run("squeue", "-h", "-o", "%A").split()
        for job in jobs:
            cluster.run("scancel", job)
    for process in find_processes(SLURM_CONF=cluster.conf):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for daemon in cluster.daemons.values():
        daemon.terminate()
    for daemon in cluster.daemons.values():
        try:
            daemon.wait(DOWN_WITHIN_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
