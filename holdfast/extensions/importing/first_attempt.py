"""The import of another program's checkpoint, which is the first attempt of a new run.

The ranks build the recipe as for a training, and load the checkpoint's objects and weights, matched by name. Then they
save their state as a checkpoint of the run, and end.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.attempt.commits import Proposal, publish_commit
from holdfast.attempt.line import Line
from holdfast.attempt.opening import IMPORTED, Known
from holdfast.attempt.ranks import AttemptRanks
from holdfast.config import RunConfig
from holdfast.errors import ConfigError, WrongUse
from holdfast.extensions.importing.taken import TakenOver
from holdfast.journal import Commit, Journal
from holdfast.journal.endings import Ending, ending_of
from holdfast.journal.signature import load_signing_key
from holdfast.machine.gpus.checks import settle_ranks
from holdfast.machine.host import name_host
from holdfast.rank.launchers import refuse_launcher
from holdfast.store import open_store

log = logging.getLogger(__name__)
LOAD = "holdfast.extensions.importing.taking_over:load_foreign"  # called in the ranks, so this process imports no torch


@dataclass(frozen=True)
class ImportedRun:
    """The result of an import.

    Attributes:
        commit: the run's first commit, from which the run continues.
        total_steps: the number of steps of the whole run.
    """

    commit: Commit
    total_steps: int


def import_run(config: RunConfig, source: str, step: int | None, names: Mapping[str, str]) -> ImportedRun:
    """Make a new run that continues from another program's checkpoint.

    Before the ranks have loaded the checkpoint, nothing is written except the run's log in ``log.folder``.

    Args:
        config: the configuration of the new run.
        source: the path of the checkpoint.
        step: the step from which the run continues; None for the step in the checkpoint.
        names: the run's names for objects and weights that have other names in the checkpoint, by these other names;
            an empty name excludes the object or weight.

    Raises:
        WrongUse: the run exists, or the checkpoint can't be read or doesn't fit the configuration's training.
        ConfigError: another launcher has started several processes.
    """
    refuse_launcher(config.compute)
    journal = Journal(open_store(config.store), config.run)
    known = Known.read(journal)
    _refuse_existing(config, journal, known)
    if not os.path.lexists(source):  # checked before torch is imported, because that takes seconds
        raise ConfigError(
            f"there is no file or folder {source}",
            hint="give the file, or the folder, that the other program has saved",
        )
    number = known.attempts + 1
    config = settle_ranks(config)
    signing_key = load_signing_key(config.signing_key) if config.signing_key else None
    ranks = AttemptRanks(config, journal, number)
    try:
        ranks.build(None)
        values = ranks.own.call(LOAD, source=source, step=step, names=dict(names))
        imported = TakenOver.model_validate(values)
        _tell(imported)
        with journal.fenced(number):
            _claim(journal, number, ranks, config, known, imported)
            line = Line(
                journal, number, ranks.present.fingerprint, ranks.built.steps_per_epoch, signing_key=signing_key
            )
            commit = _commit(line, ranks, imported)
        return ImportedRun(commit, config.epochs * ranks.built.steps_per_epoch)
    finally:
        ranks.end()


def _refuse_existing(config: RunConfig, journal: Journal, known: Known) -> None:
    """Raise WrongUse unless the run is new, or begun by an unfinished import that has committed nothing."""
    if config.init_from is not None:
        raise ConfigError(
            "init_from can't be combined with an import: both set the first weights", hint="leave init_from out"
        )
    is_new = not known.attempts and known.newest is None
    if not is_new and not known.has_unfinished_import(journal):
        raise WrongUse(
            f"run {journal.run!r} exists in {config.store}, and an import begins a new one",
            hint="give the new run a different name",
        )


def _tell(imported: TakenOver) -> None:
    """Log the parts of the state that were imported, and the parts that the source lacks."""
    log.info("%s", imported.origin)
    for line in imported.taken:
        log.info("  %s", line)
    for line in imported.notes:
        log.info("  %s", line)
    for lack in imported.origin.lacks:
        log.warning("  the source lacks: %s", lack)


def _claim(
    journal: Journal, number: int, ranks: AttemptRanks, config: RunConfig, known: Known, imported: TakenOver
) -> None:
    """Write the new run's first records."""
    present = ranks.present
    journal.begin(config.recipe, is_imported=True)
    lineage = {"origin": imported.origin.model_dump(mode="json")}
    journal.claim_attempt(number, IMPORTED, name_host(), os.getpid(), present.environment, lineage, ranks.began_at)
    journal.record_config(present.fingerprint, present.identity, config.model_dump(mode="json"))
    known.record_lost_attempts(journal, number)


def _commit(line: Line, ranks: AttemptRanks, imported: TakenOver) -> Commit:
    """Save the state that the ranks have loaded, and return its commit. Record how the attempt ended."""
    ending = Ending("stopped")
    try:
        line.next_number = line.journal.next_number()
        saved = ranks.own.keep(line.config_fingerprint, imported.origin)
        commit = publish_commit(line, Proposal(saved, IMPORTED))
        ending = Ending(IMPORTED, str(commit.origin), commit.step)
        return commit
    except BaseException as error:
        ending = ending_of(error)
        raise
    finally:
        line.journal.end_attempt(line.attempt, ending)
