"""The check that the metric of ``retention.keep_best`` is one that the training gives."""

from collections.abc import Iterable

from holdfast.config import KeepBest, did_you_mean
from holdfast.errors import ConfigError

# The metric that every commit has.
MEAN_LOSS = "avg_loss"


def check_best(best: KeepBest | None, evaluated: Iterable[str]) -> None:
    """Raise ConfigError if the metric is neither the mean loss nor among those that an evaluation gives.

    With a misspelt metric no checkpoint would be among the best, and the retention could prune nothing.
    """
    known = {MEAN_LOSS, *evaluated}
    if best is not None and best.metric not in known:
        raise ConfigError(
            f"retention.keep_best.metric = {best.metric!r}: it is neither {MEAN_LOSS} nor a metric that evaluate (of a "
            "loop: run.observe(evaluate=...)) returns",
            hint=did_you_mean(best.metric, known),
        )
