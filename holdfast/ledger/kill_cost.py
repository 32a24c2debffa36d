"""The cost of killing a run now, for a scheduler that has to choose which run to kill."""

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict

from holdfast.journal import Commit, format_time, seconds_of
from holdfast.ledger.forecast import reserve_s
from holdfast.ledger.interval import Cost, measure_costs


class KillCost(BaseModel):
    """The cost of killing a run at one moment.

    A kill without a notice costs ``lost_gpu_s`` and ``restart_s * gpus`` GPU seconds. If the run is told to end
    ``save_within_s`` before the kill, it saves in time and loses no step.

    Attributes:
        as_of: the time at which these numbers were computed.
        step: the newest step that was trained.
        commit: the number of the last commit; 0 before the first.
        commit_step: the commit's step; 0 before the first.
        committed_at: the time of the commit.
        since_commit_s: the seconds since the commit.
        gpus: the GPUs that the run uses on all nodes; 0 on CPUs.
        lost_s: the seconds of training since the commit, which a kill without a notice loses.
        lost_gpu_s: `lost_s` times the number of GPUs.
        save_within_s: the bound on the seconds from the order to end until the save is committed; None before the first
            save. ``holdfast plan --trace`` shows this bound as the time of a last save.
        restart_s: seconds from an attempt's start until it trains; 0 if unknown.
        safe_at: the time at which the next commit is expected. A kill right after that commit costs least.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    attempt: int
    as_of: str
    step: int
    commit: int
    commit_step: int
    committed_at: str | None
    since_commit_s: float | None
    gpus: int
    lost_s: float | None
    lost_gpu_s: float | None
    save_within_s: float | None
    restart_s: float
    safe_at: str | None

    @classmethod
    def of(
        cls,
        run: str,
        attempt: int,
        head: Commit | None,
        step: int,
        *,
        costs: Sequence[Cost],
        gpus: int,
        next_commit_step: int,
        now: float,
        speed: float = 0.0,
    ) -> Self:
        """Return the cost of killing a run now.

        Args:
            head: the last commit.
            step: the newest step that was trained.
            costs: the measured costs of the newest commits, oldest first.
            next_commit_step: the step of the next commit; 0 if unknown.
            now: the time, in seconds since 1970.
            speed: steps per second, for a run that has no commit yet; 0 if unknown.
        """
        measured = measure_costs(costs)
        step_s = measured.step_s if measured else 1 / speed if speed else None
        first = head.step if head else 0
        lost_s = None if step_s is None else (step - first) * step_s
        # The next commit needs the remaining steps of its chunk, and then the time of a save.
        left_s = (next_commit_step - step) * step_s + (measured.save_s if measured else 0.0) if step_s else None
        return cls(
            run=run,
            attempt=attempt,
            as_of=format_time(now),
            step=step,
            commit=head.number if head else 0,
            commit_step=first,
            committed_at=head.created_at if head else None,
            since_commit_s=_round(max(now - seconds_of(head.created_at), 0.0)) if head else None,
            gpus=gpus,
            lost_s=_round(lost_s),
            lost_gpu_s=None if lost_s is None else _round(lost_s * gpus),
            save_within_s=_round(reserve_s(measured)) if measured else None,
            restart_s=round(measured.restart_s, 3) if measured else 0.0,
            safe_at=format_time(now + max(left_s, 0.0)) if left_s is not None and next_commit_step else None,
        )


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
