"""The goodput ledger: every second of a run's life in one bucket, from the records of its attempts and commits.

==============  =================================================================================================
bucket          seconds
==============  =================================================================================================
``productive``  in steps that the newest commit contains
``lost``        in steps that died with their attempt, or that a quarantine took back, until the loss was noticed
``stall``       that saves took from training: the pause for the copy, and the slower steps during the write
``restart``     from the start of an attempt's ranks, or of ranks that replace dead ones, until they trained
``rehearsal``   in which training waited for a rehearsal, whose new ranks trained the same next steps
``save``        in which ranks waited for a save or a commit and nothing was trained, as at the end of a run
``drain``       from the last step until the end of an attempt that was told to end and has saved
``waiting``     between two attempts: for a machine, for its supervisor, for the start of its process
==============  =================================================================================================

The buckets sum to the wall time exactly, because one cursor moves over the run's life and counts each second once.

The time of a sudden death is not on record. An attempt without a recorded ending can have continued after its
last recorded step for at most one chunk and its save. Otherwise there would be a checkpoint of that chunk. So this
much time counts as lost, but at most until the next attempt began or a supervisor noticed the death. The rest counts as
waiting. Productive time never depends on this estimate. Lost time is an upper bound and goodput a lower bound, except
in one case that no record shows: ranks are replaced after the last save of an attempt, and then the attempt dies, too.

Goodput is the productive fraction of the available time, which is all time but ``waiting``. The limit is the goodput if
only restarts cost time. Efficiency is goodput divided by the limit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise, zip_longest

from holdfast.errors import RecordDamaged, WrongUse
from holdfast.journal import Journal
from holdfast.journal.endings import MACHINE, Ending
from holdfast.ledger.timeline import Life, Trained, Usual, make_lives, read_records

BUCKETS = ("productive", "lost", "stall", "restart", "rehearsal", "save", "drain", "waiting")
# An attempt without an ending counts as alive for this many chunks after its last commit, because a chunk may be slower
# than usual.
LIVE_CHUNKS = 2.0
# Ranks that are still alive begin to train within this many seconds of the order to train. A longer gap shows that
# ranks were replaced.
ORDERED_WITHIN_S = 2.0
VANISHED = "vanished"
TOLD_TO_END = {"preempted", "paused", "cancelled"}


@dataclass(frozen=True)
class Spent:
    """Seconds of a run, and the fractions that are computed from these seconds.

    Attributes:
        available_s: seconds in which an attempt held its machines.
        productive_s: seconds of training that survived.
        restart_s: seconds until training began.
    """

    available_s: float = 0.0
    productive_s: float = 0.0
    restart_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Return the productive fraction of the available time; 0 if there was no available time."""
        return self.productive_s / self.available_s if self.available_s else 0.0

    @property
    def limit(self) -> float:
        """Return the goodput if nothing but restarts cost time."""
        return 1 - self.restart_s / self.available_s if self.available_s else 1.0

    @property
    def efficiency(self) -> float:
        """Return the goodput divided by its limit."""
        return self.goodput / self.limit if self.limit else 0.0


@dataclass(frozen=True)
class AttemptLedger:
    """One attempt's part of the ledger.

    Attributes:
        began: when its ranks were started.
        ended: when it ended. If `is_end_known` is False, the latest time at which it can have trained.
        reason: the reason for its end; empty while the attempt trains; ``vanished`` if it recorded no ending and saved
            too late.
        buckets: seconds by bucket; ``waiting`` is the time before the attempt began. If no attempt followed, it
            includes the time after the end.
        lost_steps: the number of steps that were trained and lost. If the attempt died, an upper bound, estimated from
            the time.
    """

    number: int
    host: str
    began: datetime
    ended: datetime
    reason: str
    buckets: dict[str, float]
    lost_steps: int
    is_end_known: bool

    @property
    def is_preempted(self) -> bool:
        """True if the attempt lost its machine or its processes, with or without a notice."""
        row = Ending(self.reason).row
        return bool(self.reason) and (row.spends == MACHINE or row.is_loss)

    @property
    def mark(self) -> str:
        """Return ``~`` if the attempt's end is not on record and its times are only bounds; else an empty text."""
        return "" if self.is_end_known or not self.reason else "~"

    @property
    def end(self) -> str:
        """Return how the attempt ended, for a person, with its `mark`; ``trains`` if it has not ended."""
        return f"{self.mark}{self.reason.replace('_', ' ') or 'trains'}"


