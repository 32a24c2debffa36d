"""Train committed steps once more in fresh processes, and compare two trails."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast import checkpoint
from holdfast.attempt.lineage import Past, Present, begin_from, choose_gate, describe_present, find_ancestor
from holdfast.checkpoint import Payload, Saved
from holdfast.config import Log, RunConfig
from holdfast.errors import GateTripped, HoldfastError, NameMissing, RecordDamaged, RunStopped, WrongUse
from holdfast.journal import Commit, Journal, metrics_name
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Problem, Ready
from holdfast.store import Store, open_store
from holdfast.trail import find_first

Trail = list[dict[str, Any]]


def read_run_config(journal: Journal, commit: Commit, scratch: Path) -> RunConfig:
    """The configuration that a commit was trained with, for the run where it now lies; logs go to ``scratch``.

    Raises:
        WrongUse: it was lost.
    """
    record = journal.read_config(commit.config_fingerprint)
    if record is None:
        raise WrongUse(f"the settings of commit {commit.number} of run {journal.run!r} were lost")
    config = RunConfig.model_validate(record.config)
    moved: dict[str, Any] = {
        "store": journal.store_url,
        "run": journal.run,
        "log": Log(every=config.log.every, folder=str(scratch)),
        # The settings were put on record when they were first used; the run may have been extended since.
        "epochs": max(config.epochs, commit.epoch + 1),
    }
    with contextlib.suppress(RecordDamaged):
        if metadata := checkpoint.read_metadata(journal.store, commit.path):  # it can be changed as one likes
            moved["checkpoint"] = config.checkpoint.model_copy(update={"part_bytes": metadata.part_bytes})
    if config.init_from is not None:
        commit_number = record.identity["init_from"]["commit"]
        moved["init_from"] = config.init_from.model_copy(update={"commit": commit_number})
    return config.model_copy(update=moved)


@contextlib.contextmanager
def ranks_at(journal: Journal, at: Commit | None, settings: Commit) -> Iterator[tuple[Ranks, Present]]:
    """Fresh ranks that hold a commit's state, which has passed the gate; or the state that the run began with.

    Args:
        at: the commit; None for the beginning.
        settings: the commit whose settings they have.

    Raises:
        CheckpointDamaged, GateTripped: the commit can't be restored.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch:
        config = read_run_config(journal, settings, Path(scratch))
        with Ranks(config, Path(scratch) / "ranks.log", at.number if at else 0) as ranks:
            built = ranks.expect(Ready)
            ancestor = find_ancestor(journal, config.store, config.init_from, None)
            present = describe_present(config, built, ancestor)
            if at is not None:
                event = ranks.restore(at, choose_gate(Past.read(journal, at), present, config.resume))
                if isinstance(event, Problem):
                    raise _named(event.error, journal, at, settings)
            elif ancestor is not None:
                begin_from(ranks, ancestor)
            yield ranks, present


def _named(problem: HoldfastError, journal: Journal, at: Commit, settings: Commit) -> HoldfastError:
    """Return the error for a commit that can't be restored, which retention may have pruned meanwhile."""
    if journal.is_pruned(at.number):
        return pruned(journal, at, settings)
    if isinstance(problem, GateTripped):
        return GateTripped(
            f"the gate refuses commit {at.number} of run {journal.run!r} ({at.path}): {problem}",
            hint="where its bytes verify, look at code, data and machine",
            **problem.data,
        )
    return problem


def pruned(journal: Journal, start: Commit, commit: Commit) -> WrongUse:
    """Return the error that a commit can't be replayed from the start, whose checkpoint was pruned."""
    return WrongUse(
        f"commit {commit.number} of run {journal.run!r} can't be replayed: commit {start.number} was pruned",
        hint="holdfast verify lists the checkpoints that there are; keep_last and pin keep more of them",
    )


@contextlib.contextmanager
def replayed(journal: Journal, start: Commit | None, commit: Commit) -> Iterator[tuple[Saved, Store, Present]]:
    """Train from one commit's checkpoint straight to another commit's step, and save in a folder of its own.

    The folder goes with the block.

    Args:
        start: an earlier commit; None for the beginning of the run.

    Raises:
        WrongUse: the start's checkpoint was pruned.
        CheckpointDamaged, GateTripped: the start can't be restored.
        RunStopped: the ranks ended early.
    """
    if start is not None and journal.is_pruned(start.number):
        raise pruned(journal, start, commit)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder, ranks_at(journal, start, commit) as (ranks, now):
        ranks.train(commit.step, now.fingerprint, into=folder, is_detailed=True)
        while not isinstance(saved := ranks.next_event(), Saved):
            pass
        if saved.step != commit.step:
            raise RunStopped(f"the replay of commit {commit.number} was stopped after step {saved.step}")
        yield saved, open_store(folder), now


def read_trail(store: Store, path: str) -> Trail:
    """A line for each step that a checkpoint's chunk has trained; empty where they were lost."""
    with contextlib.suppress(NameMissing):
        return [json.loads(line) for line in store.read(f"{path}/{checkpoint.METRICS}").splitlines()]
    return []


def read_committed_trail(journal: Journal, commit: Commit) -> Trail:
    """Return a commit's trail, which outlives its checkpoint; empty where it was lost."""
    with contextlib.suppress(NameMissing):
        return [json.loads(line) for line in journal.store.read(metrics_name(commit.number)).splitlines()]
    return read_trail(journal.store, commit.path)


def read_run_trail(journal: Journal) -> Trail:
    """The trail of all steps of a run that count."""
    commits = sorted(journal.candidates(), key=lambda commit: commit.number)
    return [line for commit in commits for line in read_trail(journal.store, commit.path)]


def find_difference(trails: tuple[Trail, Trail], ends: tuple[Payload, Payload] | None = None) -> dict[str, Any]:
    """Return where two runs of the same steps differ, as fields of `Audit` and `Proof`.

    Args:
        trails: as `read_trail` gave them.
        ends: the states at the end; None if they didn't both get there.

    Returns:
        ``first_step``, ``first_differs_in`` and ``first_tensors``: see `holdfast.trail.Difference`; only where the
        trails differ. ``different``: the names of what differs at the end.
    """
    found: dict[str, Any] = {}
    if (first := find_first(*trails)) is not None:
        found = {"first_step": first.step, "first_differs_in": first.fields, "first_tensors": first.tensors}
    if ends is not None:
        found["different"] = checkpoint.differences(*ends)
    return found
