"""The configuration with which a command trains recorded steps again, and the parts of a run's records that it may use.

Anyone who can write to a store can write a run's records. So the reader's own configuration decides what is imported,
opened and connected to, and the records are only compared with it. If the reader names only a run, two conditions
apply: the run's records name only the reader's own code or Holdfast's, and no setting could open a file or an address.
Every command that trains from records asks `Trust.choose`.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config import Compute, Log, NearTier, RunConfig
from holdfast.errors import RecipeError
from holdfast.provenance.imports import find_spec
from holdfast.provenance.ownership import ENGINE, is_own_file
from holdfast.provenance.ownership import RECIPES as BUNDLED
from holdfast.recipe.declared import Search
from holdfast.recipe.permission import (
    RECIPES,
    check_recipe,
    find_files,
    list_origins,
    searched_like_a_rank,
)
from holdfast.store.modules import find_root, lies_in_run, lies_in_store
from holdfast.store.permission import list_allowed

TAKE_OWN = "name your configuration in place of the run, or give your own recipe: --recipe module:function"
TAKE_CONFIG = "name your configuration in place of the run: my_model.toml"
ACCEPT = "or accept what the records say: --trust-records"
# A text that matches may name something that a recipe could open: a path, a URL, a class, a variable. A colon
# counts where no space follows it, as in module:Class and env:NAME.
SHOWN_CHARS = 200
# A forged record may ask for a million ranks. A record may start at most this number, or one on each core.
MOST_RANKS = 32
OPENS = re.compile(r"[/\\\0$]|^~|:(?=\S)")


@dataclass(frozen=True)
class Trust:
    """The parts of a run's records that a command may use.

    Args:
        recipe: the recipe to train with, in place of the recorded or configured recipe; empty for none.
        records: whether to accept a recorded recipe and recorded settings, without the usual conditions. A recipe in a
            file of a store is never accepted.
        config: the reader's own configuration of the run, which replaces the recorded one; None if the reader named
            only the run.
    """

    recipe: str = ""
    records: bool = False
    config: RunConfig | None = None

    def choose(self, recorded: RunConfig, store: str) -> RunConfig:
        """Return the configuration to train with. Nothing is imported, opened or connected to.

        The list of skipped steps comes from the records, because `holdfast skip` writes it there.

        Args:
            recorded: the configuration in the run's records.
            store: the path or URL of the run's store.

        Raises:
            RecipeError: the recorded recipe, a recorded setting or number of ranks isn't accepted, or the current
                folder is in a store.
        """
        if self.config is not None:
            own = self.config.model_copy(update={"skip": recorded.skip})
            return own.model_copy(update={"recipe": self.recipe}) if self.recipe else own
        if not self.recipe and lies_in_store(Path.cwd(), find_root(store)):
            raise RecipeError(
                "the current folder is in a store, where others may put code",
                hint="start the command in your project's folder",
            )
        recipe = self.recipe or self._accept_recipe(recorded.recipe, store)
        if not self.records:
            check_settings(recorded)
            check_rank_count(recorded.compute)
        # Ignore the recorded number of loader workers: it never changes the bytes, and a forged record may ask for a
        # thousand.
        workers = min(recorded.compute.loader_workers, os.cpu_count() or 1)
        meeting = {"rendezvous": None} if recorded.compute.nodes == 1 else {}
        compute = recorded.compute.model_copy(update={"loader_workers": workers} | meeting)
        resume = recorded.resume.model_copy(update={"trusted_keys": (), "drain_file": None})
        opens_nothing: dict[str, Any] = {"log": Log(every=recorded.log.every), "near": NearTier(), "signing_key": None}
        return recorded.model_copy(update={"recipe": recipe, "compute": compute, "resume": resume, **opens_nothing})

    def _accept_recipe(self, recorded: str, store: str) -> str:
        """Return the recorded recipe; raise RecipeError if it isn't accepted."""
        said, root, files = f"the run's records name the recipe {recorded!r}", find_root(store), find_files(recorded)
        is_listed = list_allowed(RECIPES) is not None
        inside = [file for file in files if lies_in_run(file, root)]
        if not (inside or self.records or is_listed or is_readers(recorded)):
            raise RecipeError(
                f"{said}, whose code is neither in the current folder nor in Holdfast", hint=f"{TAKE_OWN}; {ACCEPT}"
            )
        if inside := inside or [file for file in files if lies_in_store(file)]:
            raise RecipeError(f"{said}, whose file is in a store: {inside[0]}", hint=TAKE_OWN)
        if self.records:
            return recorded
        if is_listed:
            check_recipe(recorded)
        if not is_declared(recorded):
            raise RecipeError(
                f"{said}, but its file has no recipe of this name: a function that is annotated with Recipe or Run",
                hint=f"{TAKE_OWN}; {ACCEPT}",
            )
        return recorded


