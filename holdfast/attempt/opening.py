"""The state of a run when an attempt begins, read from the journal once."""

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from holdfast.config import RunConfig
from holdfast.errors import NameMissing, RecordDamaged, RunUnknown, WrongUse
from holdfast.journal import Commit, Journal, record_name
from holdfast.journal.endings import Ending
from holdfast.journal.records import HELD, RELEASED
from holdfast.machine.host import name_host
from holdfast.machine.processes import is_running
from holdfast.rank.messages import Ready
from holdfast.terminal import counted

if TYPE_CHECKING:
    from holdfast.journal.signature import SigningKey, TrustedKey

TrustedKeys: TypeAlias = "Sequence[TrustedKey]"

log = logging.getLogger(__name__)

# The longest wait for the process that completed the run: after its last commit it still verifies and prunes. The wait
# is bounded, because that process may be dead and its id used by a new process.
UPKEEP_WITHIN_S = 300.0
# An attempt that imports another program's checkpoint records this reason, both when it begins and when it ends.
IMPORTED = "imported"
LOOKS_EVERY_S = 0.5


@dataclass(frozen=True)
class Known:
    """The state of a run before an attempt claims it, as the journal records it.

    Attributes:
        attempts: the highest attempt number that was claimed; 0 if there was no attempt.
        newest: the newest commit; None before the first commit.
        epochs: the number of epochs in the run's last configuration; None for a new run, or if it was lost.
        ending: how the last attempt ended; None if its ending isn't recorded.
    """

    attempts: int
    newest: Commit | None
    epochs: int | None
    ending: Ending | None

    @classmethod
    def read(cls, journal: Journal) -> "Known":
        """Return the state of a run, as its journal records it."""
        attempts, newest = journal.attempts(), journal.newest()
        record = journal.read_ending(attempts) if attempts else None
        epochs = journal.read_epochs() if attempts else None
        return cls(attempts, newest, epochs, record.ending if record else None)

    @property
    def step(self) -> int:
        """Return the newest step that is committed."""
        return self.newest.step if self.newest else 0

    @property
    def is_finished(self) -> bool:
        """Return whether the last attempt ended because the run was complete."""
        return self.ending is not None and self.ending.reason == "completed"

    def find_reason(self, steps_per_epoch: int, total_steps: int) -> str:
        """Return the reason why the next attempt starts.

        It is ``fresh``, ``preempted``, ``cancelled``, ``paused``, ``extended`` or ``continued``.

        Args:
            total_steps: the number of steps of the whole run in the present configuration.
        """
        if not self.attempts:
            return "fresh"
        newest, ended = self.newest, self.ending.reason if self.ending else ""
        if ended in ("cancelled", "paused"):  # the last commit of such an attempt is recorded as ``preempted``, too
            return ended
        if ended == "preempted" or (newest is not None and newest.why == "preempted"):
            return "preempted"
        if newest is not None and self.epochs is not None:
            return "extended" if self.epochs * steps_per_epoch <= newest.step < total_steps else "continued"
        return "continued"

    def refuse_unfinished_import(self, journal: Journal) -> None:
        """Refuse to train a run whose import was not finished, because the run would begin at step 0.

        Raises:
            WrongUse: the run's import was not finished.
        """
        with contextlib.suppress(RecordDamaged):
            if self.has_unfinished_import(journal):
                raise WrongUse(
                    f"the import of a checkpoint into run {journal.run!r} was interrupted",
                    hint="finish it with the same holdfast import command, or train under another name (--set run=...)",
                )

    def has_unfinished_import(self, journal: Journal) -> bool:
        """Return whether the run has no commit because its import has not finished.

        That is known from the last attempt's record, or from ``run.json`` if no attempt has claimed the run yet.

        Raises:
            RecordDamaged: a record can't be read.
        """
        if self.newest is not None:
            return False
        with contextlib.suppress(NameMissing, RunUnknown):
            return journal.read_attempt(self.attempts).why == IMPORTED if self.attempts else journal.read_run().imported
        return False

    def record_lost_attempts(self, journal: Journal, number: int) -> None:
        """Record an ending for each attempt after the last attempt with a recorded ending.

        If an attempt's process still runs on this machine, its ending is ``superseded``, otherwise ``vanished``.

        Args:
            number: the present attempt's number.
        """
        lost = f"no ending was on record when attempt {number} began"
        taken_over = f"its process was still running when attempt {number} began"
        number = self.attempts if self.ending is None else 0
        if self.ending is not None and self.ending.reason in (HELD, RELEASED):
            number = _skip_holds(journal, self.attempts)
        while number and journal.has_attempt(number):
            # Read the commits again: a living attempt may have committed between `read` and the present attempt's claim
            step = next((each.step for each in journal.candidates() if each.attempt <= number), 0)
            said = ("superseded", taken_over) if _runs_here(journal, number) else ("vanished", lost)
            ending = Ending(*said, step)
            if journal.end_attempt(number, ending) != ending:
                break
            number -= 1


