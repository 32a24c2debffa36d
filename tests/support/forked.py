"""Commands in processes that are forked from one which has imported everything already; see `tests.support.lives`.

Each command is a function from JSON arguments to an exit code. Its ranks are processes of their own, but forked from it
instead of started by Python, which saves them the seconds to import torch. Their pipes and their deaths are those of
real ranks.
"""

import contextlib
import functools
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch
from accelerate.state import AcceleratorState

import holdfast.cli
from holdfast import errors
from holdfast.attempt import Acts, Attempt, AttemptView, Chunk, Observer, due, live
from holdfast.checkpoint import Saved
from holdfast.config import RunConfig, load_config
from holdfast.errors import HoldfastError
from holdfast.journal import Journal
from holdfast.machine import faults
from holdfast.machine.determinism import separate_threads
from holdfast.machine.processes import RANK_MODULE
from holdfast.proof.audit import audit_commit
from holdfast.proof.prove import prove
from holdfast.rank import serving
from holdfast.rank.launching import Ranks
from holdfast.rank.local import LOCAL_MODULE, list_variables, open_meeting
from holdfast.rank.spawn import start_process
from holdfast.recipe.trust import Trust
from holdfast.store import open_store
from tests.support.device import ON_GPUS
from tests.support.lives import Lives, leave
from tests.support.mutants import find_fault

# Python's audit events by which a process opens, imports, connects to or executes something.
OPENING = {
    "open", "import", "exec", "os.listdir", "os.scandir", "os.mkdir", "os.exec", "os.posix_spawn", "os.system",
    "subprocess.Popen", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "shutil.copyfile",
}  # fmt: skip
KILLS_AFTER_S = 30  # as holdfast.rank.local does

# Only a run that asks for rehearsals has them: a slow machine must not decide it.
due.SHORT_S = 1e12


class Rank:
    """A rank as a process that is forked from this one; it has the interface of `holdfast.rank.spawn.Process`.

    Several ranks are forked from that process in turn.
    """

    main: Callable[[], int] = staticmethod(serving.main)

    def __init__(self, env: dict[str, str], stderr: BinaryIO, count: int = 1) -> None:
        self.returncode: int | None = None
        orders, orders_in = os.pipe()
        events, events_in = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number, descriptor in enumerate((orders, events_in, stderr.fileno())):
                os.dup2(descriptor, number)
            for descriptor in (orders, orders_in, events, events_in):
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(env)
            separate_threads()
            # The server's first training was a single rank's, without autocast.
            AcceleratorState._reset_state(reset_partial_state=True)
            leave(self.main if count == 1 else functools.partial(launch, self.main, count))
        os.close(orders)
        os.close(events_in)
        self.stdin = os.fdopen(orders_in, "w", buffering=1)
        self.stdout = os.fdopen(events)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def launch(main: Callable[[], int], count: int) -> int:
    """Do as `holdfast.rank.local` does: start several ranks, and end all if one fails. Return 0 if none has failed."""
    ranks, failed, meeting = dict[int, int](), 0, open_meeting()
    for number, own in enumerate(list_variables(count, meeting)):
        pid = os.fork()
        if pid == 0:
            os.environ.update(own)
            leave(main)
        ranks[pid] = number
    while ranks:
        pid, status = os.wait()
        number = ranks.pop(pid, 0)
        failed = failed or status
        if status:
            code = os.waitstatus_to_exitcode(status)
            print(f"{LOCAL_MODULE}: failed (exitcode: {code}) local_rank: {number}", file=sys.stderr, flush=True)
        for other in ranks if status else ():
            os.kill(other, signal.SIGTERM)
        if status and ON_GPUS:  # a rank that waits for a dead one in NCCL doesn't notice SIGTERM
            signal.signal(signal.SIGALRM, lambda *_: [os.kill(other, signal.SIGKILL) for other in ranks])
            signal.alarm(KILLS_AFTER_S)
    return int(bool(failed))


