"""The view without a terminal: a line for each commit, attempt, ending and stall, until the run is complete."""

import time
from collections.abc import Callable, Iterable, Iterator

from holdfast.errors import RunGone, StoreError
from holdfast.extensions.watch.health import State, find_speed, judge_health
from holdfast.extensions.watch.reading import RunReader, StoreReader
from holdfast.extensions.watch.seen import Seen
from holdfast.journal import Commit
from holdfast.journal.spikes import describe_spikes
from holdfast.terminal import one_line


class Lines:
    """The lines about one run: each call of `list_new` yields the lines that no earlier call has yielded."""

    def __init__(self) -> None:
        self._commits: set[int] = set()
        self._attempts: set[int] = set()
        self._endings: set[int] = set()
        self._noted: set[str] = set()
        self._state: State | None = None

    def list_new(self, seen: Seen, now: float) -> Iterator[str]:
        """Yield the new lines about a run in chronological order."""
        recent = [commit for commit in seen.commits if commit.number not in self._commits]
        if not self._commits and not self._attempts:  # leave out the older commits, which only the loss curve needs
            recent = [commit for commit in recent if seen.find_parent(commit) or not commit.parent]
        self._commits |= {commit.number for commit in seen.commits}
        for number, record in seen.attempts:
            yield from _describe_commits(seen, [commit for commit in recent if commit.attempt < number])
            recent = [commit for commit in recent if commit.attempt >= number]
            if number not in self._attempts:
                yield f"attempt {number}: {record.why} on {record.host}" if record else f"attempt {number}"
            self._attempts.add(number)
            yield from _describe_commits(seen, [commit for commit in recent if commit.attempt == number])
            recent = [commit for commit in recent if commit.attempt != number]
            ending = seen.find_ending(number)
            if ending is not None and number not in self._endings:
                self._endings.add(number)
                yield f"attempt {number} ended at step {ending.step}: {ending.ending}"
        yield from _describe_commits(seen, recent)
        noted = [*(f"note: {line}" for line in seen.missing), *(f"verdict: {line}" for line in seen.unanswered)]
        yield from (line for line in noted if line not in self._noted)
        self._noted |= {*noted}
        health = judge_health(seen, max(0.0, now - seen.sign_at))
        if health.state != self._state and health.state not in ("training", "starting"):
            yield f"{seen.run} is complete" if health.state == "complete" else str(health)
        self._state = health.state


def _describe_commits(seen: Seen, commits: Iterable[Commit]) -> Iterator[str]:
    for commit in commits:
        yield _describe_commit(seen, commit)
        if commit.slow_rank:
            yield f"note: {commit.slow_rank}"
        yield from (f"note: {text}" for text in describe_spikes(commit.spikes).values())


def _describe_commit(seen: Seen, commit: Commit) -> str:
    parent = seen.find_parent(commit)
    speed = find_speed(seen, commit)
    values = commit.shown_metrics.items()
    numbers = [f"{name} {'not finite' if value is None else f'{value:.4f}'}" for name, value in values]
    numbers += [f"{speed:.3g} steps/s"] if speed else []
    first = f"{parent.step}-" if parent else "" if commit.parent else f"{commit.first_start}-"
    out = "  quarantined" if commit.number in seen.quarantined else ""
    return f"commit {commit.number}: steps {first}{commit.step}  {'  '.join(numbers)}  {commit.path}{out}".rstrip()


def follow(
    reader: RunReader | StoreReader, every_s: float, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Poll the store and yield a line for everything new. If a single run is watched, end when that run is complete.

    If the store can't be reached, yield one line that says so, and continue to poll.

    Args:
        every_s: seconds between two polls.

    Raises:
        RunGone: the single run was moved or deleted.
    """
    known: dict[str, Lines] = {}
    is_reached = True
    while True:
        runs = [reader.seen] if isinstance(reader, RunReader) else reader.seen
        for seen in runs:
            lines = known.setdefault(seen.run, Lines())
            prefix = "" if isinstance(reader, RunReader) else f"{seen.run}: "
            yield from (one_line(f"{prefix}{line}") for line in lines.list_new(seen, time.monotonic()))
        if isinstance(reader, RunReader) and reader.seen.is_over:
            return
        sleep(every_s)
        try:
            reader.poll()
        except RunGone:
            raise
        except StoreError as error:
            if is_reached:
                yield one_line(f"the store doesn't answer; trying again every {every_s:g} s: {error}")
            is_reached = False
            continue
        if not is_reached:
            yield "the store answers again"
        is_reached = True
