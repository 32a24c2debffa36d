"""The replay of committed steps in fresh processes, and the comparison of two runs of the same steps."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast import checkpoint
from holdfast.attempt.lineage import Past, Present, begin_from_ancestor, choose_gate, describe_present, find_ancestor
from holdfast.attempt.refusing import explain_refusal
from holdfast.checkpoint import Lines, Saved
from holdfast.config import Log, NearTier, RunConfig
from holdfast.errors import HoldfastError, RecordDamaged, RunStopped, WrongUse
from holdfast.journal import Commit, ConfigRecord, Journal
from holdfast.journal.configs import read_given
from holdfast.ledger.standing import is_trained
from holdfast.machine.gpus.checks import check_gpus, gather_nodes
from holdfast.provenance.changes import compare_identities
from holdfast.provenance.drift import is_of_skips
from holdfast.provenance.fingerprint import ABSENT, diff
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Problem, Ready, Tripped
from holdfast.recipe.trust import Trust
from holdfast.store import Store, open_store
from holdfast.terminal import counted

log = logging.getLogger(__name__)


def read_run_config(journal: Journal, commit: Commit, scratch: Path, trust: Trust) -> RunConfig:
    """Return the configuration with which to train a commit's steps again, with the run's current store and name.

    Args:
        scratch: the folder for logs.
        trust: the reader's own configuration, or the parts of the recorded configuration to accept.

    Raises:
        WrongUse: the configuration was lost.
        RecipeError: the recorded configuration is not accepted; see `holdfast.recipe.trust`.
        RecordDamaged: the configuration doesn't have the commit's fingerprint.
    """
    record = journal.read_config(commit.config_fingerprint)
    if record is None:
        raise WrongUse(f"the settings of commit {commit.number} of run {journal.run!r} were lost")
    if record.fingerprint != commit.config_fingerprint:
        raise RecordDamaged(f"the settings in configs/ for commit {commit.number} aren't the settings that trained it")
    config = trust.choose(read_given(record), journal.store_url)
    if trust.config is not None:
        _warn_of_drift(record, config)
    moved: dict[str, Any] = {
        "store": journal.store_url,
        "run": journal.run,
        "retention": config.retention.model_copy(update={"keep_best": None}),  # a replay keeps no best checkpoint
        "log": Log(every=config.log.every, folder=str(scratch)),
        "epochs": _count_epochs(journal, config, commit),
        "near": NearTier(),  # an audit reads the checkpoints on the store, not on a node
        "signing_key": None,
    }
    with contextlib.suppress(RecordDamaged):
        # The content id depends on ``part_bytes``, which the user may have changed before or after this commit.
        if metadata := checkpoint.read_metadata(journal.store, commit.path):
            moved["checkpoint"] = config.checkpoint.model_copy(update={"part_bytes": metadata.part_bytes})
    if config.init_from is not None:
        commit_number = (record.identity.get("init_from") or {}).get("commit")
        moved["init_from"] = config.init_from.model_copy(update={"commit": commit_number or config.init_from.commit})
    return config.model_copy(update=moved)


def _warn_of_drift(record: ConfigRecord, config: RunConfig) -> None:
    """Name each setting of the reader's configuration that the run was not trained with."""
    for name, (saved, current) in diff(record.identity, config.identity).items():
        if current != ABSENT and saved != ABSENT and (name, current) != ("init_from.commit", None):
            log.warning("%s differs: the run was trained with %r, and your configuration has %r", name, saved, current)


def _count_epochs(journal: Journal, config: RunConfig, commit: Commit) -> int:
    """Return the number of epochs of a replay that trains a commit's steps again.

    The saved configuration may have too few epochs, because the run may have been extended since these settings were
    first used. So return at least one epoch more than the commit has completed. But if the commit completed the run
    at that time, its epoch was the last epoch. The replay then needs the same end, because a Trainer has ended its own
    loop.
    """
    return commit.epoch if _was_complete(journal, commit) else max(config.epochs, commit.epoch + 1)


def _was_complete(journal: Journal, commit: Commit) -> bool:
    """Return whether a run was complete with this commit, even if it was extended later."""
    for number in range(commit.attempt, journal.attempts() + 1):
        ending = journal.read_ending(number)
        if ending is not None and (ending.reason, ending.step) == ("completed", commit.step):
            return True
    # the commit's attempt may have died before it recorded the ending
    newest, epochs = journal.newest(), journal.read_epochs()
    return newest is not None and newest.number == commit.number and epochs is not None and is_trained(journal, epochs)


def _choose_ranks(config: RunConfig, number: int | None) -> RunConfig:
    """Return a run's configuration with this number of ranks.

    Args:
        number: None for the number in the configuration.

    Raises:
        WrongUse: the number differs, and the run's bytes depend on the number.
    """
    compute = config.compute
    if number is None or number == compute.ranks:
        return config
    if not compute.is_rank_invariant:
        raise WrongUse(
            f"--ranks {number}: {counted(compute.rank_count, 'rank')} trained the steps, without virtual ranks, so a "
            "different number of ranks may compute different bytes",
            hint="leave --ranks out, and audit on a machine that can start as many ranks",
        )
    return config.with_ranks(number)


