"""The check that the training computes the metric that ``retention.keep_best`` names."""

from collections.abc import Iterable

from holdfast.config import KeepBest, did_you_mean
from holdfast.errors import ConfigError

# The metric that every commit records.
MEAN_LOSS = "avg_loss"


def check_best(best: KeepBest | None, evaluated: Iterable[str]) -> None:
    """Raise ConfigError unless the metric of ``keep_best`` is the mean loss or a metric that an evaluation returns.

    If the name were misspelt, no checkpoint would count as one of the best, and retention could delete nothing.

    Args:
        best: the setting ``retention.keep_best``; None if it isn't set.
        evaluated: the names of the metrics that the evaluation returns.
    """
    known = {MEAN_LOSS, *evaluated}
    if best is not None and best.metric not in known:
        raise ConfigError(
            f"retention.keep_best.metric = {best.metric!r}: expected {MEAN_LOSS}, or a metric that your evaluate "
            "function returns (Recipe(evaluate=...) or run.observe(evaluate=...))",
            hint=did_you_mean(best.metric, known),
        )
