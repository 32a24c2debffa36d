"""The metrics that follow from a run's records: restarts by reason, failures by machine, goodput."""

import queue
import time

from holdfast.extensions.metrics.readings import Readings
from holdfast.extensions.metrics.spans import DeadAttempt
from holdfast.journal import Commit, Journal, seconds_of
from holdfast.journal.endings import REASONS, Ending
from holdfast.ledger.goodput import account
from holdfast.ledger.timeline import Life, Records, find_trainer, make_lives, read_records

# The minimum seconds between two computations of the goodput ledger, and the largest fraction of the time that these
# computations may take.
LEDGER_EVERY_S, LEDGER_SHARE = 10.0, 0.01
# The endings after which no supervisor has to start another attempt.
DONE = {"completed", "imported", "held", "released"}
# The maximum number of dead attempts whose spans one attempt sends. Later attempts have already sent all of these spans
# but the newest, unless they died too early. A span that is sent twice has the same id each time.
MOST_DEAD = 8


class Books:
    """The records of one run, for the attempt that owns the run. They are read once; `add` takes each new commit.

    `add` may be called from any thread. All other methods belong to one thread.
    """

    def __init__(self, journal: Journal, readings: Readings) -> None:
        self._journal, self._readings = journal, readings
        self._records: Records | None = None
        self._new: queue.SimpleQueue[Commit] = queue.SimpleQueue()
        self._next_at = 0.0

    @property
    def is_read(self) -> bool:
        """Return whether the records were read."""
        return self._records is not None

    def add(self, commit: Commit) -> None:
        """Take a new commit."""
        self._new.put(commit)

    def update(self, *, is_last: bool = False) -> None:
        """Compute the metrics from the records if it is time to do so, or if ``is_last`` is True.

        Raises:
            HoldfastError: the records can't be read.
        """
        if time.monotonic() < self._next_at and not is_last:
            return
        began = time.monotonic()
        if self._records is None:
            self._records = read_records(self._journal)
            self._count_endings(self._records)
        records = self._records
        while not self._new.empty():
            commit = self._new.get()
            records.commits[commit.number] = commit
        records.quarantined = frozenset(self._journal.numbers("quarantine"))
        if lives := make_lives(records):
            ledger = account(self._journal.run, lives)
            self._readings.put("holdfast.goodput", ledger.goodput)
            for bucket, spent_s in ledger.buckets.items():
                self._readings.put("holdfast.spent", spent_s, bucket)
        took_s = time.monotonic() - began
        self._next_at = time.monotonic() + max(LEDGER_EVERY_S, took_s / LEDGER_SHARE)

    def find_dead(self, number: int) -> list[DeadAttempt]:
        """Return the attempts directly before attempt ``number`` that died without recording an ending, newest first.

        The list stops before the newest attempt that recorded its own ending, and has at most `MOST_DEAD` entries. It
        is empty before the first `update`. A dead attempt's end is the last time that the records give for it: when it
        claimed the run, made its last commit, or trained the last step that a later attempt adopted.
        """
        if self._records is None:
            return []
        lives = [life for life in make_lives(self._records) if life.number <= number]
        dead: list[DeadAttempt] = []
        for life, after in zip(lives[-2::-1], lives[:0:-1], strict=True):
            if len(dead) == MOST_DEAD or (life.ending is not None and life.ending.row.is_own):
                break
            dead.append(self._describe_dead(self._records, life, after))
        return dead

    def _describe_dead(self, records: Records, life: Life, after: Life) -> DeadAttempt:
        own = [each for each in records.commits.values() if find_trainer(each, records.attempts) == life.number]
        signs = [each.ended for each in life.trained]
        signs += [seconds_of(each.created_at) for each in own if each.attempt == life.number]
        ended = min(max([life.claimed, *signs]), max(after.claimed, life.began))
        record = records.attempts.get(life.number)
        ending = life.ending or Ending("vanished")
        attributes: dict[str, str | int] = {
            "holdfast.reason": ending.reason,
            "holdfast.message": ending.message or ending.row.meaning,
            "holdfast.step": max((each.step for each in own), default=0),
        }
        key = record.writer if record else ""
        return DeadAttempt(life.number, key, min(life.began, life.claimed), ended, str(ending), attributes)

    def _count_endings(self, records: Records) -> None:
        for reason in REASONS.values():  # begin with 0, so that Prometheus sees the first restart as an increase
            if reason.retries:
                self._readings.put("holdfast.restarts", 0, reason.name)
        for record in records.attempts.values():
            self._readings.add("holdfast.host.failures", 0, record.host)
        for number, ended in records.endings.items():
            attempt = records.attempts.get(number)
            self._count(ended.ending, attempt.host if attempt else "")

    def _count(self, ending: Ending, host: str) -> None:
        if ending.reason not in DONE:
            self._readings.add("holdfast.restarts", 1, ending.reason)
        if host and (ending.row.is_loss or ending.reason == "gpu_unhealthy"):
            self._readings.add("holdfast.host.failures", 1, host)

    def end(self, number: int) -> Ending | None:
        """Count the ending of an attempt, and return the ending; None if no ending is on record.

        Raises:
            HoldfastError: the record can't be read.
        """
        record = self._journal.read_ending(number)
        known = self._records
        if record is not None and known is not None and number not in known.endings:
            known.endings[number] = record
            attempt = known.attempts.get(number)
            self._count(record.ending, attempt.host if attempt else "")
        self.update(is_last=True)
        return record.ending if record else None
