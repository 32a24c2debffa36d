"""The command ``verify``: read a run's checkpoints and records back."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

from cyclopts import Parameter
from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn

from holdfast.journal.finding import open_journal
from holdfast.journal.signature import load_trusted_key
from holdfast.keeping.verification import CheckedCheckpoint, VerifyReport, verify_run
from holdfast.terminal import counted
from holdfast.terminal.bar import Bar, open_console
from holdfast.terminal.options import Flag, Json, print_json


def verify_command(
    run: str,
    /,
    *,
    all_: Annotated[bool, Parameter(name="--all", negative="", show_default=False)] = False,
    deep: Flag = False,
    key: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False)] = None,
    json: Json = False,
) -> int:
    """Read every record and every checkpoint of a run back, and compare them with the commits.

    Args:
        run: <store>/<run>.
        all_: Also read checkpoints that are in quarantine, or that no commit names.
        deep: Also check that each checkpoint's state can be read, and agrees with its commit.
        key: A trusted public key: a PEM file, or env:NAME. With several, one of them must have signed each commit.
        json: Print JSON.
    """
    keys = [load_trusted_key(source) for source in key or []]
    with _show_progress() as watch:
        report = verify_run(open_journal(run), everything=all_, deep=deep, trusted_keys=keys, watch=watch)
    if json:
        print_json(report.model_dump())
        return 0 if report.ok else 2
    for entry in report.checkpoints:
        print(f"{_verdict(entry):12}{entry.checkpoint_sha256}  {entry.path}")
    for note in [*report.coverage, *(f"note: {note}" for note in report.notes)]:
        print(note)
    for problem in report.problems:
        print(f"problem: {problem}")
    for line in report.unanswered:
        print(f"verdict: {line}")
    if report.verdict:
        print(f"resume: {report.verdict}")
    read = f"{counted(len(report.checkpoints), 'checkpoint')} and {counted(report.records, 'record')} read"
    open_ = f", {counted(len(report.unanswered), 'verdict')} without an answer" if report.unanswered else ""
    print(f"{read}, {counted(len(report.problems), 'problem')}{open_}")
    if report.problems:
        print(f"next: {_advise(report)}")
    return 0 if report.ok else 2


def _advise(report: VerifyReport) -> str:
    """Return what to do about the problems of a report."""
    of_run = [each for each in report.checkpoints if each.standing == "counts"]
    good = next((each.path for each in of_run if not each.damaged), None)
    if not any(each.damaged for each in of_run):
        return "holdfast docs troubleshooting#when-something-is-wrong says what the next attempt repairs by itself"
    if good is None:
        return "put the damaged files back from a copy: no undamaged checkpoint is left to continue from"
    return (
        "put the damaged files back from a copy, before the next attempt quarantines a damaged checkpoint; "
        f"or start the run again: it can continue from {good}"
    )


def _verdict(entry: CheckedCheckpoint) -> str:
    if entry.standing != "counts":
        return entry.standing
    return "damaged" if entry.damaged else "good"


@contextlib.contextmanager
def _show_progress() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of bytes if the output is a terminal; yield the function that moves the bar."""
    with Bar(BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(), console=open_console()) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
