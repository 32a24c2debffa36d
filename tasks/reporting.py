"""Artifacts in Prefect's UI: a run's progress bar, chunks, texts, pictures and summary, and what an audit has found.

A separate thread sends only the newest values, so that a slow or absent server never delays a run.
"""

import base64
import contextvars
import functools
import json
import logging
import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import SyncClientContext

from holdfast.attempt import AttemptView, Observer
from holdfast.checkpoint import SHOWN
from holdfast.checkpoint.shown import SVG, TEXT, Shown, read_newest, read_shown
from holdfast.errors import RecordDamaged
from holdfast.extending import find_view
from holdfast.journal import REPORT, Commit, Journal
from holdfast.journal.answers import describe_answered, describe_unanswered
from holdfast.journal.chains import describe_certified, describe_chain
from holdfast.ledger.standing import Standing, read_standing
from holdfast.rank.messages import Progress
from holdfast.store import open_store
from tasks.liveness import EVERY_S

log = logging.getLogger("holdfast.reporting")

# The minimum seconds between two updates. An update costs a request and an event, about 20 ms of the server's CPU time.
BAR_EVERY_S = max(10.0, 3 * EVERY_S)
SENT_WITHIN_S = 10.0
ROWS = 200
CELL_CHARS = 98  # what Prefect's UI shows of a cell in a window of 1280 pixels


class ArtifactReport(Observer):
    """An observer that makes artifacts of the current flow run: a bar, a table of commits, texts and pictures."""

    def __init__(self) -> None:
        self._pending: dict[str, Callable[[], object]] = {}  # a newer update replaces the waiting update
        self._news, self._done = threading.Event(), threading.Event()
        self._artifacts: dict[str, Any] = {}  # the artifacts' ids, by name
        self._rows: list[dict[str, Any]] = []
        self._last_sent = 0.0
        self._has_warned = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="reporting", daemon=True)

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        if time.monotonic() - self._last_sent > BAR_EVERY_S:
            self._last_sent = time.monotonic()
            text = f"step {progress.step} of {attempt.total_steps}  {progress.loss_text}".rstrip()
            self._send("bar", self._show_bar, attempt, progress.step, text)

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        self._rows.append(describe_chunk(attempt.journal, commit))
        text = f"step {commit.step} of {attempt.total_steps} is committed"
        self._send("bar", self._show_bar, attempt, commit.step, text)
        self._send("table", self._show_table, attempt.config.run, self._rows[-ROWS:])
        if any(file.name == SHOWN for file in commit.files):
            self._send(f"shown {commit.number}", self._show_shown, attempt.journal, commit)

    def ended(self, attempt: AttemptView) -> None:
        self._done.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(SENT_WITHIN_S)

    def _send(self, name: str, show: Callable[..., None], *arguments: Any) -> None:
        self._pending[name] = functools.partial(show, *arguments)
        self._news.set()
        if self._thread.ident is None:  # not started in __init__, because nothing would end an unused observer's thread
            self._thread.start()

    def _show_bar(self, attempt: AttemptView, step: int, text: str) -> None:
        percent = 100.0 * step / attempt.total_steps
        if "bar" in self._artifacts:
            update_progress_artifact(self._artifacts["bar"], percent, text)
        else:
            key = f"{key_of(attempt.config.run)}-progress"
            self._artifacts["bar"] = create_progress_artifact(percent, key, text)

    def _show_table(self, run: str, rows: list[dict[str, Any]]) -> None:
        if "table" in self._artifacts:
            with SyncClientContext.get_or_create() as context:
                context.client.update_artifact(self._artifacts["table"], ArtifactUpdate(data=json.dumps(rows)))
        else:
            self._artifacts["table"] = create_table_artifact(rows, f"{key_of(run)}-chunks", f"chunks of {run}")

    def _show_shown(self, journal: Journal, commit: Commit) -> None:
        """Publish a commit's texts and pictures: one artifact for each name, with the newest text or picture."""
        for name, shown in {shown.name: shown for shown in read_shown(journal, commit)}.items():
            text = describe_shown(shown)
            if f"shown {name}" in self._artifacts:
                with SyncClientContext.get_or_create() as context:
                    context.client.update_artifact(self._artifacts[f"shown {name}"], ArtifactUpdate(data=text))
            else:
                key, about = key_of(f"{journal.run}-shows-{name}"), f"{name} of {journal.run}"
                self._artifacts[f"shown {name}"] = create_markdown_artifact(text, key, about)

    def _run(self) -> None:
        """Send pending updates until the attempt has ended. This is the thread's body."""
        while self._news.wait():
            self._news.clear()
            is_last = self._done.is_set()
            while self._pending:
                name = next(iter(self._pending))
                try:
                    self._pending.pop(name)()
                except Exception as error:  # an error of the server or its client must not stop the run
                    if not self._has_warned:
                        log.warning("Prefect's server doesn't accept progress updates: %s; the run continues", error)
                    self._has_warned = True
            if is_last:
                return


def key_of(run: str) -> str:
    """Return a run's name as an artifact's key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-") or "run"


def describe_chunk(journal: Journal, commit: Commit) -> dict[str, Any]:
    """Return a commit's row in the table of chunks."""
    parent = journal.read_parent(commit)
    start = parent.step if parent else 0
    loss = commit.shown_loss
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


def describe_shown(shown: Shown) -> str:
    """Return a text or picture in Markdown, below a line with its step.

    A picture becomes an image with a data URI, so that a browser runs no script in an SVG.
    """
    is_text = shown.media_type == TEXT
    body = _fence(shown.data.decode()) if is_text else _embed(shown.name, shown.media_type, shown.data)
    return f"{shown.name} after step {shown.step}\n\n{body}\n"


