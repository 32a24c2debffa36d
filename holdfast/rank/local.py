"""`python -m holdfast.rank.local NUMBER SECONDS COMMAND...`: start a run's ranks on this machine, and await their end.

The ranks find each other through a file in memory that only they inherit, and connect over the loopback interface. So
nothing listens where another machine can reach it. torchrun would serve key-value stores on all interfaces, without a
secret, and read pickles from them. If a rank fails, this process ends the other ranks. Ranks that were told to end are
killed after a number of seconds, unless they save. It imports no torch.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from holdfast.machine.heartbeats import HEARTBEATS_VARIABLE, Phase, read_beats_of
from holdfast.machine.processes import MEETING_VARIABLE
from holdfast.rank.rendezvous import INTERFACE_VARIABLES, find_interface
from holdfast.store.modules import python_command

LOCAL_MODULE = "holdfast.rank.local"
LOOPBACK = "127.0.0.1"
# Signals that this process passes on to the ranks, as torchrun does.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LOOK_EVERY_S = 0.05


def make_local_command(count: int, kill_s: float, rank: list[str]) -> list[str]:
    """Return the command that starts a number of ranks, each by the command ``rank``.

    Args:
        kill_s: the seconds after which a rank that was told to end is killed.
    """
    return python_command("-m", LOCAL_MODULE, str(count), str(kill_s), *rank)


def open_meeting() -> int:
    """Return a new file in memory through which ranks find each other. It ends with the last process that has it."""
    return os.memfd_create("holdfast-ranks")


def list_variables(count: int, meeting: int) -> Iterator[dict[str, str]]:
    """Yield the environment variables of each rank: those that torchrun sets, and the loopback interface.

    Libraries read them. ``MASTER_PORT`` is a free port, at which nothing listens.

    Args:
        meeting: the descriptor of `open_meeting`, which the ranks inherit.
    """
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    interface = find_interface(LOOPBACK)
    interfaces = dict.fromkeys(INTERFACE_VARIABLES, interface) if interface else {}
    for number in range(count):
        yield interfaces | {
            "RANK": str(number), "LOCAL_RANK": str(number), "ROLE_RANK": str(number), "ROLE_NAME": "default",
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "ROLE_WORLD_SIZE": str(count),
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "holdfast", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            MEETING_VARIABLE: f"/proc/self/fd/{meeting}",
        }  # fmt: skip


class LocalRanks:
    """The processes of the ranks. Signals to this process are passed on to them."""

    def __init__(self, kill_s: float) -> None:
        """
        Args:
            kill_s: see `make_local_command`.
        """
        self._kill_s = kill_s
        self._kill_at: float | None = None
        self._ranks: list[subprocess.Popen[bytes]] = []
        for number in PASSED_ON:
            signal.signal(number, self.end)

    def start(self, count: int, command: list[str]) -> None:
        """Start a number of ranks."""
        meeting = open_meeting()
        for own in list_variables(count, meeting):
            self._ranks.append(
                subprocess.Popen(command, env=os.environ | own, pass_fds=[meeting], start_new_session=True)
            )
        os.close(meeting)

    def end(self, number: int, _frame: FrameType | None = None) -> None:
        """Send a signal to the ranks that are left, and kill them some time later."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._kill_s
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def wait(self) -> int:
        """Wait for all ranks. Return 0, or 1 if a rank has failed; write into the log how each rank failed."""
        left, is_failed, killed = dict(enumerate(self._ranks)), False, set[int]()
        while left:
            for number, code in [(number, rank.poll()) for number, rank in left.items()]:
                if code is not None:
                    del left[number]
                if code and number not in killed:
                    say = f"{LOCAL_MODULE}: failed (exitcode: {code}) local_rank: {number}"
                    print(say, file=sys.stderr, flush=True)
                if code and not is_failed:
                    is_failed = True
                    self.end(signal.SIGTERM)
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                saving = _list_saving()
                for number, rank in left.items():
                    if rank.pid not in saving:
                        killed.add(number)
                        rank.kill()
            time.sleep(LOOK_EVERY_S)
        return int(is_failed)


def _list_saving() -> set[int]:
    """Return the process ids of the ranks that save. The attempt ends a save that hangs, or that takes too long."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        beats = read_beats_of(Path(os.environ[HEARTBEATS_VARIABLE]))
        return {beat.pid for beat in beats.values() if beat.phase is Phase.SAVING}
    return set()


def main() -> int:
    """Start the ranks and wait for their end."""
    ranks = LocalRanks(float(sys.argv[2]))
    ranks.start(int(sys.argv[1]), sys.argv[3:])
    return ranks.wait()


if __name__ == "__main__":
    sys.exit(main())
