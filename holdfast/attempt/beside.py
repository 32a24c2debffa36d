"""The process beside the ranks that a launcher such as torchrun has started: ``python -m holdfast.attempt.beside``.

On the first machine this process is the attempt. On each other machine it only watches that machine's ranks.
`holdfast.attempt.attaching` starts this process. It ends with a command's exit code, and tells its ranks this code.
"""

import os
import signal
import socket
import sys

from cyclopts import App

from holdfast.attempt.attaching import LAUNCHER_VARIABLE
from holdfast.attempt.attempt import Attempt
from holdfast.attempt.carrying import watch_attached
from holdfast.attempt.life import Acts, Cause, find_ending, surrounded, train
from holdfast.attempt.progress import CommitLines, ProgressView, log_plain_lines
from holdfast.errors import RankDied
from holdfast.journal.endings import Ending
from holdfast.machine.preemption import Notice, Source
from holdfast.machine.processes import is_running
from holdfast.rank.attached import AttachedRanks
from holdfast.rank.door import DOOR_VARIABLE, Door
from holdfast.rank.launcher_signals import STOPPED_EARLY
from holdfast.rank.process import find_node, read_environment
from holdfast.terminal import interrupt
from holdfast.terminal.command import run_app

# Open and train without retries, because a retry needs new ranks. Only the launcher can start them, for the next
# attempt.
ONCE = Acts(open=Attempt.open, train_chunk=Attempt.train_chunk)
# The exit codes that the launcher gets unchanged. Any other exit code, such as that of a signal, becomes STOPPED_EARLY.
CODES = (0, 1, 2, STOPPED_EARLY)

app = App()


@app.default
def accompany() -> None:
    """Train the run with the ranks that the launcher started. On machines other than the first, watch the ranks."""
    config, _ = read_environment()
    log_plain_lines()
    if find_node(config.compute):
        watch_attached(config)
        return
    sources = watch_launcher(os.environ[LAUNCHER_VARIABLE], config.resume.stop_within_s)
    with surrounded(config):
        result = train(config, [CommitLines(), ProgressView()], ONCE, sources=sources, find_ending=find_attached_ending)
    print(result.describe(config.store))


def watch_launcher(pid: str, stop_within_s: float) -> list[Source]:
    """Return, in a list, a source of notices that reports the launcher's end; an empty list without a launcher.

    If torchrun is killed, its ranks survive. If they trained on and torchrun were started again, two attempts would
    train one run.
    """

    def look() -> Notice | None:
        has_ended = not is_running(int(pid))
        return Notice("the launcher of the ranks has ended", stop_within_s, is_at_once=True) if has_ended else None

    return [look] if pid else []


def find_attached_ending(cause: Cause) -> Ending:
    """Return an attempt's ending by its cause: ``preempted`` if the launcher has told the ranks to end."""
    if isinstance(cause, RankDied) and cause.data.get("is_ordered"):
        return Ending("preempted", cause.message)
    return find_ending(cause)


def main() -> int:
    """Run the process beside the ranks. Return its exit code, after telling the ranks this code."""
    config, _ = read_environment()
    number, first = map(int, os.environ.pop(DOOR_VARIABLE).split())
    door = AttachedRanks.door = Door(socket.socket(fileno=number), config.compute.rank_count, first)
    signal.signal(signal.SIGTERM, interrupt.end)
    code = 1
    try:
        code = run_app(app, [])
    except SystemExit:
        code = STOPPED_EARLY
    finally:
        code = code if code in CODES else STOPPED_EARLY
        door.close(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
