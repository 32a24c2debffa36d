"""On resume: what changed in settings, code and machine, whether it is allowed, and what is still promised."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast import checkpoint
from holdfast.config import InitFrom, Resume, RunConfig
from holdfast.contract import Verdict, judge
from holdfast.drift import SHOWN_CHANGES, Change, check_drift, compare, find_defaults, is_harmless, to_lineage
from holdfast.errors import ConfigDrift, ConfigError, DeterminismError, NameMissing, RecordDamaged, StateError
from holdfast.fingerprint import fingerprint, validate_fingerprint
from holdfast.journal import Commit, Journal
from holdfast.recorded import compare_records
from holdfast.store import open_store

log = logging.getLogger(__name__)

BUILT = "built"


@dataclass(frozen=True)
class Present:
    """What this attempt would train with.

    Args:
        identity: what the fingerprint is computed from.
        defaults: what a field of it is by itself, by dotted name.
        environment: what a rank runs on, and what it has on record of code, packages, files and built values; see
            `holdfast.rank.record`.
    """

    identity: dict[str, Any]
    defaults: dict[str, Any]
    environment: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)


def describe_present(config: RunConfig, built: dict[str, Any], ancestor: dict[str, Any]) -> Present:
    """What ranks have built, as it counts for the fingerprint and the lineage.

    Args:
        built: what they reported, see `holdfast.rank.serving.describe`.
        ancestor: what `find_ancestor` gave.
    """
    identity, defaults = identify(config, built["settings"], built["defaults"], ancestor)
    return Present(identity | {"data": built["data"]}, defaults, built["environment"])


def identify(
    config: RunConfig, settings: dict[str, Any], of_recipe: dict[str, Any], ancestor: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The identity that a run with this configuration has, but for its data; and the defaults of all its fields.

    Args:
        settings: those that the recipe is built with.
        of_recipe: those that it has by itself.
        ancestor: what `find_ancestor` gave.
    """
    identity = config.identity | {"settings": settings}
    if ancestor:
        identity["init_from"] |= {name: ancestor[name] for name in ("commit", "checkpoint_sha256")}
    return identity, find_defaults() | {f"settings.{name}": value for name, value in of_recipe.items()}


def changes_since(journal: Journal, commit: Commit, present: Present) -> list[Change]:
    """Return how settings, code, packages, files and built values differ from those of the commit's training.

    Raises:
        ConfigDrift: the settings differ, and those that it was trained with were lost.
    """
    changes = []
    if commit.config_fingerprint != present.fingerprint:
        saved = journal.read_config(commit.config_fingerprint)
        if saved is None:
            validate_fingerprint(present.identity, commit.config_fingerprint)
        else:
            changes += compare(saved.identity, present.identity, present.defaults)
    return changes + compare_records(environment_of(journal, commit), present.environment)


def judge_drift(journal: Journal, newest: Commit, present: Present, config: RunConfig) -> dict[str, Any]:
    """Return what has changed and is allowed, for the lineage.

    Raises:
        ConfigDrift: something has changed that was not accepted.
    """
    changes = changes_since(journal, newest, present)
    accept = config.resume.accept_drift
    let_through = check_drift(changes, accept, newest.config_fingerprint, present.fingerprint)
    _warn_of(let_through)
    epochs = journal.read_epochs()
    if epochs not in (None, config.epochs):
        let_through.append(Change(name="epochs", kind="value", saved=epochs, current=config.epochs))
    return to_lineage(let_through)


def check_same(before: Present, present: Present, accept: Sequence[str]) -> None:
    """Return if ranks that were started again in an attempt have built what its first ones did.

    Raises:
        ConfigDrift: a setting has changed, or something else that is not accepted: a file was edited meanwhile.
    """
    if before.fingerprint != present.fingerprint:
        accept = ()  # the attempt's commits have the one fingerprint that it began with
    changes = compare(before.identity, present.identity, present.defaults)
    changes += compare_records(before.environment, present.environment)
    _warn_of(check_drift(changes, accept, before.fingerprint, present.fingerprint))


def _warn_of(changes: Sequence[Change]) -> None:
    for change in changes[:SHOWN_CHANGES]:
        log.warning("drift: %s; it goes into the lineage", change)
    if len(changes) > SHOWN_CHANGES:
        log.warning("drift: and %d more changes; they go into the lineage", len(changes) - SHOWN_CHANGES)