def _skip_holds(journal: Journal, number: int) -> int:
    """Return the number of the newest attempt, up to ``number``, that may have trained; 0 if there is none."""
    while number and (record := journal.find_attempt(number)) and not record.is_training:
        number -= 1
    return number


def load_keys(config: RunConfig) -> tuple["SigningKey | None", list["TrustedKey"]]:
    """Return the key that signs a run's commits, and the keys of which one has to have signed the commits so far.

    Raises:
        ConfigError: a key can't be loaded.
    """
    if not (config.signing_key or config.resume.trusted_keys):
        return None, []
    # imported late, because few runs sign, and the library takes a fifth of a second to load
    from holdfast.journal.signature import load_signing_key, load_trusted_key

    signing_key = load_signing_key(config.signing_key) if config.signing_key else None
    return signing_key, [load_trusted_key(source) for source in config.resume.trusted_keys]


def apply_skips(journal: Journal, given: RunConfig, trusted_keys: TrustedKeys) -> tuple[RunConfig, list[str]]:
    """Add the run's skip list to a configuration.

    If the run still has commits that trained the skipped steps, because a kill has prevented their quarantine,
    quarantine them.

    Returns:
        the configuration, and the names of the list's record and signature; no names if the run has no list.

    Raises:
        RecordDamaged, NotTrusted: the list can't be read, or none of the keys has signed it.
        NoVerifiedCheckpoint: no checkpoint before the skipped steps verifies.
    """
    if not journal.numbers("skips"):
        return given, []
    # imported late, because few runs have a skip list
    from holdfast.attempt.skipping import finish_going_back
    from holdfast.journal.skips import read_skips

    record = read_skips(journal, trusted_keys)
    assert record is not None
    if quarantined := finish_going_back(journal, record):
        numbers = ", ".join(map(str, quarantined))
        log.warning("skip list %d: commits that no longer count: %s", record.number, numbers)
    return given.with_skip(record.skip), [*filter(journal.store.exists, record.names)]


def has_other_skips(journal: Journal, names: Sequence[str]) -> bool:
    """Return whether a run has a different skip list than the list with these names of records; see `apply_skips`."""
    number = max(journal.numbers("skips"), default=0)
    return number > 0 and record_name("skips", number) not in names


def await_completed(journal: Journal, number: int) -> bool:
    """Wait while an attempt that has completed the run still does its upkeep in another process of this machine.

    Don't wait for an attempt on another machine, because its process can't be seen from here.

    Returns:
        Whether the attempt has recorded that it completed the run.
    """
    deadline = time.monotonic() + UPKEEP_WITHIN_S
    has_told = False
    while (record := journal.read_ending(number)) is None:
        if not _runs_here(journal, number) or time.monotonic() > deadline:
            return False
        if not has_told:
            log.info("waiting for attempt %d, which has trained all steps, and still prunes and writes reports", number)
        has_told = True
        time.sleep(LOOKS_EVERY_S)
    return record.reason == "completed"


def _runs_here(journal: Journal, number: int) -> bool:
    """Return whether an attempt's process runs on this machine and is not this process."""
    record = journal.find_attempt(number)
    if record is None or record.host != name_host() or record.pid == os.getpid():
        return False
    return is_running(record.pid)


def describe_ready(built: Ready, epochs: int) -> str:
    """Return a line for a person about the training that the ranks have built."""
    length = f"{counted(epochs, 'epoch')} of {counted(built.steps_per_epoch, 'step')}"
    parts = [f"{built.model_params:,} parameters", length]
    if "samples" in built.data:
        parts.insert(1, f"{built.data['samples']:,} samples")
    elif "loader_workers" in built.data:
        parts.insert(1, "a stream")
    return f"{', '.join(parts)}, on {built.device}"


def describe_beginning(head: Commit | None, total_steps: int) -> str:
    """Return a line for a person about the step from which training begins."""
    if head is None:
        return f"begins with step 0 of {total_steps}"
    return f"continues from {head.path}, step {head.step} of {total_steps}"
