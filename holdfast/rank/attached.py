"""The ranks of an attempt that a launcher such as torchrun has started, instead of the attempt.

The attempt watches, commands and ends these ranks, but can't replace them.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, BinaryIO, ClassVar

from holdfast.config import RunConfig
from holdfast.errors import ConfigError, HoldfastError, RankDied, RunStopped
from holdfast.machine.heartbeats import HEARTBEATS_VARIABLE, RankStanding
from holdfast.machine.processes import LONGEST_EPOCH_VARIABLE, MARK_VARIABLE, is_running
from holdfast.rank.door import Door
from holdfast.rank.first_order import HELD_VARIABLE
from holdfast.rank.launchers import DOCS
from holdfast.rank.launching import Ranks
from holdfast.rank.lived_steps import LIVED_VARIABLE
from holdfast.rank.process import COMMIT_VARIABLE
from holdfast.rank.watches import PATIENCE_VARIABLE

# The longest wait for the other ranks after a rank has ended. They end by themselves, or their launcher ends them; the
# attempt kills ranks that still run after this time.
ALONE_WITHIN_S = 30.0
LOOK_EVERY_S = 0.5
# How long a process may take to end after it has closed its pipes.
GONE_WITHIN_S = 0.3
# The environment variables that the attempt sets for all ranks of a machine.
TOLD = (
    MARK_VARIABLE, HEARTBEATS_VARIABLE, LONGEST_EPOCH_VARIABLE, PATIENCE_VARIABLE, LIVED_VARIABLE, HELD_VARIABLE,
    COMMIT_VARIABLE,
)  # fmt: skip
RESTART = "start the launcher again; the run then continues from the last verified checkpoint"


class AttachedProcesses:
    """The processes of this machine's ranks, with the interface of a single process, which `Ranks` expects.

    The processes count as ended when all of them have closed their pipe, although they still wait for the attempt's
    exit code.

    Attributes:
        pids: the ids of the processes.
        first_gone: the ids of the processes that ended first.
    """

    def __init__(self, pids: Sequence[int], stdin: IO[str], stdout: IO[str]) -> None:
        self.pids, self.stdin, self.stdout = pids, stdin, stdout
        self.first_gone: list[int] = []
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.pids[0]

    def poll(self) -> int | None:
        return 0 if self.stdout.closed or not any(map(is_running, self.pids)) else None

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(LOOK_EVERY_S / 10)
        return 0

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that still run."""
        for pid in filter(is_running, self.pids):
            os.kill(pid, number)

    def find_gone(self) -> list[int]:
        """Return the ids of the processes that have ended."""
        return [pid for pid in self.pids if not is_running(pid)]

    def _watch(self) -> None:
        """Note which processes end first, and kill the others if they still run `ALONE_WITHIN_S` later."""
        while self.poll() is None:
            self.first_gone = self.find_gone()
            if self.first_gone:
                deadline = time.monotonic() + ALONE_WITHIN_S
                while self.poll() is None and time.monotonic() < deadline:
                    time.sleep(LOOK_EVERY_S)
                if self.poll() is None:
                    self.signal(signal.SIGKILL)
                return
            time.sleep(LOOK_EVERY_S)


class AttachedRanks(Ranks):
    """The ranks of one attempt, as processes that a launcher such as torchrun has started; see `Ranks`.

    Attributes:
        door: the socket to which the ranks connect. The attempt's process sets this class attribute before it
            constructs the attempt; see `Door`.
    """

    door: ClassVar[Door | None] = None
    _process: AttachedProcesses

    def __init__(
        self, config: RunConfig, log_path: Path, commit: int = 0, *, patience: float = 1.0, lived: Path | None = None,
        is_held: bool = False,
    ) -> None:  # fmt: skip
        """Wait until all ranks of this machine have connected.

        Args:
            is_held: not used, because a launcher doesn't start ranks ahead.

        Raises:
            ConfigError: no process of a launcher has started this process.
            RunStopped: the ranks connected earlier, and have ended.
            NodesMissing, RankDied: the ranks haven't connected; see `Door.let_in`.
        """
        door = self.door
        if door is None:
            raise ConfigError(
                'compute.launcher = "attached", but no launcher has started this process',
                hint=f"leave this setting out: holdfast.attach sets it in the script that a launcher starts; {DOCS}",
            )
        if not door.is_open:
            raise RunStopped("the ranks have ended, and only their launcher can start new ones", hint=RESTART)
        within_s = config.compute.wait_s

        def let_in(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> AttachedProcesses:
            return _let_in(door, environment, log, within_s)

        super().__init__(config, log_path, commit, spawn=let_in, patience=patience, lived=lived)

    def signal(self, number: int) -> None:
        self._process.signal(number)

    def _find_others(self) -> list[int]:
        return []

    def list_pids(self) -> list[int]:
        return [*self._process.pids]

    def _find_cause(self) -> HoldfastError | None:
        """Return the error that ended the rank which other ranks have lost; None if that rank is on another machine."""
        cause = super()._find_cause()
        return None if cause is not None and cause.data.get("is_ordered") else cause

    def _describe_end(self) -> HoldfastError:
        """Return the error for ranks that have ended. The error names the ranks that died first."""
        self._events.put(None)
        deadline = time.monotonic() + GONE_WITHIN_S
        while not (gone := self._process.first_gone or self._process.find_gone()) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S / 10)
        beats = {beat.pid: (rank, beat) for rank, beat in self.heartbeats.read().items()}
        own = [beats[pid] for pid in gone if pid in beats]
        dead = sorted(rank for rank, beat in own if beat.standing is RankStanding.TRAINING)
        if self._is_built and not dead:
            return RankDied("the ranks have ended, because their launcher told them to", is_ordered=True)
        named = ", ".join(f"rank {rank}" for rank in dead) or f"process {gone[0]}" if gone else "all ranks"
        return self._log.describe_end(f"{named} died; see the output of the launcher")


def _let_in(door: Door, environment: dict[str, str], log: BinaryIO, within_s: float) -> AttachedProcesses:
    """Wait until all ranks have connected. Give each of them the pipes and variables. Return their processes."""
    variables = {name: environment[name] for name in TOLD}
    (orders, to_ranks), (from_ranks, events) = os.pipe(), os.pipe()
    try:
        pids = door.let_in(variables, [orders, events, log.fileno()], within_s)
    finally:
        os.close(orders)
        os.close(events)
    stdin = os.fdopen(to_ranks, "w", buffering=1, encoding="utf-8")
    return AttachedProcesses(pids, stdin, os.fdopen(from_ranks, encoding="utf-8"))
