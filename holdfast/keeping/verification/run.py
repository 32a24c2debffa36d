"""The verification of a whole run: records, signatures and checkpoints, in several threads."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor

from holdfast.errors import Damage, NameMissing, NotTrusted, RecordDamaged, Unreadable
from holdfast.journal import Commit, Journal
from holdfast.journal.answers import describe_unanswered
from holdfast.journal.coverage import Coverage, find_coverage
from holdfast.journal.exactness import describe_resume
from holdfast.journal.signature import TrustedKey
from holdfast.journal.signing import check_signed
from holdfast.journal.skips import read_skips
from holdfast.keeping.verification.checkpoints import check_checkpoint, check_uncommitted
from holdfast.keeping.verification.records import CheckedRecords, Map, check_records
from holdfast.keeping.verification.report import VerifyReport

# The number of threads. They work in parallel, because both hashing and waiting for a storage release the GIL.
WORKERS = 8


def verify_run(
    journal: Journal,
    *,
    everything: bool = False,
    deep: bool = False,
    trusted_keys: Sequence[TrustedKey] = (),
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """Read a run back: all its records and their links, and every byte of every checkpoint that counts.

    Args:
        everything: also check quarantined checkpoints, and checkpoints that no commit names.
        deep: also check that each state can be read and agrees with its commit.
        trusted_keys: each commit that counts, and the current list of steps to skip, must be signed with one of these
            keys; by default no signature is needed.
        watch: called with the number of bytes read so far and the total.

    Raises:
        RunUnknown: there is no such run.
    """
    progress = _Progress(watch)
    with _workers(progress, WORKERS) as pool:
        records = check_records(journal, pool.map)
        problems, notes = records.problems, records.notes
        coverage = _check_signatures(journal, records, trusted_keys, pool.map) if trusted_keys else None
    chosen = [(commit, "counts") for commit in records.live]
    if everything:
        chosen += [(commit, "quarantined") for commit in records.quarantined]
    chosen.sort(key=lambda pair: pair[0].number, reverse=True)
    progress.total_bytes = sum(commit.size_bytes for commit, _ in chosen)
    # A deep check reads a whole checkpoint into memory, so only one deep check runs at a time.
    with _workers(progress, 1 if deep else WORKERS) as pool:
        found = pool.map(lambda pair: check_checkpoint(journal, *pair, deep=deep, watch=progress.advance), chosen)
        checked = [each for each in found if each]
    problems += [line for each, lines in checked if each.standing == "counts" for line in lines]
    checkpoints = [each for each, _ in checked]
    if everything:
        for each in check_uncommitted(journal, {commit.path for commit in records.commits}):
            notes.append(f"{each.path} is named by no commit")
            checkpoints.append(each)
    unanswered = describe_unanswered(journal)
    return VerifyReport(
        run=journal.run,
        ok=not problems and not unanswered,
        problems=problems,
        notes=notes,
        records=records.count,
        checkpoints=checkpoints,
        verdict=describe_resume(journal, records.live[-1]) if records.live else "",
        **({"covered": coverage.covered, "uncovered": coverage.uncovered} if coverage else {}),
        coverage=coverage.describe() if coverage else [],
        unanswered=unanswered,
    )


def _check_signatures(
    journal: Journal, records: CheckedRecords, trusted_keys: Sequence[TrustedKey], map_: Map
) -> Coverage:
    """Check the signatures of the commits that count and of the skip list. Add a problem for each invalid signature.

    Return the files that the valid signatures cover.
    """
    found = list(map_(lambda commit: _check_signed(journal, commit, trusted_keys), records.live))
    skips, problem = _check_skips_signed(journal, trusted_keys)
    records.problems += [each for each in (*found, problem) if each]
    signed = [commit for commit, problem in zip(records.live, found, strict=True) if not problem]
    quarantined = {*journal.numbers("quarantine")}
    return find_coverage(journal, records.commits, signed, quarantined, records.elsewhere, skips)


def _check_signed(journal: Journal, commit: Commit, trusted_keys: Sequence[TrustedKey]) -> str | None:
    try:
        check_signed(journal, commit, trusted_keys)
    except Damage as error:
        return str(error)
    return None


def _check_skips_signed(journal: Journal, trusted_keys: Sequence[TrustedKey]) -> tuple[Sequence[str], str]:
    """Return the names of the signed skip list and of its signature, and a problem; each is empty if there is none."""
    try:
        record = read_skips(journal, trusted_keys)
    except NotTrusted as error:
        return (), str(error)
    except (NameMissing, RecordDamaged, Unreadable):  # `check_records` reports this damage
        return (), ""
    return record.names if record else (), ""


class _Progress:
    """A counter of the bytes that all workers have read. If it is cancelled, each worker stops at its next piece."""

    def __init__(self, watch: Callable[[int, int], None]) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._done_bytes = 0
        self.total_bytes = 0
        self.is_cancelled = False

    def advance(self, size_bytes: int) -> None:
        if self.is_cancelled:
            raise CancelledError
        with self._lock:
            self._done_bytes += size_bytes
            self._watch(self._done_bytes, self.total_bytes)


@contextlib.contextmanager
def _workers(progress: _Progress, count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool. If the block raises an error, cancel ``progress``, so that the pool's threads stop soon."""
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            progress.is_cancelled = True
            raise