def has_settings_of(journal: Journal, commit: Commit, other: Commit) -> bool:
    """Return whether a replay with another commit's settings trains the same steps as a commit's own settings.

    The two lists of steps to skip may differ. When steps are added to the list, the run goes back to a commit before
    these steps, so the longer list changes no earlier step.
    """
    if commit.config_fingerprint == other.config_fingerprint:
        return True
    records = [journal.read_config(each.config_fingerprint) for each in (commit, other)]
    if records[0] is None or records[1] is None:
        return False
    return all(map(is_of_skips, compare_identities(records[0].identity, records[1].identity, {})))


@contextlib.contextmanager
def ranks_at(
    journal: Journal,
    at: Commit | None,
    settings: Commit,
    trust: Trust,
    number: int | None = None,
) -> Iterator[tuple[Ranks, Present]]:
    """Start ranks for the block, and restore a commit's state into them through the gate.

    Args:
        at: the commit to restore; None for the state with which the run began.
        settings: the commit whose settings the ranks get.
        trust: the reader's own configuration, or the parts of the run's records to accept.
        number: the number of ranks; None for the number in the settings.

    Raises:
        WrongUse: equal bytes aren't promised on this number of ranks, or the recipe is not trusted.
        CheckpointDamaged: the checkpoint is damaged.
        GateTripped: the gate refuses the restored state.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch:
        config = _choose_ranks(gather_nodes(read_run_config(journal, settings, Path(scratch), trust)), number)
        check_gpus(config.compute)
        with Ranks(config, Path(scratch) / "ranks.log", at.number if at else 0) as ranks:
            built = ranks.expect(Ready)
            ancestor = find_ancestor(journal, config.store, config.init_from, None)
            present = describe_present(config, built, ancestor)
            if at is not None:
                event = ranks.restore(at, choose_gate(Past.read(journal, at), present, config.resume))
                if isinstance(event, Problem):
                    raise _explain(event, journal, at, settings, ranks)
            elif ancestor is not None:
                begin_from_ancestor(ranks, ancestor)
            yield ranks, present


def _explain(problem: Problem, journal: Journal, at: Commit, settings: Commit, ranks: Ranks) -> HoldfastError:
    """Return the error for a commit that can't be restored. If the commit was pruned meanwhile, the error says so."""
    if journal.is_pruned(at.number):
        return make_pruned_error(journal, at, settings)
    return explain_refusal(problem, at) if isinstance(problem, Tripped) else problem.error


def make_pruned_error(journal: Journal, start: Commit, commit: Commit) -> WrongUse:
    """Return the error for a commit that can't be replayed because the start's checkpoint was pruned."""
    return WrongUse(
        f"commit {commit.number} of run {journal.run!r} can't be replayed: commit {start.number} was pruned",
        hint="holdfast verify lists the remaining checkpoints; retention.keep_last and holdfast pin keep more of them",
    )


@contextlib.contextmanager
def replayed(
    journal: Journal, start: Commit | None, commit: Commit, trust: Trust, ranks: int | None = None
) -> Iterator[tuple[Saved, Store, Present]]:
    """Train from the commit ``start`` to the step of ``commit`` in one chunk, and save into a temporary folder.

    Args:
        start: an earlier commit; None for the beginning of the run.
        trust: the reader's own configuration, or the parts of the run's records to accept.
        ranks: the number of ranks; None for the run's own number.

    Yields:
        The checkpoint, its folder (deleted after the block), and the settings and machine of the replay.

    Raises:
        WrongUse: the start's checkpoint was pruned, or equal bytes aren't promised on this number of ranks.
        CheckpointDamaged, GateTripped: the start can't be restored.
        RunStopped: the ranks ended early.
    """
    if start is not None and journal.is_pruned(start.number):
        raise make_pruned_error(journal, start, commit)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-") as folder,
        ranks_at(journal, start, commit, trust, ranks) as (started, now),
    ):
        saves_first = checkpoint.read_ended_epoch(journal.store, commit) is False
        started.train(commit.step, now.fingerprint, into=folder, is_detailed=True, saves_first=saves_first)
        while not isinstance(saved := started.next_event(), Saved):
            pass
        if saved.step != commit.step:
            raise RunStopped(f"the replay of commit {commit.number} was stopped after step {saved.step}")
        yield saved, open_store(folder), now


def read_run_trail(journal: Journal) -> Lines:
    """Return the trail of all committed steps of a run."""
    commits = sorted(journal.candidates(), key=lambda commit: commit.number)
    return [line for commit in commits for line in checkpoint.read_checkpoint_lines(journal.store, commit.path)]
