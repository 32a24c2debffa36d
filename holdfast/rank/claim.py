"""The check that a node shares the attempt's store: the node has to see the attempt's claim there. Imports no torch."""

from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, StoreError
from holdfast.journal import Journal
from holdfast.store import open_store


def find_attempt(config: RunConfig) -> int:
    """Return the number of the run's newest attempt that this node sees on the store."""
    return Journal(open_store(config.store), config.run).attempts()


def find_problem(config: RunConfig, attempt: int, node: str) -> str:
    """Return why this node can't see an attempt's claim; empty if the node sees the claim.

    Args:
        node: the node's name for messages.
    """
    try:
        found = Journal(open_store(config.store), config.run).has_attempt(attempt)
        reason = "" if found else f"attempt {attempt} of run {config.run!r} isn't in the store"
    except HoldfastError as error:
        reason = str(error)
    return f"{node} does not share the store {config.store}: {reason}" if reason else ""


def not_shared(problem: str) -> StoreError:
    """Return the error for a store that a node doesn't share."""
    return StoreError(problem, hint="give all nodes one store: a shared file system, or a bucket")