# The trust of a reader who gave no option.
BY_DEFAULT = Trust()


# ---- the recipe


def is_readers(recipe: str) -> bool:
    """Return whether the code of a recipe is Holdfast's own recipe, or the reader's.

    The reader's code isn't installed and is in the current folder or on the module search path. Links are resolved:
    a link that leads out of these folders leads to code of other people.
    """
    origins = list_origins(recipe)
    files = [Path(os.path.realpath(origin)) for origin in origins]
    if files and files[-1].is_relative_to(BUNDLED):
        return all(file.is_relative_to(ENGINE) for file in files)
    is_path = recipe.rpartition(":")[0].endswith(".py")
    return all(_is_own(Path(origin), file, is_path) for origin, file in zip(origins, files, strict=True))


def _is_own(origin: Path, file: Path, is_path: bool) -> bool:
    """Return whether a file is the reader's own.

    Args:
        origin: the file as the search has found it, through links.
        is_path: whether the recipe names the file by its path. A module that is in no searched folder was found by an
            import hook of the reader's installation, such as that of an editable install.
    """
    folders = [Path.cwd(), *(Path(entry).absolute() for entry in sys.path if entry)]
    if not is_own_file(str(file)):
        return False
    if any(file.is_relative_to(os.path.realpath(folder)) for folder in folders):
        return True
    return not is_path and not any(origin.is_relative_to(folder) for folder in folders)


def is_declared(recipe: str) -> bool:
    """Return whether the syntax tree of a recipe's module, or of a module from which it is imported, declares it.

    If neither the module nor a package that contains it can be found, importing it executes nothing: return True, so
    that the error of the import says so.
    """
    module, _, name = recipe.rpartition(":")
    is_path = module.endswith(".py")
    with searched_like_a_rank():
        spec = None if is_path else find_spec(module)
        origin = module if is_path else (spec.origin if spec and spec.has_location else None)
        if origin is None:
            return not list_origins(recipe)
        search = Search(lambda imported, _: is_readers(f"{imported}:{name}"))
        return search.finds("" if is_path else module, Path(origin).resolve(), name)


# ---- the settings


def check_settings(recorded: RunConfig) -> None:
    """Raise RecipeError if a recorded setting of the recipe could open a file or an address, or name code."""
    found = next(list_opening(recorded.settings, "settings"), None)
    init = recorded.init_from
    if found is None and init is not None and opens(init.run):
        found = ("init_from.run", init.run)
    if found is not None:
        raise RecipeError(
            f"the run's records say {found[0]} = {found[1][:SHOWN_CHARS]!r}, which may name a file, an address or code",
            hint=f"{TAKE_CONFIG}; {ACCEPT}",
        )


def check_rank_count(compute: Compute) -> None:
    """Raise RecipeError if the records would start more ranks than this machine should run."""
    ranks = 1 if compute.ranks == "all" else compute.gathered_ranks
    if ranks > (most := max(MOST_RANKS, os.cpu_count() or 1)):
        raise RecipeError(
            f"the run's records say {ranks} ranks, and here they may start at most {most} ranks on one machine",
            hint=f"{TAKE_CONFIG}; {ACCEPT}",
        )


def list_opening(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each setting that could open a file or an address, keys of tables included."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from list_opening(key, name)
            yield from list_opening(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from list_opening(each, name)
    elif isinstance(value, str) and opens(value):
        yield name, value


def opens(text: str) -> bool:
    """Return whether a text could name a file or an address, by its form or because such a file exists here."""
    if OPENS.search(text):
        return True
    with contextlib.suppress(OSError, ValueError, re.error):
        return bool(text) and (os.path.lexists(text) or next(Path().glob(text), None) is not None)
    return True