def _fence(text: str) -> str:
    """Return a text as a block of code, in which the UI changes nothing."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _as_code(text: str) -> str:
    """Return a text as code in one line, because records and paths may hold any characters."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def make_summary(journal: Journal) -> None:
    """Make an artifact of the current flow run that shows the run's state and how its attempts ended."""
    try:
        text = describe_run(journal)
        create_markdown_artifact(text, f"{key_of(journal.run)}-summary", f"run {journal.run}")
    except Exception as error:
        log.warning("the summary of run %s can't be sent to Prefect's server: %s", journal.run, error)


def report_audits(store: str, said: Mapping[str, Sequence[str]]) -> None:
    """Make an artifact of the current flow run that shows what an audit of a store has found, and open verdicts.

    A run with a verdict gets a new summary, too, also if a rollback has answered the verdict: the run's last summary
    was made before that.

    Args:
        said: for each audited run a text for each of its audited commits.
    """
    try:
        sections = [f"# audits of {_as_code(store)}"]
        for run, texts in said.items():
            journal = Journal(open_store(store), run)
            verdicts = _describe_verdicts(journal)
            # Lines of code, because a block of code would cut them off.
            found = [_as_code(line) for text in texts for line in text.splitlines()]
            sections += [f"## {_as_code(run)}", *verdicts, *found]
            if verdicts or journal.numbers("quarantine"):
                make_summary(journal)
        create_markdown_artifact("\n\n".join(sections), f"{key_of(store)}-audits", f"audits of {store}")
    except Exception as error:
        log.warning("the audits of %s can't be sent to Prefect's server: %s", store, error)


def describe_run(journal: Journal) -> str:
    """Return a run in Markdown: its state, a picture of its loss, its attempts, and its last texts and pictures.

    The picture is an image with a data URI, because the UI shows no SVG that is written in the Markdown itself.
    """
    draw_loss = find_view("loss")
    standing, picture = read_standing(journal), draw_loss(journal) if draw_loss else ""
    drawn = [_embed("loss by step", SVG, picture.encode()), ""] if picture else []
    tables = [*_describe_standing(journal, standing), "", *drawn, *_describe_attempts(journal)]
    return "\n".join([f"# {journal.run}", "", *tables, *_describe_newest(journal)])


def _embed(name: str, media_type: str, data: bytes) -> str:
    return f"![{name}](data:{media_type};base64,{base64.b64encode(data).decode()})"


def describe_report(journal: Journal) -> str:
    """Return, in Markdown, the place of the run's report, and the command that writes the report into a folder.

    The place isn't a link, because a browser opens neither a local file nor a bucket's URL from a server's page.
    """
    place = f"{journal.store_url}/{journal.run}"
    return f"`{place}/{REPORT}`; `holdfast report {shlex.quote(place)}` writes it into the current folder"


def _describe_newest(journal: Journal) -> list[str]:
    try:
        return [f"\n{describe_shown(shown)}" for shown in read_newest(journal)]
    except RecordDamaged as error:  # a damaged record must not hide the other rows
        return [f"\n{error}"]


def _describe_standing(journal: Journal, standing: Standing) -> list[str]:
    known = {
        "step": f"{standing.step} of {standing.total_steps}" if standing.total_steps else standing.step,
        "epoch": f"{standing.epoch} of {standing.epochs}" if standing.epochs else standing.epoch,
        "loss": None if standing.avg_loss is None else f"{standing.avg_loss:.4f}",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in standing.metrics.items() if value is not None},
        "checkpoint": f"`{standing.checkpoint_sha256}`" if standing.commit else None,
        "resume": standing.verdict.replace("|", "/") or None,
        "certified": describe_certified(journal).replace("|", "/") or None,
        "chain": describe_chain(journal) or None,
        "stored in": f"`{journal.store_url}/{journal.run}/{standing.path}`".replace("/`", "`"),
        "settings": f"`{standing.config_fingerprint}`" if standing.commit else None,
    }
    rows = {name: str(value) for name, value in known.items() if value is not None}
    short = [f"| {name} | {value} |" for name, value in rows.items() if len(value) <= CELL_CHARS]
    table = ["| | |", "|---|---|", *short]
    # Below the table, because a cell would cut off long texts, commands and the path.
    for name, value in rows.items():
        table += ["", f"{name}: {value}"] if len(value) > CELL_CHARS else []
    for line in _describe_verdicts(journal):
        table += ["", line]
    if journal.store.exists(REPORT):
        table += ["", f"report: {describe_report(journal)}"]
    return table


def _describe_verdicts(journal: Journal) -> list[str]:
    """Return a line of Markdown for each verdict that puts the run's bytes in doubt, answered or not."""
    return [f"verdict: {_as_code(line)}" for line in (*describe_unanswered(journal), *describe_answered(journal))]


def _describe_attempts(journal: Journal) -> list[str]:
    """Return a table of the attempts, and below it the reasons for their ends, which wouldn't fit into a column."""
    lines = ["| attempt | began (UTC) | host | why | ended | at step |", "|---|---|---|---|---|---|"]
    reasons = []
    for number in journal.numbers("attempts")[-ROWS:]:
        record, ending = journal.read_attempt(number), journal.read_ending(number)
        end = (ending.reason.replace("_", " "), ending.step) if ending else ("", "")
        began = record.created_at[:19].replace("T", " ")
        cells = [number, began, record.host, record.why, *end]
        lines.append(f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
        if ending and ending.message:
            reasons.append(f"- attempt {number}: {' '.join(ending.message.split())}")
    return [*lines, "", *reasons] if reasons else lines
