"""The command ``train``: one attempt at a run in this process, without Prefect."""

import logging
import sys
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.attempt import surrounded, train
from holdfast.attempt.progress import CommitLines, ProgressView, log_plain_lines
from holdfast.config import load_config
from holdfast.rank.process import find_node
from holdfast.terminal import stamp
from holdfast.terminal.options import Json, Set, print_json

log = logging.getLogger(__name__)

Observers = Annotated[list[str] | None, Parameter(name="--observer", negative="", consume_multiple=False)]


def train_command(config: Path, /, *, set_: Set = None, observer: Observers = None, json: Json = False) -> None:
    """Train a run, or continue it from its last verified checkpoint, in this process and without Prefect.

    If it is killed, the same command continues the run, to the same bytes. With several nodes the command on node 0
    trains the run, and the same command on each other node runs ranks for it.

    Args:
        config: The run's configuration, a TOML file.
        set_: key=value: change a setting, for example --set epochs=8 or --set settings.lr=0.001.
        observer: module:Class: call a custom observer at each commit, instead of those of log.observers.
        json: Print JSON.
    """
    own = [f"log.observers={dumps(observer, ensure_ascii=False)}"] if observer else []
    settings = load_config(config, [*(set_ or []), *own])
    log_plain_lines()
    if settings.where != "here":
        log.warning(
            "where = %r has no effect: holdfast train always trains on this machine; python -m flows.train uses the "
            "work pool",
            settings.where,
        )
    if find_node(settings.compute):
        from holdfast.attempt.carrying import carry  # few runs have several nodes

        carry(settings)
        return
    with surrounded(settings):
        result = train(settings, [CommitLines(), ProgressView()])
    if json:
        print_json(result.model_dump(mode="json"))
    else:
        print(f"{stamp(sys.stdout)}{result.describe(settings.store)}")
