"""Many lives of a run, each in a process of its own that is forked from one which has imported torch already.

The first answers requests on its standard input, one JSON line each; see `Lives`. What a life does is what a rank and
its attempt do, in one process: build, resume through the gate, train, save, commit; and it may kill itself.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.config import Determinism, RunConfig
from holdfast.determinism import preamble

ROOT = Path(__file__).parent.parent


class Lives:
    """Starts lives; see `live`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, config: RunConfig, kill_at: int = 0, stop_at: int = 0) -> int:
        """Live one life of a run to its end; what `os.waitstatus_to_exitcode` says of it.

        Args:
            kill_at: the step in which SIGKILL ends it; 0 for none.
            stop_at: the step after which it saves and ends; 0 for the end of the run.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"config": config.model_dump(mode="json"), "kill_at": kill_at, "stop_at": stop_at}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def lives() -> Iterator[Lives]:
    """The process that lives are forked from, while the block lasts."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.lives"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | preamble(Determinism()),
    ) as process:  # fmt: skip
        try:
            yield Lives(process)
        finally:
            process.kill()


def live(config: RunConfig, kill_at: int, stop_at: int) -> None:
    """One attempt at a run, killed in the midst of a step if it is told to."""
    from holdfast import checkpoint
    from holdfast.attempt import Line
    from holdfast.errors import CheckpointDamaged, GateTripped
    from holdfast.fingerprint import fingerprint
    from holdfast.journal import Commit, Journal
    from holdfast.store import open_store
    from holdfast.training import Gate, Training, resume, save, train

    training = Training(config)
    journal = Journal(open_store(config.store), config.run)
    journal.begin(config.recipe)
    number = journal.attempts() + 1
    journal.claim_attempt(number, "test", "host", os.getpid(), {})
    settings = fingerprint(config.identity)
    journal.record_config(settings, config.identity, config.model_dump(mode="json"))
    line = Line(journal, number, settings, training.steps_per_epoch)

    def restore(commit: Commit) -> CheckpointDamaged | GateTripped | None:
        try:
            payload = checkpoint.read_payload(journal.store, commit)
            metadata = checkpoint.read_metadata(journal.store, commit.path)
            assert metadata is not None
            resume(training, payload, metadata, Gate("exact"), lambda done, total: None)
        except (CheckpointDamaged, GateTripped) as error:
            return error
        return None

    def report(fields: dict[str, Any]) -> None:
        if fields["step"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    line.resume(restore)
    last = stop_at or training.total_steps
    while (step := line.head.step if line.head else 0) < last:
        stop = min(config.chunk.next_stop(step, training.steps_per_epoch, training.total_steps), last)
        train(training, stop, lambda: False, report)
        parent = line.head.checkpoint_sha256 if line.head else ""
        saved = save(training, journal.store, parent, settings, {})
        assert saved is not None
        line.commit(saved, "chunk")


def main() -> None:
    """Answer requests until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:  # torch imports a thousand modules when it first trains
        live(RunConfig(recipe="tests.varied:averaged", run="first", store=folder), 0, 1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                live(RunConfig.model_validate(request["config"]), request["kill_at"], request["stop_at"])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