@dataclass(frozen=True)
class Ledger:
    """Where the time of a run went.

    Attributes:
        wall_s: seconds from the first attempt's start to the last attempt's end; to now if the run still trains.
        buckets: seconds by bucket, in the order of `BUCKETS`; they sum to `wall_s`.
        goodput: productive seconds divided by available seconds (G); 0 if there were no available seconds.
        limit: the goodput if nothing but restarts cost time.
        efficiency: `goodput` divided by `limit` (E).
        preemptions: the number of attempts that lost their machine or their processes.
        cost_per_preemption_s: mean seconds for each preemption: lost training, the drain, and the restart that follows.
        missing: a line for each record that is lost, damaged or too old, with its consequence for the ledger.
    """

    run: str
    began: datetime
    ended: datetime
    wall_s: float
    buckets: dict[str, float]
    attempts: tuple[AttemptLedger, ...]
    goodput: float
    limit: float
    efficiency: float
    preemptions: int
    cost_per_preemption_s: float
    missing: tuple[str, ...]


def make_ledger(journal: Journal, now: datetime | None = None) -> Ledger:
    """Account for every second of a run's life.

    Args:
        now: the end of the ledger, if the run still trains; the current time if None.

    Raises:
        RunUnknown: there is no such run.
        RecordDamaged: no record of an attempt is left.
        WrongUse: a later version wrote the run, or it has no attempt yet.
    """
    missing = []
    try:
        journal.read_run()
    except RecordDamaged as error:
        missing.append(str(error))
    records = read_records(journal)
    lives = make_lives(records)
    if not lives:
        if left := [*missing, *records.missing]:
            raise RecordDamaged(
                "\n".join([f"run {journal.run!r} has no record of an attempt", *(f"  {line}" for line in left)]),
                hint="holdfast verify shows which of the run's files are left",
            )
        raise WrongUse(f"run {journal.run!r} has no record of an attempt", hint="train the run first")
    return account(journal.run, lives, (*missing, *map(_explain, records.missing)), now)


def account(run: str, lives: Sequence[Life], missing: tuple[str, ...] = (), now: datetime | None = None) -> Ledger:
    """Account for every second of a run's attempts, given as at least one life. See `make_ledger`."""
    usual = Usual.of([each for life in lives for each in life.trained])
    attempts = tuple(_account_all(lives, usual, (now or datetime.now(UTC)).timestamp()))
    return _sum_up(run, attempts, missing)


def _explain(line: str) -> str:
    if line.startswith("attempts/"):
        return f"{line}: the attempt's time before its first commit counts as waiting"
    if line.startswith("commits/"):
        return f"{line}: the commit's steps count as lost, unless a later commit descends from it"
    if line.startswith("commit "):
        return f"{line}: these steps count as lost"
    return f"{line}: the attempt counts as vanished"


def _sum_up(run: str, attempts: tuple[AttemptLedger, ...], missing: tuple[str, ...]) -> Ledger:
    buckets = {name: sum(each.buckets[name] for each in attempts) for name in BUCKETS}
    wall_s = sum(buckets.values())
    spent = Spent(wall_s - buckets["waiting"], buckets["productive"], buckets["restart"])
    preempted = [(each, after) for each, after in zip_longest(attempts, attempts[1:]) if each.is_preempted]
    cost_s = sum(
        each.buckets["lost"] + each.buckets["drain"] + (after.buckets["restart"] if after else 0.0)
        for each, after in preempted
    )
    began = attempts[0].began
    return Ledger(
        run=run,
        began=began,
        ended=datetime.fromtimestamp(began.timestamp() + wall_s, UTC),
        wall_s=wall_s,
        buckets=buckets,
        attempts=attempts,
        goodput=spent.goodput,
        limit=spent.limit,
        efficiency=spent.efficiency,
        preemptions=len(preempted),
        cost_per_preemption_s=cost_s / len(preempted) if preempted else 0.0,
        missing=missing,
    )


# ---- one attempt


def _account_all(lives: Sequence[Life], usual: Usual, now: float) -> Iterator[AttemptLedger]:
    at = lives[0].began
    for life, after in pairwise([*lives, None]):
        assert life is not None
        account = _Account(life, after, usual, at)
        account.add_training()
        account.add_end(now)
        at = account.at
        yield account.to_ledger()


