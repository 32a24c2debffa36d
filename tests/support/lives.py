"""Many lives of a run, each in a process that is forked from a server process which has imported torch already.

The server answers requests on its standard input, one JSON line each; see `Lives`. Open files come through a socket. A
life does the work of a rank and its attempt in one process: it builds, resumes through the gate, trains, saves and
commits, and it may kill itself. `tests.support.forked` has whole commands, with ranks of their own.

In `make test-gpus` the server imports no torch, and each process does: if torch has looked for GPUs in a process, its
children can't use one.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from holdfast.config import Determinism, RunConfig
from holdfast.machine.determinism import choose_spins, preamble
from tests.support.device import ON_GPUS
from tests.support.processes import command_of

ROOT = Path(__file__).parents[2]
NUMBER = struct.Struct("i")
STACKS_SIGNAL = signal.SIGQUIT  # Holdfast gives it no meaning
# Less than pytest's timeout, so that the server is free for the next test. GPUs are lent by the minute, and a call that
# hangs on them leaves time for others.
CALL_WITHIN_S = 200 if ON_GPUS else 600
STACKS_WITHIN_S = 3.0
FLOWS = "tests.support.forked_flows"
# torch.cuda.is_available asks the driver's library, not CUDA, so that a process that imports torch can still fork.
LOOK_WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} if ON_GPUS else {}


class Forked:
    """A process that the server has started: the part of `subprocess.Popen` that tests and ranks use."""

    def __init__(self, report: int) -> None:
        """
        Args:
            report: the pipe that brings the process's id, and later its exit code.
        """
        self.returncode: int | None = None
        self._report = report
        weakref.finalize(self, os.close, report)
        self.pid = self._read()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], 0)[0]:
            self.returncode = self._read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = self._read()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self) -> int:
        return int(NUMBER.unpack(os.read(self._report, NUMBER.size))[0])


class Command(Forked):
    """A command that the server has started, with its output."""

    def __init__(self, report: int, folder: Path) -> None:
        """
        Args:
            folder: with the files ``out`` and ``err``.
        """
        super().__init__(report)
        self._folder = folder
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the command's end; return its output and its errors."""
        self.wait(timeout)
        out, err = ((self._folder / name).read_text("utf-8") for name in ("out", "err"))
        return out, err


