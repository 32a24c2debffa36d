"""The check of a receipt against the records of a run on a store."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from pydantic import BaseModel

from holdfast import checkpoint
from holdfast.errors import CheckpointDamaged, ConfigError, NameMissing, RecordDamaged
from holdfast.extensions.receipt.chain import Chain, Hashed, describe_line, list_line
from holdfast.extensions.receipt.signed import Receipt, find_others, list_own_files, refuse_receipt
from holdfast.journal import Commit, Journal, record_name
from holdfast.provenance.canonical import dump_json


def check_receipt(journal: Journal, receipt: Receipt) -> list[Commit]:
    """Check that a run on a store has the chain of commits in a receipt; return these commits, oldest first.

    No checkpoint is read, because retention may have pruned most of them. `check_weights` reads the last one, and
    `holdfast verify` all that remain.

    Raises:
        NotTrusted: the chain contradicts itself, or the run's records.
    """
    chain = receipt.chain
    if chain.run != journal.run:
        refuse_receipt(f"the receipt is about run {chain.run!a}, not {journal.run!a}")
    journal.read_run()
    try:
        line = list_line(journal, chain.commit.commit)
        _compare_commits(journal, chain, line)
        links, attempts = describe_line(journal, line)
    except (NameMissing, RecordDamaged) as error:
        refuse_receipt(f"the run lacks a record that the receipt names: {error.message}")
    for told, found in zip(chain.chain, links, strict=True):
        known = [host for host in found.certified_by if host in told.certified_by]
        _compare(f"commit {told.commit}", told, found.model_copy(update={"certified_by": known}))
    if list(chain.attempts) != sorted(attempts):
        refuse_receipt(
            f"the receipt names attempts {_spell(chain.attempts)}, but attempts {_spell(attempts)} trained its commits"
        )
    for number, facts in chain.attempts.items():
        _compare(f"attempt {number}", facts, attempts[number])
    _check_settings(chain)
    commit = line[-1][0]
    if chain.exported is None and receipt.files != list_own_files(commit):
        refuse_receipt(f"the receipt's files are not the files of commit {commit.number}")
    return [each for each, _ in line]


def check_weights(journal: Journal, receipt: Receipt, commit: Commit) -> str:
    """Check the files that a receipt signs: the checkpoint's files, which are read back, or the files of an export.

    Return the result as a text for a person. The text is empty if the checkpoint's files are signed and undamaged.

    Raises:
        NotTrusted: no signed file has the weights of the receipt's commit.
        CheckpointDamaged: the checkpoint is damaged.
    """
    part = receipt.chain.exported
    if journal.is_pruned(commit.number):
        return f"the signed files were not compared with commit {commit.number}, which was pruned"
    if part is None:
        if damaged := checkpoint.verify(journal.store, commit):
            raise CheckpointDamaged(
                f"checkpoint {commit.path} isn't the checkpoint that the receipt signs: {'; '.join(map(str, damaged))}",
                hint="don't use this checkpoint; ask the receipt's signer for the signed checkpoint",
                files=[vars(damage) for damage in damaged],
            )
        return ""
    try:
        others = find_others(journal, commit, receipt.files, part)
    except ConfigError as error:
        refuse_receipt(error.message)
    if others is None:
        refuse_receipt(f"no file of the receipt has the weights of commit {commit.number}")
    not_made = f"; the run didn't make these files: {', '.join(others)}" if others else ""
    return f"the signed files have the weights of commit {commit.number}{not_made}"


def describe_untrained(journal: Journal, chain: Chain, first: Commit) -> str:
    """Describe the weights that a run began with but hasn't trained; empty if the recipe built the first weights.

    Args:
        first: the first commit of the chain.
    """
    if first.origin:
        return f"not trained by the run: commit {first.number}, imported from {first.origin}"
    if journal.is_unpacked(first):
        return f"not trained by the run: commit {first.number}, which was unpacked"
    ancestor = chain.settings[first.config_fingerprint].get("init_from")
    if not ancestor:
        return ""
    return (
        f"not trained by the run: the weights that it began with, {ancestor['checkpoint_sha256']} of {ancestor['run']}"
    )


def _compare_commits(journal: Journal, chain: Chain, line: Sequence[Hashed]) -> None:
    """Check that a chain has exactly these commits."""
    quarantined = set(journal.numbers("quarantine"))
    for told, found in zip_longest(chain.chain, line):
        number = found[0].number if found else 0
        if told is None or told.commit != number:
            refuse_receipt(
                f"the receipt's chain has {_name(told.commit if told else 0)} where the run's chain has {_name(number)}"
            )
        name = record_name("commits", number)
        if told.record_sha256 != found[1]:
            refuse_receipt(f"run {journal.run!r} has a different {name}")
        if number in quarantined:
            refuse_receipt(f"commit {number} is quarantined on the store: {record_name('quarantine', number)} says why")


def _compare(what: str, told: BaseModel, found: BaseModel) -> None:
    """Check that a part of a receipt equals the run's records."""
    for name in type(told).model_fields:
        if _to_bytes(told, name) != _to_bytes(found, name):
            refuse_receipt(f"the receipt's {name} of {what} is not what the run's records have")


def _to_bytes(part: BaseModel, name: str) -> bytes:
    # Compare as JSON, because in Python 1, 1.0 and True are equal.
    return dump_json({name: part.model_dump(mode="json")[name]})


def _check_settings(chain: Chain) -> None:
    """Check that a chain has the settings of each of its commits, and no further settings."""
    for link in chain.chain:
        if link.settings not in chain.settings:
            refuse_receipt(f"the settings of commit {link.commit} are missing")
    for name, identity in chain.settings.items():
        if hashlib.sha256(dump_json(identity)).hexdigest() != name:
            refuse_receipt(f"the settings {name[:12]} have a different fingerprint")
        if name not in {link.settings for link in chain.chain}:
            refuse_receipt(f"no commit has the settings {name[:12]}")


def _name(number: int) -> str:
    return f"commit {number}" if number else "none"


def _spell(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
