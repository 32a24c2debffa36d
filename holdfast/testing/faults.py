"""Faults of a run at a named point, for tests of your recipes; `holdfast.machine.faults` executes them."""

from pathlib import Path

from holdfast.machine.faults import NEAR_POINTS, POINTS, REHEARSAL_POINTS


def fault(point: str, nth: int, victim: str, struck: Path) -> dict[str, str]:
    """Return the environment variable that makes a run die once, by SIGKILL, at a named point of Holdfast's code.

    Args:
        point: one of `holdfast.machine.faults.POINTS`, `REHEARSAL_POINTS` or `NEAR_POINTS`.
        nth: the kill happens when a process passes the point for the n-th time, counted from 1.
        victim: the processes that are killed: ``self``, ``other`` or ``both``; see `holdfast.machine.faults`.
        struck: a file that the fault creates, so that it strikes only once.

    Raises:
        ValueError: the point, count or victim is unknown or out of range.
    """
    points = POINTS + REHEARSAL_POINTS + NEAR_POINTS
    if point not in points or victim not in ("self", "other", "both") or nth < 1:
        raise ValueError(f"no such fault: {point}:{nth}:{victim}")
    return {"HOLDFAST_FAULT": f"{point}:{nth}:{victim}:{struck}"}


def flip(rank: int, struck: Path | None = None) -> dict[str, str]:
    """Return the environment variable that flips a bit in the self-test of a rank's device.

    The self-test makes the same step twice, and compares the results.

    Args:
        rank: the rank.
        struck: a file that the fault creates, so that it flips a bit only once, in the second step. Without a file it
            flips the same bit in every step. Then both steps agree, and only a different device or the run's records
            can reveal the fault.
    """
    return {"HOLDFAST_FLIP": f"{rank}:{struck or ''}"}
