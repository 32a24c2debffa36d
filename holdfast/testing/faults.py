"""Real deaths at named points, for tests of your own recipes; `holdfast.faults` carries them out."""

from pathlib import Path

from holdfast.faults import POINTS


def fault(point: str, nth: int, victim: str, struck: Path) -> dict[str, str]:
    """Return the environment in which a run dies, once, at a point; the file ``struck`` exists afterwards.

    Args:
        point: one of `holdfast.faults.POINTS`.
        nth: the pass at which the fault strikes, counted from 1 in each process.
        victim: whom SIGKILL ends; see `holdfast.faults`.

    Raises:
        ValueError: there is no such point, pass or victim.
    """
    if point not in POINTS or victim not in ("self", "other", "both") or nth < 1:
        raise ValueError(f"no such fault: {point}:{nth}:{victim}")
    return {"HOLDFAST_FAULT": f"{point}:{nth}:{victim}:{struck}"}
