"""Open the run that a command's argument names, and decide which records to use; see `holdfast.recipe.trust`."""

from collections.abc import Sequence
from pathlib import Path

from holdfast.config import load_config
from holdfast.errors import ConfigError, WrongUse
from holdfast.journal import Journal
from holdfast.journal.finding import open_journal
from holdfast.recipe.trust import Trust
from holdfast.store import open_store
from holdfast.store.modules import find_root, lies_in_store


def open_trusted(place: str, recipe: str, records: bool, overrides: Sequence[str] = ()) -> tuple[Journal, Trust]:
    """Return the journal of a run, and the parts of its records to use.

    Args:
        place: ``<store>/<run>``, or the TOML file of the reader's configuration, which names the run and its store.
        recipe, records: see `Trust`.
        overrides: ``key=value``, as in `load_config`.

    Raises:
        ConfigError: the configuration can't be read, or is in a store.
        WrongUse: there are overrides, but no configuration.
    """
    if not is_config(place):
        if overrides:
            raise WrongUse(
                "--set changes a configuration, but you have named a run", hint="name the configuration instead"
            )
        return open_journal(place), Trust(recipe, records)
    config = load_config(place, overrides)
    if lies_in_store(Path(place).resolve(), find_root(config.store)):
        raise ConfigError(
            f"{place} is in a store, where other people may put files", hint="move this file into your project"
        )
    return Journal(open_store(config.store), config.run), Trust(recipe, records, config)


def is_config(place: str) -> bool:
    """Return whether an argument names a configuration, and not a run or a store."""
    return place.endswith(".toml") and "://" not in place and not Path(place).is_dir()
