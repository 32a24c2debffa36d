"""Ranks that are started before they are needed: while an attempt's caller waits, and before a rehearsal."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from holdfast.config import RunConfig
from holdfast.journal import Commit, Journal
from holdfast.machine.gpus.checks import settle_ranks
from holdfast.rank.launching import Ranks, choose_ranks
from holdfast.rank.lived_steps import name_lived
from holdfast.rank.orphans import end_orphans
from holdfast.store import open_store


def start_ranks(
    config: RunConfig, number: int, newest: Commit | None, *, patience: float = 1.0, is_held: bool = False
) -> Ranks:
    """Start and return ranks for an attempt. If a launcher such as torchrun has started ranks, return those ranks.

    Args:
        number: the attempt's number.
        newest: the commit that will probably be restored; None if the commit is unknown.
        patience: the factor for the time limits of the watches over the ranks.
        is_held: whether the ranks wait after they have imported torch; see `RanksAhead.start`.
    """
    lived = name_lived(Path(config.log.folder) / config.run, number)
    commit = newest.number if newest else 0
    ranks = choose_ranks(config.compute)
    return ranks(config, name_log(config, number), commit, patience=patience, lived=lived, is_held=is_held)


def name_log(config: RunConfig, number: int) -> Path:
    """Return the file for the output of an attempt's ranks."""
    return Path(config.log.folder) / config.run / f"attempt-{number:08d}.log"


class RanksAhead:
    """A holder for ranks that are started before they are needed; empty before `start` and after `take`."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._arguments: tuple[RunConfig, int, Commit | None] | None = None
        self._is_held = False

    def start(self, config: RunConfig, number: int, newest: Commit | None, *, is_held: bool = False) -> None:
        """Start ranks, unless a set is waiting already; see `start_ranks`.

        Args:
            is_held: whether the ranks wait after they have imported torch, and use no device before `take`.
        """
        if self._ranks is None:
            self._arguments, self._is_held = (config, number, newest), is_held
            self._ranks = start_ranks(config, number, newest, is_held=is_held)

    def take(self, config: RunConfig, number: int, newest: Commit | None) -> Ranks | None:
        """Return the waiting ranks, which the caller then owns; None if none wait.

        If the waiting ranks were started with other arguments, end them, and return None: they may have begun to read
        another commit's checkpoint. Held ranks have read no checkpoint yet, so they fit any arguments.
        """
        if not self._is_held and self._arguments != (config, number, newest):
            self.end()
        ranks, self._ranks = self._ranks, None
        if ranks is not None and self._is_held:
            ranks.proceed()
        return ranks

    def end(self) -> None:
        """End the waiting ranks, if there are any."""
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None


# The ranks that `started_ahead` has started, for the attempt that is opened inside its block. A caller can't pass them
# through a flow, because a flow's parameters are JSON.
STARTED_AHEAD: ContextVar[RanksAhead | None] = ContextVar("STARTED_AHEAD", default=None)


def find_ahead(config: RunConfig) -> RanksAhead | None:
    """Return the ranks that `started_ahead` has started for an attempt; None if there are none.

    Before an attempt starts its first ranks, the run's orphans have to end; see `holdfast.rank.orphans`.
    """
    ahead = STARTED_AHEAD.get()
    if ahead is None:
        end_orphans(config)
    return ahead


@contextlib.contextmanager
def started_ahead(config: RunConfig) -> Iterator[None]:
    """Start the ranks of the run's next attempt early. An attempt that is opened inside the block takes them over.

    Use it while the process waits for something else, such as Prefect's server. At the end of the block, ranks that no
    attempt has taken over are ended.

    Raises:
        HoldfastError: the run's folder can't be read, or the ranks' output can't be written.
    """
    journal, ahead = Journal(open_store(config.store), config.run), RanksAhead()
    before = STARTED_AHEAD.set(ahead)
    try:
        end_orphans(config)
        ahead.start(settle_ranks(config), journal.next_attempt(), journal.newest())
        yield
    finally:
        STARTED_AHEAD.reset(before)
        ahead.end()
