"""What a person sees of a run in Prefect's UI: a bar that moves, a table of chunks, a summary.

Sent by a thread of its own, the newest only, so that a slow or absent server never holds up a run.
"""

import contextlib
import contextvars
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import SyncClientContext

from holdfast.attempt import Attempt
from holdfast.journal import Commit, Journal
from holdfast.standing import Standing, read_standing

log = logging.getLogger("holdfast.reporting")

# Each time is a request, and some milliseconds of the processor, the server's own among them.
BAR_EVERY_S = 10.0
SENT_WITHIN_S = 10.0
ROWS = 200


@contextlib.contextmanager
def reported(attempt: Attempt) -> Iterator[Callable[[Attempt], None]]:
    """Show the attempt's progress as an artifact of the flow run that it is in, while the block lasts.

    Yields:
        the hook that adds the newest commit to the artifact that lists them.
    """
    pending: dict[str, Callable[[], object]] = {}  # what is newer takes the place of what waits
    news, done = threading.Event(), threading.Event()
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(_send, pending, news, done), name="reporting", daemon=True)
    thread.start()

    def send(name: str, job: Callable[[], object]) -> None:
        pending[name] = job
        news.set()

    key = key_of(attempt.config.run)
    bar: list[Any] = []  # the artifact's id, once there is one
    table: list[Any] = []
    rows: list[dict[str, Any]] = []
    last_sent = 0.0
    watch = attempt.watch

    def show_bar(step: int, text: str) -> None:
        percent = 100.0 * step / attempt.total_steps
        if bar:
            update_progress_artifact(bar[0], percent, text)
        else:
            bar.append(create_progress_artifact(percent, f"{key}-progress", text))

    def show_table(rows: list[dict[str, Any]]) -> None:
        if table:
            with SyncClientContext.get_or_create() as context:
                context.client.update_artifact(table[0], ArtifactUpdate(data=json.dumps(rows)))
        else:
            table.append(create_table_artifact(rows, f"{key}-chunks", f"chunks of {attempt.config.run}"))

    def show(event: dict[str, Any]) -> None:
        nonlocal last_sent
        watch(event)
        if event["event"] == "progress" and time.monotonic() - last_sent > BAR_EVERY_S:
            last_sent = time.monotonic()
            text = f"step {event['step']} of {attempt.total_steps}, loss {event['loss']:.4f}"
            send("bar", lambda: show_bar(event["step"], text))

    def show_chunk(attempt: Attempt) -> None:
        commit = attempt.head
        assert commit is not None
        rows.append(describe_chunk(attempt.journal, commit))
        newest = rows[-ROWS:]
        send("bar", lambda: show_bar(commit.step, f"step {commit.step} of {attempt.total_steps} is committed"))
        send("table", lambda: show_table(newest))

    attempt.watch = show
    try:
        yield show_chunk
    finally:
        attempt.watch = watch
        done.set()
        news.set()
        thread.join(SENT_WITHIN_S)


def _send(pending: dict[str, Callable[[], object]], news: threading.Event, done: threading.Event) -> None:
    warned = False
    while news.wait():
        news.clear()
        is_last = done.is_set()
        while pending:
            name = next(iter(pending))
            try:
                pending.pop(name)()
            except Exception as error:  # whatever the server or its client does is no concern of the run's
                if not warned:
                    log.warning("Prefect's server doesn't take what there is to see: %s; the run goes on", error)
                warned = True
        if is_last:
            return


def key_of(run: str) -> str:
    """The run's name as a key of an artifact, which has small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-") or "run"


def describe_chunk(journal: Journal, commit: Commit) -> dict[str, Any]:
    """A row of the table of chunks."""
    start = journal.read_commit(commit.parent).step if commit.parent else 0
    loss = commit.metrics.get("avg_loss")
    return {
        "chunk": commit.number,
        "steps": f"{start}-{commit.step}",
        "loss": "" if loss is None else f"{loss:.4f}",
        "save": f"{commit.save_s:.2f} s" if commit.save_s else "",
        "size": f"{commit.size_bytes / 1e6:.1f} MB",
        "checkpoint": commit.path,
        "content id": commit.checkpoint_sha256[:12],
        "why": commit.why,
        "committed at": commit.created_at,
    }


def summarize(journal: Journal) -> None:
    """How the run stands, and how its attempts have ended, is an artifact of the flow run that this is called in."""
    try:
        text = describe_run(journal)
        create_markdown_artifact(text, f"{key_of(journal.run)}-summary", f"run {journal.run}")
    except Exception as error:
        log.warning("the summary can't be shown: %s", error)


def describe_run(journal: Journal) -> str:
    """A run in Markdown: where it stands, and an attempt a line."""
    standing = read_standing(journal)
    return "\n".join([f"# {journal.run}", "", *_describe_standing(journal, standing), "", *_describe_attempts(journal)])


def _describe_standing(journal: Journal, standing: Standing) -> list[str]:
    known = {
        "step": f"{standing.step} of {standing.total_steps}" if standing.total_steps else standing.step,
        "epoch": f"{standing.epoch} of {standing.epochs}" if standing.epochs else standing.epoch,
        "loss": None if standing.avg_loss is None else f"{standing.avg_loss:.4f}",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in standing.metrics.items() if value is not None},
        "checkpoint": f"`{standing.checkpoint_sha256}`",
        "lies in": f"`{journal.store_url}/{journal.run}/{standing.path}`",
        "settings": f"`{standing.config_fingerprint}`",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in known.items() if value is not None)]


def _describe_attempts(journal: Journal) -> list[str]:
    lines = ["| attempt | began | host | why | ended | at step | |", "|---|---|---|---|---|---|---|"]
    for number in journal.numbers("attempts")[-ROWS:]:
        record, ending = journal.read_attempt(number), journal.read_ending(number)
        end = (ending.reason.replace("_", " "), ending.step, ending.message) if ending else ("", "", "")
        cells = [number, record.created_at, record.host, record.why, *end]
        lines.append(f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
    return lines
