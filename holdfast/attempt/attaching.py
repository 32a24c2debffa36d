"""Attached ranks: the processes that a launcher such as torchrun has started become the ranks of one attempt.

The first process of each machine starts another process in its own session (`holdfast.attempt.beside`). On the
first machine the new process is the attempt, on the others it only watches the machine's ranks. The new process
outlives the ranks, so that the attempt can commit the checkpoints that they have saved. It gives the launcher's
processes the pipes and variables of ranks. The launcher's processes then execute ``python -m holdfast.rank``, as the
ranks of ``holdfast train`` do, and keep their process ids.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from holdfast.config import RunConfig, load_config
from holdfast.errors import ConfigError, HoldfastError
from holdfast.machine.processes import MARK_VARIABLE, RANK_MODULE
from holdfast.rank.door import DOOR_VARIABLE, Answer, knock, make_door, name_door
from holdfast.rank.launcher_signals import BESIDE_VARIABLE, END_VARIABLE
from holdfast.rank.launchers import DOCS, Slot, find_slot
from holdfast.rank.process import NODE_VARIABLE
from holdfast.rank.spawn import make_environment
from holdfast.store.modules import python_command
from holdfast.terminal import counted
from holdfast.terminal.command import complain

BESIDE_MODULE = "holdfast.attempt.beside"
# The environment variable with the process id of the launcher, which has started the first rank; empty without a
# launcher. The attempt stops when the launcher has ended.
LAUNCHER_VARIABLE = "HOLDFAST_LAUNCHER"
# Environment variables that torchrun sets for its processes, and that torch reads.
TORCHS = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_*", "TORCHELASTIC_*")


def attach(config: str | Path, overrides: Sequence[str] = ()) -> NoReturn:
    """Make this process a rank of a run, and train the run, under torchrun, ``accelerate launch`` or srun.

    Call it once in each process, as the first statement of the script that the launcher starts::

        import holdfast

        if __name__ == "__main__":
            holdfast.attach("my_model.toml")

    The launcher decides only the number of ranks. The configuration decides everything else: ``holdfast train`` with
    the same number of ranks trains the same bytes. Without a launcher this process is the only rank.

    The call never returns: in this process Holdfast's rank takes the script's place, so no code below the call runs.
    The process ends with the attempt. All ranks have the
    attempt's exit code: 0 if the run is complete, 3 if it isn't and the launcher should start the processes again, 1
    and 2 as documented for commands.

    Args:
        config: the path of the run's configuration.
        overrides: changes of the configuration as ``a.b=value``, with the value in TOML; see `load_config`.
    """
    try:
        code = _become_rank(config, overrides)
    except HoldfastError as error:
        code = complain(error.message, error.hint, error.exit_code)
    sys.exit(code)


def _become_rank(path: str | Path, overrides: Sequence[str]) -> int:
    """Execute the program of a rank.

    If the attempt has ended before it had ranks, return the attempt's exit code instead.

    Raises:
        ConfigError: this process can't be a rank, or the configuration doesn't fit the launcher.
        NodesMissing: the attempt doesn't answer.
    """
    if MARK_VARIABLE in os.environ:
        raise ConfigError(
            "holdfast.attach was called in a training process that holdfast has started (a rank)",
            hint='call holdfast.attach under if __name__ == "__main__", because ranks import the file',
        )
    slot = find_slot()
    config = settle_slot(load_config(path, overrides), slot)
    os.environ[NODE_VARIABLE] = str(slot.node)
    name = name_door(slot)
    beside = _start_beside(config, slot, name) if slot.local_rank == 0 else None
    answer = knock(name, config.compute.wait_s)
    if answer.code is None:
        _execute_rank(config, slot, answer, beside)
    if beside is not None:
        beside.wait()
    return answer.code


def settle_slot(config: RunConfig, slot: Slot) -> RunConfig:
    """Return the configuration with the launcher's numbers of nodes and ranks.

    Raises:
        ConfigError: the configuration asks for other numbers.
    """
    compute = config.compute
    started = f"{slot.launcher} has started" if slot.launcher else "this process was started without a launcher, as"
    if "ranks" in compute.model_fields_set and compute.ranks not in ("all", slot.local_size):
        raise ConfigError(
            f"compute.ranks = {compute.ranks}: {started} {counted(slot.local_size, 'rank')} on this machine",
            hint=f"start {compute.ranks} processes on each machine, or leave compute.ranks out; {DOCS}",
        )
    least, most = compute.node_range
    if "nodes" in compute.model_fields_set and not least <= slot.nodes <= most:
        raise ConfigError(
            f"compute.nodes = {compute.nodes}: {started} ranks on {counted(slot.nodes, 'machine')}",
            hint=f"start the ranks on {compute.nodes} machines, or leave compute.nodes out; {DOCS}",
        )
    return config.attached(slot.nodes, slot.local_size)


def _start_beside(config: RunConfig, slot: Slot, name: str) -> "subprocess.Popen[bytes]":
    """Start the process beside this machine's ranks: the attempt, or a process that only watches the ranks."""
    launcher = str(os.getppid()) if slot.launcher else ""
    with make_door(name) as door:
        told = {LAUNCHER_VARIABLE: launcher, DOOR_VARIABLE: f"{door.fileno()} {os.getpid()}"}
        return subprocess.Popen(
            python_command("-m", BESIDE_MODULE),
            env=make_environment(config, 0) | told,
            stdin=subprocess.DEVNULL,
            pass_fds=[door.fileno()],
            start_new_session=True,
        )


def _execute_rank(config: RunConfig, slot: Slot, answer: Answer, beside: "subprocess.Popen[bytes] | None") -> NoReturn:
    """Give this process the pipes and the variables of a rank, and execute its program."""
    kept = {name: value for name, value in os.environ.items() if any(fnmatchcase(name, each) for each in TORCHS)}
    own = slot.variables | {END_VARIABLE: str(answer.files[3])}
    if beside is not None:
        own[BESIDE_VARIABLE] = str(beside.pid)
    environment = make_environment(config, 0) | kept | own | answer.variables
    sys.stdout.flush()
    sys.stderr.flush()
    for number, file in enumerate(answer.files[:3]):
        os.dup2(file, number)
    os.set_inheritable(answer.files[3], True)
    os.execve(sys.executable, python_command("-m", RANK_MODULE), environment)
