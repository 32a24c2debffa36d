"""Many lives of a run, each in a process that is forked from a server process which has imported torch already.

The server answers requests on its standard input, one JSON line each; see `Lives`. A life does the work of a rank and
its attempt in one process: it builds, resumes through the gate, trains, saves and commits, and it may kill itself.
`tests.support.forked` has whole commands, with ranks of their own.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from holdfast.config import Determinism, RunConfig
from holdfast.determinism import preamble

ROOT = Path(__file__).parents[2]


class Lives:
    """The client of the server process: it starts lives; see `live`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, config: RunConfig, kill_at: int = 0, stop_at: int = 0) -> int:
        """Live one life of a run to its end; return its exit code, as from `os.waitstatus_to_exitcode`.

        Args:
            kill_at: the step in which SIGKILL ends it; 0 for none.
            stop_at: the step after which it saves and ends; 0 for the end of the run.
        """
        return self._ask("tests.support.lives:live", [config.model_dump(mode="json"), kill_at, stop_at], {})

    def call(self, function: str, *arguments: Any, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Call ``module:function`` in a process of its own; its return value is the exit code.

        Args:
            arguments: the function's arguments, which JSON has to be able to carry.
            environment: variables to set; the folders in PYTHONPATH go to the front of sys.path.
        """
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            code = self._ask(function, arguments, environment, str(out), str(err))
            return subprocess.CompletedProcess([function, *arguments], code, out.read_text(), err.read_text())

    def _ask(self, *request: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def lives() -> Iterator[Lives]:
    """Run the server process for the block."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.lives"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | preamble(Determinism()),
    ) as process:  # fmt: skip
        try:
            yield Lives(process)
        finally:
            process.kill()


def live(settings: dict[str, Any], kill_at: int, stop_at: int) -> int:
    """Live one attempt of a run in this process; kill it in step ``kill_at``, if that isn't 0."""
    from holdfast import checkpoint
    from holdfast.attempt import Line
    from holdfast.errors import CheckpointDamaged, GateTripped
    from holdfast.fingerprint import fingerprint
    from holdfast.journal import Commit, Journal
    from holdfast.store import open_store
    from holdfast.training import Gate, Training, begin_save, resume, train

    config = RunConfig.model_validate(settings)
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
        train(training, stop, lambda: False, report)
        begin_save(training, journal.store, trained_with, {})
        saved = training.saver.wait()
        assert saved is not None
        line.commit(saved, "chunk")
    return 0


def answer(function: str, arguments: list[Any], environment: dict[str, str], out: str = "", err: str = "") -> int:
    """Answer one request in this process; return the exit code."""
    for number, path in ((1, out), (2, err)):
        if path:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
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
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def main() -> None:
    """Answer requests until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:  # a first training makes torch import a thousand more modules
        config = {
            "recipe": "tests.support.varied:averaged",
            "run": "first",
            "store": folder,
            "determinism": {"mode": "fast"},
        }
        live(config, 0, 1)  # in the mode "fast", so that each forked life sets determinism for itself
    importlib.import_module("tests.support.forked")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            leave(answer, *json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