class Lives:
    """The client of the server process: it starts lives; see `live`."""

    def __init__(self, pid: int, requests: IO[str], answers: IO[str], files: socket.socket) -> None:
        self._pid, self._requests, self._answers, self._files = pid, requests, answers, files
        self._lock = threading.Lock()

    def start(self, function: str, *arguments: Any, environment: dict[str, str], files: Sequence[int]) -> Forked:
        """Call ``module:function`` in a process that leads a session of its own, and don't wait for its end.

        Args:
            environment: all of the process's variables; the folders in PYTHONPATH go to the front of sys.path.
            files: its standard input, output and error.
        """
        return Forked(self._start(function, arguments, environment, files, Path.cwd(), leads=True))

    def start_command(
        self,
        function: str,
        *arguments: Any,
        environment: dict[str, str],
        folder: Path | None = None,
        stdin: int | None = None,
    ) -> Command:
        """Call ``module:function`` in a process of its own, and don't wait for its end.

        Args:
            environment: all of the process's variables; the folders in PYTHONPATH go to the front of sys.path.
            folder: the folder in which it runs; by default that of this process.
            stdin: its standard input; by default an empty one.
        """
        output = Path(tempfile.mkdtemp())
        with (
            Path(os.devnull).open() as null,
            (output / "out").open("w") as out,
            (output / "err").open("w") as err,
        ):
            files = (null.fileno() if stdin is None else stdin, out.fileno(), err.fileno())
            return Command(self._start(function, arguments, environment, files, folder or Path.cwd()), output)

    def start_flow(
        self, module: str, arguments: Sequence[str], environment: dict[str, str], folder: Path | None = None
    ) -> Command:
        """Start ``python -m`` with a module of flows/; see `start_command`."""
        self.load(FLOWS)
        return self.start_command(f"{FLOWS}:run", module, arguments, environment=environment, folder=folder)

    def call_flow(self, name: str, parameters: dict[str, object], environment: dict[str, str]) -> Command:
        """Call a flow of flows/ from Python, in a process of its own; see `start_command`."""
        self.load(FLOWS)
        return self.start_command(f"{FLOWS}:call", name, parameters, environment=environment)

    def load(self, module: str) -> None:
        """Import a module in the server, so that no process has to that is forked from now on."""
        if not ON_GPUS:
            self._ask("load", module)

    def _start(
        self,
        function: str,
        arguments: Sequence[Any],
        environment: dict[str, str],
        files: Sequence[int],
        folder: Path,
        leads: bool = False,
    ) -> int:
        report, reported = os.pipe()
        self._ask("start", function, arguments, environment, str(folder), leads, files=(*files, reported))
        os.close(reported)
        return report

    def run(self, config: RunConfig, kill_at: int = 0, stop_at: int = 0) -> int:
        """Live one life of a run to its end; return its exit code, as from `os.waitstatus_to_exitcode`.

        Args:
            kill_at: the step in which SIGKILL ends it; 0 for none.
            stop_at: the step after which it saves and ends; 0 for the end of the run.
        """
        return self._ask("call", "tests.support.lives:live", [config.model_dump(mode="json"), kill_at, stop_at], {})

    def call(self, function: str, *arguments: Any, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Call ``module:function`` in a process of its own; its return value is the exit code.

        If it hasn't ended after `CALL_WITHIN_S`, kill it and its ranks; its errors then have their stacks.

        Args:
            arguments: the function's arguments, which JSON has to be able to carry.
            environment: variables to set; the folders in PYTHONPATH go to the front of sys.path.
        """
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            code = self._ask("call", function, arguments, environment, str(out), str(err), hung=err)
            return subprocess.CompletedProcess([function, *arguments], code, out.read_text(), err.read_text())

    def _ask(self, *request: Any, files: Sequence[int] = (), hung: Path | None = None) -> int:
        with self._lock:
            if files:
                socket.send_fds(self._files, [b"."], files)
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            if hung and not select.select([self._answers], [], [], CALL_WITHIN_S)[0]:
                kill_hung(psutil.Process(self._pid), hung)
            return int(self._answers.readline())


def kill_hung(server: psutil.Process, report: Path) -> None:
    """Append the stacks of a server's processes to a file, and kill these processes."""
    found = server.children(recursive=True)
    logs = {Path(f"/proc/{process.pid}/fd/2").resolve() for process in found}
    for number, wait_s in ((STACKS_SIGNAL, STACKS_WITHIN_S), (signal.SIGKILL, 0.0)):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        time.sleep(wait_s)
    with report.open("a") as file:
        file.write(f"\nkilled after {CALL_WITHIN_S} s\n")
        file.writelines(f"---- {log}\n{log.read_text()}" for log in logs - {report.resolve()} if log.is_file())


def ranks_of(pid: int) -> list[psutil.Process]:
    """Return the ranks that a process has started, or that were forked for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children(recursive=True) if is_rank(child)]
    return []


def is_rank(process: psutil.Process) -> bool:
    """Return whether a process is a rank. A forked rank has the server's command line and a session of its own."""
    command = command_of(process)
    with contextlib.suppress(ProcessLookupError):
        return "holdfast.rank" in command or (__spec__.name in command and os.getsid(process.pid) == process.pid)
    return False


@contextlib.contextmanager
def lives(preparation: str = f"{__name__}:prepare") -> Iterator[Lives]:
    """Run the server process for the block.

    Args:
        preparation: the function, as ``module:function``, that the server calls first, unless it is on GPUs.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __spec__.name, str(theirs.fileno()), preparation],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=choose_spins(os.environ) | os.environ | preamble(Determinism()) | LOOK_WITHOUT_CUDA,
        pass_fds=[theirs.fileno()],
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Lives(process.pid, process.stdin, process.stdout, ours)
        finally:
            process.kill()


def fork_server() -> Lives:
    """Fork a server from this process, which must have a single thread. The server ends with this process."""
    requests, requests_in = os.pipe()
    answers, answers_in = os.pipe()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.close(requests_in)
        os.close(answers)
        ours.close()
        with os.fdopen(requests) as asked, os.fdopen(answers_in, "w") as answered:
            serve(asked, answered, theirs)
        os._exit(0)
    os.close(requests)
    os.close(answers_in)
    theirs.close()
    return Lives(pid, os.fdopen(requests_in, "w"), os.fdopen(answers), ours)


def live(settings: dict[str, Any], kill_at: int, stop_at: int) -> int:
    """Live one attempt of a run in this process; kill it in step ``kill_at``, if that isn't 0."""
    from holdfast import checkpoint
    from holdfast.attempt import Line
    from holdfast.errors import CheckpointDamaged, GateTripped
    from holdfast.journal import Commit, Journal
    from holdfast.provenance.fingerprint import fingerprint
    from holdfast.store import open_store
    from holdfast.training import Gate, SaveRequest, Training, begin_save, resume
    from tests.support.trainings import train_to

    config = RunConfig.model_validate(settings)
    if kill_at:  # it is killed when it reports the step
        config = config.model_copy(update={"log": config.log.model_copy(update={"every": 1})})
    training = Training(config)
    journal = Journal(open_store(config.store), config.run)
    journal.begin(config.recipe)
    number = journal.attempts() + 1
    journal.claim_attempt(number, "test", "host", os.getpid(), {})
    trained_with = fingerprint(config.identity)
    journal.record_config(trained_with, config.identity, config.model_dump(mode="json"))
    line = Line(journal, number, trained_with, training.steps_per_epoch)

    def restore(commit: Commit) -> CheckpointDamaged | GateTripped | None:
        try:
            payload = checkpoint.read_payload(journal.store, commit)
            metadata = checkpoint.read_metadata(journal.store, commit.path)
            assert metadata is not None
            resume(training, payload, metadata, Gate("exact"), lambda done, total: None)
        except (CheckpointDamaged, GateTripped) as error:
            return error
        return None

    def report(done: int, loss: float, steps_per_s: float) -> None:
        if done == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    line.resume(restore)
    last = stop_at or training.total_steps
    while (step := line.head.step if line.head else 0) < last:
        stop = min(config.chunk.next_stop(step, training.steps_per_epoch, training.total_steps), last)
        train_to(training, stop, report=report)
        begin_save(training, SaveRequest(journal.store, trained_with, {}))
        saved = training.saver.wait()
        assert saved is not None
        line.commit(saved, "chunk")
    assert not kill_at, f"the run ended before step {kill_at}"
    return 0


def answer(function: str, arguments: list[Any], environment: dict[str, str], out: str = "", err: str = "") -> int:
    """Answer one request in this process; return the exit code."""
    for number, path in ((1, out), (2, err)):
        if path:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    faulthandler.register(STACKS_SIGNAL, file=2)
    return call(function, arguments, environment)


def keep(
    function: str, arguments: list[Any], environment: dict[str, str], folder: str, leads: bool, files: list[int]
) -> int:
    """Start a process that this one's child calls a function in; report its id, and its exit code once it has ended."""
    *streams, report = files
    pid = os.fork()
    if pid == 0:
        if leads:
            os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.write(report, NUMBER.pack(os.getpid()))
        os.chdir(folder)
        os.environ.clear()
    for descriptor in (*streams, report)[: None if pid == 0 else -1]:
        os.close(descriptor)
    if pid == 0:
        return call(function, arguments, environment)
    _, status = os.waitpid(pid, 0)
    os.write(report, NUMBER.pack(os.waitstatus_to_exitcode(status)))
    return 0


def call(function: str, arguments: list[Any], environment: dict[str, str]) -> int:
    """Call a function with these variables in the environment; return the exit code that it returns."""
    os.environ.update(environment)
    tempfile.tempdir = None  # forget the cached folder: TMPDIR may have changed
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    module, _, name = function.partition(":")
    return int(getattr(importlib.import_module(module), name)(*arguments))


def leave(function: Callable[..., int], *arguments: Any) -> NoReturn:
    """Call a function and end this process with the exit code that it returns."""
    code = 1
    try:
        code = function(*arguments)
        sys.stdout.flush()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def serve(requests: IO[str], answers: IO[str], files: socket.socket) -> None:
    """Answer requests until they end; see `Lives`."""
    for line in requests:
        kind, *request = json.loads(line)
        status = 0
        if kind == "load":
            importlib.import_module(*request)
        elif kind == "call":
            pid = os.fork()
            if pid == 0:
                leave(answer, *request)
            _, status = os.waitpid(pid, 0)
        else:
            received = socket.recv_fds(files, 1, 4)[1]
            if os.fork() == 0:
                leave(keep, *request, received)
            for descriptor in received:
                os.close(descriptor)
        with contextlib.suppress(ChildProcessError):  # end the zombies of earlier starts
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def prepare() -> int:
    """Import what all processes need that are forked from this one. Return 0."""
    from holdfast.memory.late_compiler import load_compiler_late

    load_compiler_late()  # as in each rank
    with tempfile.TemporaryDirectory() as folder:  # a first training makes torch import a thousand more modules
        config = {
            "recipe": "tests.support.varied:averaged",
            "run": "first",
            "store": folder,
            "determinism": {"mode": "fast"},
        }
        live(config, 0, 1)  # in the mode "fast", so that each forked life sets determinism for itself
    importlib.import_module("torch._dynamo")  # programs that need it would import it in each of their processes
    importlib.import_module("tests.support.forked")
    return 0


def main() -> None:
    """Answer requests until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not ON_GPUS:
        call(sys.argv[2], [], {})
    with socket.socket(fileno=int(sys.argv[1])) as files:
        serve(sys.stdin, answers, files)


if __name__ == "__main__":
    main()
