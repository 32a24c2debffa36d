"""Evaluation of a checkpoint: `evaluate`, started in the UI, by a schedule or from Python."""

import logging
import sys

import tasks.untracked  # noqa: F401

from prefect.artifacts import create_markdown_artifact

from holdfast.config import load_config
from holdfast.journal import Journal
from holdfast.journal.finding import find_commit
from holdfast.proof.evaluation import Evaluation, evaluate_commit
from holdfast.recipe.trust import BY_DEFAULT, Trust
from holdfast.store import open_store
from tasks.reporting import key_of
from tasks.served import served_flow

log = logging.getLogger("holdfast.evaluate")


@served_flow(name="evaluate", flow_run_name="evaluate {run}", retries=0, persist_result=False)
def evaluate(store: str, run: str, commit: str = "", config: str = "") -> Evaluation:
    """Restore a checkpoint with the checks that training makes, and evaluate it. Change nothing on the store.

    Args:
        store: The folder, or URL of a bucket's folder, that holds the run.
        run: The run's name.
        commit: The commit's number, the name of its folder, or best; by default the newest.
        config: The file of your configuration of the run, TOML, on the worker. By default the run's records are used,
            if the recipe is yours or Holdfast's, and if no setting names a file or an address.
    """
    journal = Journal(open_store(store), run)
    journal.read_run()
    trust = Trust(config=load_config(config)) if config else BY_DEFAULT
    found = evaluate_commit(journal, find_commit(journal, commit), trust)
    log.info("%s", found)
    create_markdown_artifact(f"```\n{found}\n```", f"{key_of(run)}-evaluation", f"evaluation of {run}")
    return found


if __name__ == "__main__":  # earlier versions had this command, so say what replaces it
    sys.exit("error: python -m flows.evaluate is gone\nhint: holdfast evaluate STORE/RUN does the same")
