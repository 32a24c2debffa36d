"""Failures of an attempt's ranks: if the same failure comes twice in a row, the attempt ends."""

from holdfast.errors import HoldfastError, NoProgress, RankDied


class Failures:
    """The last failure of an attempt's ranks, with its step."""

    def __init__(self) -> None:
        self._last: tuple[int, object] | None = None

    def find_no_progress(self, error: HoldfastError, step: int) -> NoProgress | None:
        """Return the error that ends the attempt if the previous failure was the same, in the same step; else None.

        A rank's death never counts as a repeated failure, because the machine may have killed the rank.

        Args:
            step: the newest step whose checkpoint is durable on the store.
        """
        failure = (step, error.data.get("step"))
        is_repeated = not isinstance(error, RankDied) and failure == self._last
        self._last = failure
        if not is_repeated:
            return None
        message = f"the ranks failed twice in the same way, with no step committed in between: {error}"
        return NoProgress(message, hint=error.hint, step=step, reason=error.reason)