def spawn(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Rank:
    """Fork the ranks that a command would start, one by itself or several by `holdfast.rank.local`."""
    return Rank(environment, log, count_ranks(command))


def count_ranks(command: Sequence[str]) -> int:
    """Return the number of ranks that a command starts by itself on this machine."""
    return int(command[command.index(LOCAL_MODULE) + 1]) if LOCAL_MODULE in command else 1


def serve_ranks(count: int) -> int:
    """Be a rank, or fork several in turn."""
    AcceleratorState._reset_state(reset_partial_state=True)  # as in `Rank`
    if count > 1:
        return launch(serve_one, count)
    return serve_one()


def serve_one() -> int:
    separate_threads()
    return serving.main()


def spawn_from(nursery: Lives, command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Any:
    """Let a server fork the ranks, where this process can't."""
    if list(command[-2:]) != ["-m", RANK_MODULE] or "torch.distributed.run" in command:
        return start_process(command, environment, log)
    orders, orders_in = os.pipe()
    events, events_in = os.pipe()
    files = (orders, events_in, log.fileno())
    ranks: Any = nursery.start(
        "tests.support.forked:serve_ranks", count_ranks(command), environment=environment, files=files
    )
    os.close(orders)
    os.close(events_in)
    ranks.stdin = os.fdopen(orders_in, "w", buffering=1)
    ranks.stdout = os.fdopen(events)
    return ranks


def fork_ranks(mutation: str = "") -> None:
    """Let this process fork its ranks from now on, each with a mutation if one is named. On GPUs Python starts them.

    A process that is forked can't use a GPU if torch has looked for GPUs before.
    """
    if ON_GPUS:
        assert not mutation, "only ranks that are forked can have one"
        return
    own = os.getpid()
    apply = find_fault(mutation)
    Rank.main = staticmethod(lambda: apply() or serving.main())
    Ranks.spawn = staticmethod(spawn)
    faults.is_rank = lambda pid: pid != own  # their command line is this process's


# ---- the commands


def command(*arguments: str) -> int:
    """Run ``holdfast`` with these arguments."""
    fork_ranks()
    return holdfast.cli.run_app(holdfast.cli.app, arguments)


def watched(word: str, mark: str, *arguments: str) -> int:
    """Run ``holdfast``. Write each event into the file ``mark`` by which it or a rank opens, imports, connects to or
    executes something whose name contains ``word``.
    """

    def note(event: str, values: tuple[object, ...]) -> None:
        if event in OPENING and word in repr(values):
            os.write(marked, f"{event} {values!r}\n".encode())

    marked = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.addaudithook(note)
    return command(*arguments)


def main(*arguments: str) -> int:
    """Run the console script ``holdfast`` with these arguments: as `command`, but with its answer to SIGTERM."""
    fork_ranks()
    sys.argv = ["holdfast", *arguments]
    holdfast.cli.main()
    return 0


def train(path: str, settings: list[str]) -> int:
    """Run ``holdfast train``."""
    return command("train", path, *(option for setting in settings for option in ("--set", setting)))


def train_until_killed(path: str, victim: str, after_s: float) -> int:
    """Run ``holdfast train``; after some seconds kill it (``self``), its ranks (``rank``) or ``both`` with SIGKILL."""
    own = os.getpid()
    killer = os.fork()
    if killer == 0:
        time.sleep(after_s)
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(own)
            ranks = [child for child in process.children() if child.pid != os.getpid()]
            for each in {"self": [process], "rank": ranks, "both": [*ranks, process]}[victim]:
                each.kill()
        os._exit(0)
    return train(path, [])


def train_until_ended(path: str) -> int:
    """Train a run to its end; once that is on record, and before the report has it, SIGKILL ends this process."""

    class Kill(Observer):
        def ended(self, attempt: AttemptView) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    fork_ranks()
    live(load_config(Path(path), []), [Kill()])
    return 0


def train_chunks(settings: dict[str, Any], chunks: int) -> int:
    """Train this number of chunks of a run, or to its end, without a retry; print an error as JSON."""
    fork_ranks()
    try:
        live_for(chunks, RunConfig.model_validate(settings))
    except HoldfastError as error:
        print(json.dumps(errors.to_json(error)))
        return error.exit_code
    return 0


def live_for(chunks: int, config: RunConfig) -> None:
    """Live a life of this number of chunks, or to the run's end, without a retry."""

    def train_chunk(attempt: Attempt, chunk: Chunk) -> Saved | None:
        nonlocal chunks
        if not chunks:
            raise Enough
        chunks -= 1
        return attempt.train_chunk(chunk)

    with contextlib.suppress(Enough):
        live(config, acts=Acts(train_chunk=train_chunk))


class Enough(Exception):
    """The exception that ends a life after its number of chunks."""


def prove_mutated(mutation: str, settings: dict[str, Any], steps: int, kills: int, seed: int) -> int:
    """Prove with a mutation in the ranks (empty for none); print the proof as JSON, or the error."""
    fork_ranks(mutation)
    try:
        print(prove(RunConfig.model_validate(settings), steps, kills, seed).model_dump_json())
    except HoldfastError as error:
        print(errors.to_json(error)["class"], error, f"({error.hint})")
        return error.exit_code
    return 0


def audit_mutated(mutation: str, settings: dict[str, Any]) -> int:
    """Train a run in two attempts, audit its newest commit and print the audit, all with a mutation in the ranks."""
    fork_ranks(mutation)
    config = RunConfig.model_validate(settings)
    for chunks in (2, 1):
        live_for(chunks, config)
    journal = Journal(open_store(config.store), config.run)
    newest = journal.newest()
    assert newest is not None
    print(audit_commit(journal, newest, trust=Trust(config=config)).model_dump_json())
    return 0


def run_script(path: str) -> int:
    """Run a training script as ``python PATH`` does, on one thread as a rank."""
    torch.set_num_threads(1)
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
    return 0
