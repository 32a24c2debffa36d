"""The changes of settings, code and machine since a commit: are they allowed, and is bit-exactness still promised?"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import checkpoint
from holdfast.config import Compute, InitFrom, Resume, RunConfig
from holdfast.config.slurm import find_job
from holdfast.config.steps import Steps
from holdfast.errors import ConfigDrift, ConfigError, DeterminismError, NameMissing, RecordDamaged, StateError
from holdfast.journal import Commit, Journal
from holdfast.journal.trainers import NODES
from holdfast.machine.contract import Verdict, judge
from holdfast.machine.self_test import compare_with_records, refuse
from holdfast.provenance.changes import Change, compare_identities, find_defaults, to_lineage
from holdfast.provenance.drift import SHOWN_CHANGES, check_drift, is_harmless, is_of_ranks, is_of_skips
from holdfast.provenance.fingerprint import fingerprint, validate_fingerprint
from holdfast.provenance.model_files import hash_model
from holdfast.provenance.recorded import compare_records
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Problem, Ready
from holdfast.recipe.probe import Gate
from holdfast.store import open_store

log = logging.getLogger(__name__)

JOB = "job"  # the key of the Slurm job in an attempt's lineage

BUILT = "built"

# The largest number of earlier attempts whose self-tests are compared. To read an attempt's record costs a request. If
# the first similar machine gave the same bits as this machine, no more records are read.
LOOKED_BACK = 16

ReadMetadata = Callable[[Commit], checkpoint.Metadata | None]


@dataclass(frozen=True)
class Present:
    """The settings, code and machine that this attempt would train with.

    Args:
        identity: the settings that the fingerprint is computed from.
        defaults: the default of each of these settings, by dotted name.
        environment: the machine of a rank, and its record of code, packages, files and built values; see
            `holdfast.rank.record`.
    """

    identity: dict[str, Any]
    defaults: dict[str, Any]
    environment: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)


@dataclass(frozen=True)
class Past:
    """The settings, code and machine that a commit was trained with, according to the run's records.

    Args:
        fingerprint: the fingerprint of the settings.
        identity: the settings that the fingerprint was computed from; None if their record was lost.
        environment: the machine, and the record of code, packages, files and built values; empty if that record was
            lost.
    """

    commit: Commit
    fingerprint: str
    identity: dict[str, Any] | None
    environment: dict[str, Any]

    @classmethod
    def read(cls, journal: Journal, commit: Commit, read: ReadMetadata | None = None) -> "Past":
        """Return the records of a commit.

        Args:
            read: a function that reads the metadata of a commit's checkpoint; if None, the metadata is read from the
                store.
        """
        saved = journal.read_config(commit.config_fingerprint)
        try:
            metadata = read(commit) if read else checkpoint.read_committed(journal.store, commit)
        except RecordDamaged:
            metadata = None
        identity, environment = saved.identity if saved else None, metadata.environment if metadata else {}
        return cls(commit, commit.config_fingerprint, identity, environment)


@dataclass(frozen=True)
class Ancestor:
    """The checkpoint of another run, or the folder of a model, that a run begins with.

    Attributes:
        run: the other run's name, as the configuration gives it.
        store: the URL of the other run's store; empty if only the content id is known.
        commit: the number of the other run's commit; 0 for a folder with the weights of a model.
        record: the other run's commit; None if only the content id is known, and for a folder.
    """

    run: str
    commit: int
    checkpoint_sha256: str
    store: str = ""
    record: Commit | None = None

    def describe(self) -> dict[str, Any]:
        """Return the entry for the ancestor in the attempt's lineage."""
        known = {"store": self.store} if self.store else {}
        return {**known, "run": self.run, "commit": self.commit, "checkpoint_sha256": self.checkpoint_sha256}


def describe_present(config: RunConfig, built: Ready, ancestor: Ancestor | None) -> Present:
    """Return a description of the training that the ranks built, for the fingerprint and the lineage."""
    identity, defaults = identify(config, built.settings, built.defaults, ancestor)
    return Present(identity | {"data": built.data}, defaults, built.environment)


