"""Changes of a run's settings, code and files: between its attempts, and compared with a given configuration."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from holdfast import __version__
from holdfast.attempt.lineage import Past, check_skips, find_ancestor, identify
from holdfast.checkpoint import shorten
from holdfast.config import RunConfig
from holdfast.errors import ConfigDrift, ConfigError, NameMissing, RecordDamaged, WrongUse
from holdfast.journal import AttemptRecord, Commit, ConfigRecord, Journal
from holdfast.journal.skips import read_skips
from holdfast.machine.gpus.checks import settle_ranks
from holdfast.provenance.changes import CLASSES, Change, classify, compare_identities, find_defaults, from_lineage
from holdfast.provenance.drift import check_drift, is_accepted, is_harmless, is_of_skips
from holdfast.provenance.fingerprint import fingerprint
from holdfast.provenance.imports import find_file
from holdfast.provenance.opened_files import describe_file
from holdfast.provenance.packages import describe_holdfast, find_contents, find_versions
from holdfast.provenance.recorded import compare_records, compare_sources
from holdfast.provenance.sources import find_inside, hash_sources
from holdfast.recipe.function import default_settings, find_program, split_recipe
from holdfast.recipe.settings import resolve_settings
from holdfast.store import open_store
from holdfast.store.modules import search_current_folder

Outcome = Literal["refused", "let through", "needs nothing"]
WORST_FIRST: tuple[Outcome, ...] = ("refused", "let through", "needs nothing")
SHOWN_FILES = 3
NOTHING_COMMITTED = "nothing is committed: with any settings, training begins with step 0"


# ---- a configuration


@dataclass(frozen=True)
class Judged:
    """The verdict on continuing a run with a configuration.

    Attributes:
        rows: for every change a tuple of the outcome, the change's class and the change; the worst outcome first.
        is_refused: whether the run would refuse to continue.
        hint: what to do about a refusal.
        notes: remarks, for example on settings that were not compared.
    """

    rows: list[tuple[Outcome, str, Change]]
    is_refused: bool
    hint: str
    notes: list[str]


def judge_run(journal: Journal, config: RunConfig) -> Judged:
    """Import the recipe, compare a run with a configuration, and decide whether the run would continue with it.

    Raises:
        RecordDamaged, WrongUse: the run's saved settings are lost.
    """
    record = read_skips(journal)
    config = settle_ranks(config.with_skip(record.skip) if record else config)
    newest = journal.newest()
    saved = _read_trained_with(journal, newest)
    with contextlib.redirect_stdout(sys.stderr):  # a recipe may print when it is imported
        identity, defaults = _identify(journal, newest, saved, config)
    current = fingerprint(identity)
    changes = compare_identities(saved.identity, identity, defaults) if current != saved.fingerprint else []
    sources, notes = _compare_recorded(journal, newest, config) if newest else ([], [NOTHING_COMMITTED])
    of_skips = _find_hint_of_skips(newest, saved, identity) if newest else ""
    hint = of_skips or (_find_hint([*changes, *sources], config, saved.fingerprint, current) if newest else "")
    rows = [
        *(("identity", change) for change in changes),
        *((CLASSES[change.kind], change) for change in sources),
        *_compare_others(journal.read_snapshot() or saved, config),
    ]
    accept = config.resume.accept_drift
    judged = [(_judge_one(cls, change, accept) if newest else "needs nothing", cls, change) for cls, change in rows]
    judged = [("refused" if of_skips and is_of_skips(row[2]) else row[0], *row[1:]) for row in judged]
    judged.sort(key=lambda row: (WORST_FIRST.index(row[0]), row[2].name))
    return Judged(judged, bool(hint), hint, [*notes, *_note_place(journal, config)])


def gives_others(journal: Journal, config: RunConfig) -> bool:
    """Return whether a configuration differs from the configuration of the newest commit.

    The recipe is not imported, so its default settings are unknown. The next attempt decides whether to refuse the
    configuration.
    """
    newest = journal.newest()
    if newest is None:
        return False
    saved = journal.read_config(newest.config_fingerprint)
    try:
        given = RunConfig.model_validate(saved.config).identity if saved else {}
    except ValidationError:  # an earlier version of Holdfast wrote the record
        return True
    changes = compare_identities(given, config.identity, find_defaults())
    return not all(is_harmless(each) or is_accepted(each, config.resume.accept_drift) for each in changes)


def _judge_one(cls: str, change: Change, accept: Sequence[str]) -> Outcome:
    if cls not in ("identity", "code", "data"):
        return "let through" if cls in ("schedule", "package") else "needs nothing"
    return "let through" if is_harmless(change) or is_accepted(change, accept) else "refused"


def _find_hint(changes: list[Change], config: RunConfig, saved: str, current: str) -> str:
    """Return the hint for the changes that are refused; empty if no change is refused."""
    try:
        check_drift(changes, config.resume.accept_drift, saved, current)
    except ConfigDrift as error:
        return error.hint
    return ""


def _find_hint_of_skips(newest: Commit, saved: ConfigRecord, identity: dict[str, Any]) -> str:
    """Return a hint if the list of steps to skip has changed since the newest commit; else an empty text."""
    try:
        check_skips(newest, saved.identity, identity)
    except ConfigDrift as error:
        return error.hint
    return ""


def _read_trained_with(journal: Journal, newest: Commit | None) -> ConfigRecord:
    """Return the settings with which the next attempt compares its own settings.

    These are the newest commit's settings, or the snapshot (the last attempt's settings) if nothing is committed.
    """
    if newest is None:
        return _read_snapshot(journal)
    saved = journal.read_config(newest.config_fingerprint)
    if saved is None:
        raise RecordDamaged(
            f"the settings that trained commit {newest.number} are lost: configs/ has no readable record of them",
            hint="give exactly the settings that the run had; different settings are refused",
        )
    return saved


def _identify(
    journal: Journal, newest: Commit | None, saved: ConfigRecord, config: RunConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Import the recipe. Return the settings that this configuration's fingerprint contains, and their defaults.

    The data is assumed to be unchanged, because hashing the data would require building the recipe.
    """
    search_current_folder(config.recipe.rpartition(":")[0])
    settings = resolve_settings(find_program(config.recipe), config.settings)
    ancestor = find_ancestor(journal, config.store, config.init_from, newest)
    identity, defaults = identify(config, settings, default_settings(config.recipe), ancestor)
    if "data" in saved.identity:
        identity["data"] = saved.identity["data"]
    return identity, defaults