def promise_for(journal: Journal, commit: Commit, present: Present) -> Verdict:
    """Whether the same bits are promised here as where the commit was trained."""
    return judge(environment_of(journal, commit), present.environment)


def judge_environment(journal: Journal, newest: Commit, present: Present, resume: Resume) -> Verdict:
    """Whether the same bits are promised here as where the commit was trained.

    Raises:
        DeterminismError: they are not, and the configuration refuses that.
    """
    if not environment_of(journal, newest):  # it was lost with the checkpoint, which can't be resumed from anyway
        return Verdict("not promised", ("not recorded",))
    verdict = promise_for(journal, newest, present)
    if verdict.promise == "identical":
        return verdict
    reasons = "\n".join(f"  {reason}" for reason in verdict.reasons)
    if resume.environment == "refuse":
        raise DeterminismError(
            f"equal bits are not promised on this machine:\n{reasons}",
            hint="continue where it was trained, or --set resume.environment=record",
        )
    log.warning("equal bits are not promised on this machine; it goes into the lineage:\n%s", reasons)
    return verdict


def choose_gate(journal: Journal, commit: Commit, present: Present, resume: Resume) -> dict[str, Any]:
    """How strictly the resumed model is held against the saved one; see `holdfast.training.Gate`."""
    changed = [change for change in changes_since(journal, commit, present) if not is_harmless(change)]
    if changed or BUILT in resume.accept_drift:
        return {"how": "record"}
    if promise_for(journal, commit, present).promise == "identical":
        return {"how": "exact"}
    return {"how": "tolerance", "tolerance": resume.tolerance}


def explain_unfit(
    error: StateError, journal: Journal, commit: Commit, present: Present, resume: Resume
) -> StateError | ConfigDrift:
    """Return the error for a checkpoint that doesn't fit what the ranks built.

    Where changes were let through, the person has asked for something impossible: the error is one of wrong use and
    names the changes. Otherwise it is the ranks' own.
    """
    changed = [change for change in changes_since(journal, commit, present) if not is_harmless(change)]
    chosen = [change for change in changed if change.kind != "built"] or changed  # built values follow from the others
    names = [change.name for change in chosen] or [name for name in resume.accept_drift if name == BUILT]
    if not names:
        return error
    first = " ".join(line.strip() for line in error.message.splitlines()[:2])  # torch lists every tensor
    lines = [f"{commit.path} can't be resumed with the accepted {', '.join(names)}: {first}"]
    return ConfigDrift(
        "\n".join([*lines, *(f"  {change}" for change in chosen)]),
        hint="put the saved values back, or train as a run of another name (--set run=...), which can begin with the "
        "weights that fit (init_from, reset)",
        fields={change.name: [change.saved, change.current] for change in changed},
    )


def environment_of(journal: Journal, commit: Commit) -> dict[str, Any]:
    """What the commit was trained on, and the hashes of the recipe's code; empty where that was lost."""
    try:
        metadata = checkpoint.read_metadata(journal.store, commit.path)
    except RecordDamaged:
        return {}
    return metadata.environment if metadata else {}


# ---- beginning with another run's weights


def find_ancestor(journal: Journal, store_url: str, init: InitFrom | None, newest: Commit | None) -> dict[str, Any]:
    """The checkpoint that a new run begins with: store, run, commit and content id; empty for none.

    A run that has committed keeps the one that it began with, which may be gone.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    if init is None:
        return {}
    saved = journal.read_config(newest.config_fingerprint) if newest else None
    known = (saved.identity.get("init_from") or {}) if saved else {}
    if known.get("run") == init.run and init.commit in (None, known.get("commit")):
        return {"run": init.run, "commit": known["commit"], "checkpoint_sha256": known["checkpoint_sha256"]}
    store, _, run = init.run.rpartition("/")
    other = Journal(open_store(store or store_url), run)
    other.read_run()
    commit = _find_commit(other, init.commit)
    if commit is None:
        raise ConfigError(
            f"init_from: run {run!r} has no checkpoint {init.commit or 'that counts'}",
            hint=f"holdfast verify {store or store_url}/{run} lists what there is",
        )
    return {
        "store": store or store_url,
        "run": init.run,
        "commit": commit.number,
        "checkpoint_sha256": commit.checkpoint_sha256,
        "record": commit.model_dump(),
    }


def _find_commit(journal: Journal, number: int | None) -> Commit | None:
    if number is None:
        return next(journal.candidates(), None)
    try:
        return None if journal.is_pruned(number) else journal.read_commit(number)
    except NameMissing:
        return None
