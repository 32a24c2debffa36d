"""Evaluation of a checkpoint: ``python -m flows.evaluate STORE/RUN``, or `evaluate` from Python or on a schedule."""

import logging
import sys
from typing import Annotated

import tasks.untracked  # noqa: F401

from cyclopts import App, Parameter
from prefect.artifacts import create_markdown_artifact

from holdfast.attempt.progress import log_plain_lines
from holdfast.journal import Journal
from holdfast.journal.finding import find_commit, open_journal
from holdfast.proof.evaluation import Evaluation, evaluate_commit
from holdfast.store import open_store
from holdfast.terminal.command import EXIT_CODES, run_app
from tasks.own_run import own_flow_run
from tasks.reporting import key_of
from tasks.served import served_flow
from tasks.server import server

log = logging.getLogger("holdfast.evaluate")


@served_flow(name="evaluate", flow_run_name="evaluate {run}", retries=0, persist_result=False)
def evaluate(store: str, run: str, commit: str = "") -> Evaluation:
    """Restore a checkpoint as training does, through the gate, and evaluate it. Change nothing on the store.

    Args:
        store: The folder, or URL of a bucket's folder, that holds the run.
        run: The run's name.
        commit: The commit's number, or the name of its folder; by default the newest.
    """
    journal = Journal(open_store(store), run)
    journal.read_run()
    found = evaluate_commit(journal, find_commit(journal, commit))
    if own_flow_run() is not None:  # a command prints it
        log.info("%s", found)
    create_markdown_artifact(f"```\n{found}\n```", f"{key_of(run)}-evaluation", f"evaluation of {run}")
    return found


app = App(
    name="python -m flows.evaluate",
    help="Restore a checkpoint as training does, through the gate, and evaluate it. RUN is <store>/<run>.",
    help_epilogue=EXIT_CODES,
    help_format="plaintext",
    version_flags=[],
)


@app.default
def main(run: str, commit: Annotated[str, Parameter(show_default=False)] = "", /) -> None:
    """Evaluate a checkpoint of a run.

    Args:
        run: <store>/<run>.
        commit: The commit's number, or the name of its folder; by default the newest.
    """
    journal = open_journal(run)
    journal.read_run()
    find_commit(journal, commit)  # report a wrong name before starting a server
    log_plain_lines()
    with server():
        found = evaluate(journal.store_url, journal.run, commit)
    print(found)


if __name__ == "__main__":
    sys.exit(run_app(app))