def _compare_recorded(journal: Journal, newest: Commit, config: RunConfig) -> tuple[list[Change], list[str]]:
    """Compare code, files and packages with the recorded ones. Return changes, and notes on what isn't compared."""
    notes = [
        "not compared: the machine, and the values that the recipe builds; they are known only when training starts"
    ]
    saved = Past.read(journal, newest).environment
    names: dict[str, str] = saved.get("sources", {})
    if not names:
        return [], [*notes, "the code isn't compared: the run has no record of its code"]
    folder = Path(find_file(split_recipe(config.recipe)[0])).resolve().parent
    sources = hash_sources(names, folder)
    listed: dict[str, Any] = saved.get("files", {})
    files = {name: entry for name in listed if (entry := _describe_recorded_file(name, folder))}
    elsewhere = {name for name in names if "/" in name and name not in sources}
    if missing := sorted({*listed.keys() - files.keys(), *elsewhere}):
        notes.append(f"not compared, because these files aren't found from here: {shorten(missing, SHOWN_FILES)}")
    current = {
        "sources": sources,
        "packages": find_versions(saved.get("packages", {})),
        "package_files": find_contents(saved.get("package_files", {}), saved.get("package_files", {})),
        "holdfast": describe_holdfast(__version__),
        "files": files,
    }
    compared = {
        "built": {},
        "files": {name: listed[name] for name in files},
        "sources": {name: sha256 for name, sha256 in names.items() if name not in elsewhere},
    }
    return compare_records(saved | compared, current), notes


def _describe_recorded_file(name: str, folder: Path) -> dict[str, Any] | None:
    path = find_inside(name, folder) or find_inside(name, Path.cwd())
    return describe_file(path) if path else None


def _note_place(journal: Journal, config: RunConfig) -> Iterator[str]:
    with contextlib.suppress(ConfigError):  # the configured store can't be opened here
        place = open_store(config.store).inside(config.run).url
        if place != journal.store.url:
            yield f"the configuration trains the run in {place}, not the run in {journal.store.url}"


def _compare_others(saved: ConfigRecord, config: RunConfig) -> Iterator[tuple[str, Change]]:
    """Yield the changes of settings that don't belong to the identity, each with its class."""
    for change in compare_identities(saved.config, config.model_dump(mode="json"), find_defaults()):
        if classify(change.name) != "identity" and not is_harmless(change):
            yield classify(change.name), change


# ---- a run's own life


def list_life_changes(journal: Journal) -> Iterator[tuple[AttemptRecord, list[Change]]]:
    """Yield every attempt, oldest first, with the changes that it accepted.

    If an attempt's record doesn't name these changes, compute them from the records of settings and code.
    """
    fingerprints = _find_fingerprints(journal)
    identity: dict[str, Any] | None = None
    sources: dict[str, str] = {}
    for number in journal.numbers("attempts"):
        record = _read_attempt(journal, number)
        if record is None:
            continue
        config = journal.read_config(fingerprints[number]) if number in fingerprints else None
        before, identity = identity, config.identity if config else identity
        sources_before, sources = sources, record.environment.get("sources", sources)
        if record.lineage:
            yield record, from_lineage(record.lineage.get("drift", {}))
            continue
        changes = compare_identities(before, identity, {}) if before is not None and identity is not None else []
        yield record, changes + (compare_sources(sources_before, sources) if sources_before else [])


def _find_fingerprints(journal: Journal) -> dict[int, str]:
    """Return the fingerprint of each attempt's settings, by the attempt's number, as far as commits record it."""
    known = {name.partition(".")[0].partition("-")[0] for name in journal.store.list("configs")}
    if len(known) < 2:  # the settings never changed, so don't read every commit
        return {}
    fingerprints = {}
    for number in journal.numbers("commits"):
        if commit := journal.find_commit(number):
            fingerprints[commit.attempt] = commit.config_fingerprint
    snapshot = journal.read_snapshot()
    if snapshot is not None:
        fingerprints.setdefault(journal.attempts(), snapshot.fingerprint)
    return fingerprints


def _read_attempt(journal: Journal, number: int) -> AttemptRecord | None:
    try:
        return journal.read_attempt(number)
    except NameMissing:
        return None
    except RecordDamaged as error:
        journal.warn(str(error))
        return None


def _read_snapshot(journal: Journal) -> ConfigRecord:
    snapshot = journal.read_snapshot()
    if snapshot is None:
        raise WrongUse(
            f"run {journal.run!r} has no record of its settings",
            hint="train the run: its first attempt records the settings",
        )
    return snapshot