def identify(
    config: RunConfig, settings: dict[str, Any], of_recipe: dict[str, Any], ancestor: Ancestor | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's identity, and the default of each of its settings by dotted name.

    The identity is the settings from which the fingerprint is computed; here it has no hashes of data yet.

    Args:
        settings: the settings that the recipe is built with.
        of_recipe: the defaults of the recipe's settings.
    """
    identity = config.identity | {"settings": settings}
    if ancestor is not None:
        identity["init_from"] |= {"commit": ancestor.commit, "checkpoint_sha256": ancestor.checkpoint_sha256}
    return identity, find_defaults() | {f"settings.{name}": value for name, value in of_recipe.items()}


def changes_since(past: Past, present: Present) -> list[Change]:
    """Return the changes of settings, code, packages, files and built values since a commit was trained.

    Raises:
        ConfigDrift: the settings differ, and the record of the commit's settings was lost.
    """
    changes = []
    if past.fingerprint != present.fingerprint:
        if past.identity is None:
            validate_fingerprint(present.identity, past.fingerprint)
        else:
            changes += compare_identities(past.identity, present.identity, present.defaults)
    return changes + compare_records(past.environment, present.environment)


def judge_drift(past: Past, present: Present, config: RunConfig, epochs: int | None) -> dict[str, Any]:
    """Return the changes that are allowed, as the attempt's lineage records them.

    Args:
        epochs: the number of epochs in the run's last configuration; None if that configuration was lost.

    Raises:
        ConfigDrift: a change is neither harmless nor accepted.
    """
    if told := check_skips(past.commit, past.identity, present.identity):
        log.info("%s", told)
    changes = changes_since(past, present)
    let_through = check_drift(changes, config.resume.accept_drift, past.fingerprint, present.fingerprint)
    # `judge_environment` warns of a changed number of ranks, and `check_skips` reports changed skips.
    _warn_of([change for change in let_through if not (is_of_ranks(change) or is_of_skips(change))])
    if epochs not in (None, config.epochs):
        let_through.append(Change(name="epochs", kind="value", saved=epochs, current=config.epochs))
    return to_lineage(let_through)


def check_skips(commit: Commit, saved: Mapping[str, Any] | None, current: Mapping[str, Any]) -> str:
    """Check that the present skip list agrees with the steps that the run has skipped up to a commit.

    Args:
        saved: the identity that the commit was trained with; None if it was lost.
        current: the identity that the run would continue with.

    Returns:
        A line for a person if the lists differ in later steps; empty if they are the same.

    Raises:
        ConfigDrift: the lists differ in a step that the commit has.
    """
    if saved is None:
        return ""
    before, now = (Steps.parse(str(each.get("skip", ""))) for each in (saved, current))
    changed = before ^ now
    if changed and changed.first <= commit.step:
        raise ConfigDrift(
            f"settings differ: commit {commit.number} (step {commit.step}) was trained with steps {before or 'none'} "
            f"skipped, and the configuration skips steps {now or 'none'}",
            hint=f"to keep the saved list: --set 'skip=\"{before}\"'; to change the list, and continue from a commit "
            "before these steps: holdfast skip RUN STEPS, or with --off to train them",
            fields={"skip": [str(before), str(now)]},
        )
    return f"steps whose batches are drawn and not trained: {now or 'none'}" if changed else ""


def check_same_build(before: Present, present: Present, accept: Sequence[str]) -> None:
    """Check that the new ranks of an attempt have built the same training as its first ranks.

    Raises:
        ConfigDrift: a setting has changed, or there is another change that is not accepted, such as an edited file.
    """
    if before.fingerprint != present.fingerprint:
        accept = ()  # accept no change of settings, because all commits of an attempt must have the same fingerprint
    changes = compare_identities(before.identity, present.identity, present.defaults)
    changes += compare_records(before.environment, present.environment)
    changes = check_drift(changes, accept, before.fingerprint, present.fingerprint)
    _warn_of([change for change in changes if not is_of_skips(change)])


def _warn_of(changes: Sequence[Change]) -> None:
    for change in changes[:SHOWN_CHANGES]:
        log.warning("drift: %s; this change is allowed, and recorded", change)
    if len(changes) > SHOWN_CHANGES:
        log.warning(
            "drift: %d more changes, which are allowed, and recorded",
            len(changes) - SHOWN_CHANGES,
        )


def promise_for(past: Past, present: Present) -> Verdict:
    """Return whether bit-exactness is promised between this machine and the machine that trained the commit."""
    ranks = count_ranks(past.identity), count_ranks(present.identity)
    return judge(past.environment, present.environment, ranks)


def count_ranks(identity: dict[str, Any] | None) -> int | None:
    """Return the number of ranks in a run's identity; None if the bytes don't depend on it, or it was lost."""
    ranks: int | None = (identity or {}).get("compute", {}).get("ranks")
    return ranks


def describe_job(compute: Compute) -> dict[str, Any]:
    """Return an attempt's lineage entries for its Slurm job and its number of nodes, without entries that don't apply.

    With several nodes, the host in the attempt's record is only one of the hosts that train.
    """
    job = find_job()
    found: dict[str, Any] = {JOB: {"name": job.name, "restarts": job.restarts}} if job else {}
    return found | ({NODES: str(compute.nodes)} if compute.has_nodes or compute.has_cluster else {})


def judge_environment(past: Past, present: Present, resume: Resume) -> Verdict:
    """Return whether bit-exactness is promised between this machine and the machine that trained the commit.

    Raises:
        DeterminismError: bit-exactness is not promised, and ``resume.environment`` is "refuse".
    """
    # the environment was lost together with the checkpoint, so no run can resume from this commit anyway
    if not past.environment:
        return Verdict("not promised", ("not recorded",))
    verdict = promise_for(past, present)
    if verdict.promise == "identical":
        return verdict
    reasons = "".join(f"\n  {reason}" for reason in verdict.reasons)
    if len(verdict.reasons) == 1:
        reasons = f" {verdict.reasons[0]}"
    if resume.environment == "refuse":
        raise DeterminismError(
            f"this machine may compute different bits than the run's earlier machine:{reasons}",
            hint="continue on a machine like the earlier one; or accept this machine: --set resume.environment=record",
        )
    log.warning(
        "this machine may compute different bits than the run's earlier machine; the run continues and records the "
        "reason:%s",
        reasons,
    )
    return verdict


def judge_self_test(journal: Journal, attempt: int, past: Past, present: Present, compute: Compute) -> None:
    """Compare this machine's self-test with those of similar machines that trained the run; warn of a difference.

    Args:
        attempt: this attempt's number.

    Raises:
        SelfTestFailed: this host's self-test gave different bits before, and the configuration refuses that.
    """
    records = itertools.chain([past.environment], read_environments(journal, attempt - 1))
    line, is_unstable = compare_with_records(records, present.environment)
    if line and is_unstable and compute.gpu_health == "refuse":
        raise refuse(line)
    if line:
        log.warning("%s; the run continues", line)


def read_environments(journal: Journal, newest: int) -> Iterator[dict[str, Any]]:
    """Yield the environments of the attempt ``newest`` and of earlier attempts, newest first, at most `LOOKED_BACK`.

    Each record is read only when the caller asks for the next environment. An attempt whose record can't be read is
    skipped.
    """
    for number in range(newest, max(newest - LOOKED_BACK, 0), -1):
        if (record := journal.find_attempt(number)) is not None:
            yield record.environment


def choose_gate(past: Past, present: Present, resume: Resume) -> Gate:
    """Return the gate, which says how strictly the resumed model is compared with the saved model."""
    changed = [change for change in changes_since(past, present) if not is_harmless(change)]
    if changed or BUILT in resume.accept_drift:
        return Gate("record")
    if promise_for(past, present).promise == "identical":
        return Gate("exact")
    return Gate("tolerance", resume.tolerance)


def explain_unfit(error: StateError, past: Past, present: Present, resume: Resume) -> StateError | ConfigDrift:
    """Return the error for a checkpoint that doesn't fit the training that the ranks built.

    If changes were accepted, return a ConfigDrift that names them, because the configuration asks for something
    impossible. Otherwise return the ranks' own error.
    """
    changed = [change for change in changes_since(past, present) if not is_harmless(change)]
    # A changed built value is only an effect of other changes, so name built values only if nothing else has changed.
    chosen = [change for change in changed if change.kind != "built"] or changed
    names = [change.name for change in chosen] or [name for name in resume.accept_drift if name == BUILT]
    if not names:
        return error
    # Keep two lines, because torch's message continues with a line for every tensor.
    first = " ".join(line.strip() for line in error.message.splitlines()[:2])
    lines = [f"{past.commit.path} can't be resumed with the accepted changes of {', '.join(names)}: {first}"]
    return ConfigDrift(
        "\n".join([*lines, *(f"  {change}" for change in chosen)]),
        hint="put the saved values back, or train as a run of another name (--set run=...), which can begin with the "
        "weights that fit (init_from, reset)",
        fields={change.name: [change.saved, change.current] for change in changed},
    )


# ---- begin with another run's weights


def find_ancestor(journal: Journal, store_url: str, init: InitFrom | None, newest: Commit | None) -> Ancestor | None:
    """Return the checkpoint whose weights a new run begins with; None if the recipe initializes the weights.

    For a run that has committed, return the recorded checkpoint, which may not exist any more.

    Raises:
        ConfigError: ``init`` names a commit that doesn't exist.
    """
    if init is None:
        return None
    saved = journal.read_config(newest.config_fingerprint) if newest else None
    known = (saved.identity.get("init_from") or {}) if saved else {}
    if known.get("run") == init.run and init.commit in (None, known.get("commit")):
        return Ancestor(init.run, known["commit"], known["checkpoint_sha256"])
    if sha256 := hash_model(Path(init.run)):
        return Ancestor(init.run, 0, sha256, init.run)
    store, _, run = init.run.rpartition("/")
    other = Journal(open_store(store or store_url), run)
    other.read_run()
    commit = _find_commit(other, init.commit)
    if commit is None:
        raise ConfigError(
            f"init_from: run {run!r} has no commit{f' {init.commit}' if init.commit else ''}",
            hint=f"holdfast verify {store or store_url}/{run} lists its commits",
        )
    return Ancestor(init.run, commit.number, commit.checkpoint_sha256, store or store_url, commit)


def begin_from_ancestor(ranks: Ranks, ancestor: Ancestor) -> int:
    """Load an ancestor's weights into ranks. Return how many steps each `Anneal` of the run counts as done already.

    Raises:
        CheckpointDamaged: the ancestor is damaged.
    """
    assert ancestor.record is not None or not ancestor.commit, "the run has commits of its own"
    event = ranks.begin(ancestor.store, ancestor.run.rpartition("/")[2], ancestor.record)
    if isinstance(event, Problem):
        raise event.error
    return event.anneal_offset


def _find_commit(journal: Journal, number: int | None) -> Commit | None:
    if number is None:
        return next(journal.candidates(), None)
    try:
        return None if journal.is_pruned(number) else journal.read_commit(number)
    except NameMissing:
        return None
