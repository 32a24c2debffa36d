"""The watches over an attempt's ranks: objects of extensions that find ranks which make no progress."""

from pathlib import Path
from typing import Protocol

from holdfast.errors import RankDied

# The environment variable with the factor for the time limits of watches. A process on another machine that starts an
# attempt's ranks there reads it.
PATIENCE_VARIABLE = "HOLDFAST_PATIENCE"
LOOK_EVERY_S = 1.0


class RankWatch(Protocol):
    """A watch over the ranks of this machine."""

    def look(self, log: Path) -> RankDied | None:
        """Return the error for which all ranks are killed; None if the ranks make progress.

        Called every `LOOK_EVERY_S` seconds while the attempt waits for the ranks. After a RankHung the attempt replaces
        the ranks, and a new watch has four times the patience.

        Args:
            log: the file with the ranks' standard error.
        """
        ...