class _Account:
    """A cursor that passes over one attempt's time and puts every second into a bucket.

    Attributes:
        at: the cursor, in seconds since 1970. It never moves back: if two attempts overlap, or the clocks of two
            machines differ, the overlap counts for the earlier attempt.
    """

    def __init__(self, life: Life, after: Life | None, usual: Usual, at: float) -> None:
        self.at = at
        self._life, self._after, self._usual = life, after, usual
        self._buckets = dict.fromkeys(BUCKETS, 0.0)
        self._lost_steps = 0.0
        self._reason = life.ending.reason if life.ending else VANISHED if after else ""
        self._ended = life.began
        self._is_end_known = life.ending is not None and life.ending.row.is_own
        self._spend(life.began, "waiting")

    def _spend(self, until: float, bucket: str) -> float:
        """Move the cursor to a later time. Count the seconds until this time in a bucket, and return their number."""
        spent_s = max(until - self.at, 0.0)
        self._buckets[bucket] += spent_s
        self.at += spent_s
        return spent_s

    def _lose(self, until: float, before: Trained | None) -> None:
        """Count the time until ``until`` as lost, and compute the number of steps that were lost in it.

        No step was lost if the ranks ended with the save of ``before``.
        """
        lost_s = self._spend(until, "lost")
        if before is None or not before.is_last:
            self._lost_steps += lost_s / self._usual.step_s if self._usual.step_s else 0.0

    def add_training(self) -> None:
        """Account for the time from the start of the ranks to the end of the last recorded save's stall."""
        restart_s = 0.0  # the restart time of the current ranks
        for before, each in zip([None, *self._life.trained], self._life.trained, strict=False):
            self._spend(min(each.began, self.at + each.rehearse_s), "rehearsal")
            if before is None:
                self._add_start(each)
            elif begins_anew := self._find_restart(each, restart_s):
                self._lose(each.began - begins_anew, before)
                self._spend(each.began, "restart")
            else:
                self._spend(each.began, "productive" if each.is_after_gap else "save")
            restart_s = each.restart_s or restart_s
            self._spend(each.ended - each.slow_s, "productive" if each.is_kept else "lost")
            self._lost_steps += 0 if each.is_kept else each.steps
            self._spend(each.ended + each.stall_s, "stall")

    def _find_restart(self, each: Trained, before_s: float) -> float:
        """Return the seconds of the restart before a commit's steps; 0 if the same ranks trained the commit before.

        All commits of the same ranks record the same restart time. An adopted commit (made by a later attempt, from a
        checkpoint that ranks saved after their attempt had died) records no restart time.
        """
        if each.reason == "adopted" and each.began - self.at > ORDERED_WITHIN_S:
            return self._usual.restart_s
        return each.restart_s if each.restart_s != before_s else 0.0

    def _add_start(self, first: Trained) -> None:
        """Account for the time until the first recorded step.

        The time counts as lost if ranks died before their first save. But if the record of the previous commit can't be
        read, the time counts as productive, because the newest commit contains the steps of that unreadable commit.
        """
        if first.restart_s and first.began - self.at > first.restart_s + ORDERED_WITHIN_S:
            self._spend(min(self.at + first.restart_s, first.began - first.restart_s), "restart")
            until = first.began - first.restart_s
            self._spend(until, "productive") if first.is_after_gap else self._lose(until, None)
        self._spend(first.began, "restart")

    def add_end(self, now: float) -> None:
        """Account for the time after the last recorded save."""
        life, after, usual = self._life, self._after, self._usual
        before = life.trained[-1] if life.trained else None
        until = min(now if life.ended_at is None else life.ended_at, after.claimed if after else math.inf)
        if not life.trained:
            self._spend(min(until, life.began + (usual.restart_s or math.inf)), "restart")
        if self._is_end_known:
            bucket = self._find_last_bucket()
            self._lose(until, before) if bucket == "lost" else self._spend(until, bucket)
            self._ended = self.at
            return
        until = min(until, after.began) if after else until
        chunk_s = max([each.ended - each.began for each in life.trained], default=usual.train_s)
        chunk_s += max([each.save_s for each in life.trained], default=usual.save_s)
        if not self._reason and until - self.at <= LIVE_CHUNKS * (chunk_s or math.inf):
            self._spend(until, "productive")
            self._ended = self.at
            return
        self._reason = self._reason or VANISHED
        self._lose(min(until, self.at + chunk_s) if chunk_s else until, before)
        self._ended = self.at
        if not after:
            self._spend(until, "waiting")

    def _find_last_bucket(self) -> str:
        """Return the bucket of the time after the last save of an attempt that recorded its own ending."""
        if self._reason == "completed":
            return "save"
        is_saved = not self._life.trained or self._life.trained[-1].reason == "preempted"
        return "drain" if self._reason in TOLD_TO_END and is_saved else "lost"

    def to_ledger(self) -> AttemptLedger:
        """Return the attempt's part of the ledger."""
        life = self._life
        began, ended = (datetime.fromtimestamp(each, UTC) for each in (life.began, max(self._ended, life.began)))
        return AttemptLedger(
            number=life.number, host=life.host, began=began, ended=ended, reason=self._reason, buckets=self._buckets,
            lost_steps=round(self._lost_steps), is_end_known=self._is_end_known,
        )  # fmt: skip
