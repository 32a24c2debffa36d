"""The socket between an attempt and this machine's ranks that a launcher such as torchrun has started.

These ranks aren't child processes of the attempt, so the attempt can't start them with its pipes. Instead each rank
connects to a socket (`knock`), and the attempt sends it the environment variables and the pipes of a rank. The socket's
name is derived from the launcher's variables. The first rank of a machine creates the socket and starts the attempt,
which inherits the socket.

The socket has an abstract name, so that the kernel removes it when its processes end. Both sides check that the other
side belongs to the same user. Source: unix(7). This module imports no torch.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import ConfigError, NodesMissing, RankDied, RunStopped
from holdfast.machine.processes import is_running
from holdfast.rank.launchers import Slot
from holdfast.terminal import spell_s

# The environment variable that tells the attempt the file descriptor of the socket and the process id of the first
# rank. The attempt is the first rank's child, but the first rank may die before the attempt asks for its parent's id.
DOOR_VARIABLE = "HOLDFAST_DOOR"
LOOK_EVERY_S = 0.5
# How long an earlier attempt may still use the socket's name, if one of its ranks died before all ranks had connected.
NAME_WITHIN_S = 10.0
# How long an attempt that has failed waits for ranks that haven't connected yet, to tell them its exit code.
TELL_WITHIN_S = 10.0
# The launcher's environment variables that differ between two starts of its processes.
KEYS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
PEER = struct.Struct("3i")  # the format of SO_PEERCRED: the ids of the process, the user and the group at the other end
FILES = 4
ANSWER_BYTES = 65536


@dataclass(frozen=True)
class Answer:
    """The attempt's answer to a rank that connects.

    Attributes:
        variables: the environment variables of the ranks.
        files: the file descriptors of the rank's standard input, output and error, and of the pipe for the attempt's
            exit code.
        code: the exit code of an attempt that has already ended; None if the attempt uses the rank.
    """

    variables: dict[str, str] = field(default_factory=dict)
    files: Sequence[int] = ()
    code: int | None = None


def name_door(slot: Slot) -> str:
    """Return the name of this machine's socket. All ranks that a launcher starts together get the same name."""
    if slot.address is None:
        start = [str(os.getpid())]
    else:
        start = [slot.address, str(slot.size), str(slot.node), *(os.environ.get(name, "") for name in KEYS)]
    return "\0holdfast-" + hashlib.sha256(json.dumps([os.getuid(), *start]).encode()).hexdigest()[:32]


def make_door(name: str) -> socket.socket:
    """Create and return the socket of this name. Ranks can connect from now on.

    Raises:
        ConfigError: a launcher was started twice with the same variables, and the other start still waits for ranks.
    """
    door = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + NAME_WITHIN_S
    while True:
        try:
            door.bind(name)
            break
        except OSError:
            if time.monotonic() > deadline:
                door.close()
                raise ConfigError(
                    "another launcher on this machine starts ranks with the same MASTER_ADDR and MASTER_PORT",
                    hint="give each launcher a port of its own, such as torchrun --standalone",
                ) from None
            time.sleep(LOOK_EVERY_S)
    door.listen(1024)
    return door


def knock(name: str, within_s: float) -> Answer:
    """Connect to the socket of this name, and return the attempt's answer.

    Raises:
        NodesMissing: no attempt has answered within ``within_s`` seconds.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as own:
            try:
                own.connect(name)
            except OSError:  # the first rank of this machine hasn't created the socket yet, so try again
                time.sleep(LOOK_EVERY_S / 10)
                continue
            own.settimeout(max(LOOK_EVERY_S, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                if _read_peer(own)[1] == os.getuid():
                    return _receive(own)
            break
    raise NodesMissing(
        f"the first rank of this machine has started an attempt, which has not answered within {spell_s(within_s)}",
        hint="every process that the launcher starts has to call holdfast.attach; compute.wait_s sets the time limit",
    )


def _receive(own: socket.socket) -> Answer:
    text, received, _, _ = socket.recv_fds(own, ANSWER_BYTES, FILES)
    # Files that Python opens are closed when this process executes another program. Received files would stay open, so
    # replace each of them by a duplicate that is closed.
    files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3) for file in received]
    for file in received:
        os.close(file)
    while more := own.recv(ANSWER_BYTES):
        text += more
    if not text:  # the attempt has died without an answer
        return Answer(code=RunStopped.exit_code)
    return Answer(files=files, **json.loads(text))


def _read_peer(end: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end of a connection."""
    process, user, _ = PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return process, user


class Door:
    """The attempt's side of the socket.

    Attributes:
        is_open: whether the attempt has not answered the ranks yet.
    """

    def __init__(self, listening: socket.socket, count: int, first: int) -> None:
        """
        Args:
            count: the number of this machine's ranks.
            first: the process id of the first rank of this machine.
        """
        self._first = first
        self.is_open = True
        self._listening, self._count = listening, count
        self._told_of_end, self._end = os.pipe()
        self._guests: list[int] = []

    def let_in(self, variables: Mapping[str, str], files: Sequence[int], within_s: float) -> list[int]:
        """Wait until all ranks have connected. Give each rank the variables and files. Return the ranks' process ids.

        Args:
            files: the file descriptors for the ranks' standard input, output and error.

        Raises:
            NodesMissing: a rank has not connected within ``within_s`` seconds.
            RankDied: the first rank has ended meanwhile.
        """
        self.is_open = False
        answer = json.dumps({"variables": dict(variables)}).encode()
        with self._listening:
            if not self._answer(answer, [*files, self._told_of_end], within_s):
                if not is_running(self._first):
                    raise RankDied("the first rank of this machine has ended before the others connected")
                raise NodesMissing(
                    f"{len(self._guests)} of {self._count} ranks connected to the attempt within {spell_s(within_s)}",
                    hint="every process that the launcher starts has to call holdfast.attach; compute.wait_s sets the "
                    "time limit",
                )
        return self._guests

    def _answer(self, answer: bytes, files: Sequence[int], within_s: float) -> bool:
        """Answer each rank that connects, until all have connected. Return False if a rank hasn't connected in time."""
        self._listening.settimeout(LOOK_EVERY_S)
        deadline = time.monotonic() + within_s
        while len(self._guests) < self._count:
            if time.monotonic() > deadline or not is_running(self._first):
                return False
            with contextlib.suppress(OSError):  # ignore a timeout, and a rank that has disconnected
                guest, _ = self._listening.accept()
                with guest:
                    process, user = _read_peer(guest)
                    if user == os.getuid():
                        socket.send_fds(guest, [answer], files)
                        self._guests.append(process)
        return True

    def close(self, code: int) -> None:
        """Tell the ranks the attempt's exit code. Wait up to `TELL_WITHIN_S` for ranks that haven't connected yet."""
        if self.is_open:
            self.is_open = False
            with self._listening:
                self._answer(json.dumps({"code": code}).encode(), [], TELL_WITHIN_S)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._end, bytes([code]) * self._count)
