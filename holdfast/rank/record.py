"""The record of the code, packages, files and built values that a rank trains with."""

import hashlib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from holdfast import __version__
from holdfast.checkpoint import read_metadata
from holdfast.config import RunConfig
from holdfast.errors import ConfigDrift, NameMissing, RecordDamaged
from holdfast.journal import read_commit
from holdfast.provenance.imports import find_code, find_file, read_module
from holdfast.provenance.opened_files import Opened, describe_files
from holdfast.provenance.packages import describe_holdfast, find_contents, find_packages, find_versions
from holdfast.provenance.sources import find_listed, hash_source, read_source
from holdfast.recipe.function import split_recipe
from holdfast.store import open_store
from holdfast.training import Training
from holdfast.training.built import describe_built


class CodeRecord:
    """The record of one rank's code.

    Each module's file is hashed once, as soon as the module is found, because the file may be edited while the run
    trains.
    """

    def __init__(
        self, training: Training, before: Collection[str], opened: Opened, recorded: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            training: a training (model, data, optimizer) that has just been built, at step 0.
            before: the names of the modules that were loaded before the recipe.
            opened: the files that were opened while the recipe was built.
            recorded: the ``environment`` of the checkpoint that the run continues from. The modules and packages named
                there are looked up even if the recipe hasn't imported them.
        """
        self._before = {*before}
        self._recorded = recorded or {}
        self._root, _ = split_recipe(training.config.recipe)
        folder = Path(find_file(self._root)).resolve().parent
        modules, self._listed = find_listed(training.recipe.sources, folder)
        self._roots = [self._root, *modules]
        self._packages: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._bytes: dict[str, str] = {}
        self._loaded: set[str] = set()
        self._count = -1
        self._note_files()
        self._note_modules()
        self._note_recorded(folder)
        self._files = describe_files(opened, _list_module_files(), folder, _list_folders(training))
        self._built = describe_built(training)

    def describe(self) -> dict[str, Any]:
        """Return the record in the form of a checkpoint's ``environment``."""
        return {
            "sources": dict(sorted(self._sources.items())),
            "source_bytes": dict(sorted(self._bytes.items())),
            "packages": dict(sorted(self._packages.items())),
            "package_files": self._find_contents(),
            "holdfast": describe_holdfast(__version__),
            "files": self._files,
            "built": self._built,
        }

    def complete(self, environment: dict[str, Any]) -> None:
        """Add the modules and packages that training has imported to the record.

        Raises:
            ConfigDrift: the code of an imported module differs from the code that was hashed for it before the first
                step.
        """
        if len(sys.modules) != self._count:
            self._note_modules()
            sources = {name: self._sources[name] for name in sorted({*environment["sources"], *self._loaded})}
            environment |= {"sources": sources, "source_bytes": dict(self._bytes)}
            environment["packages"] = {**environment["packages"], **self._packages}
            environment["package_files"] = self._find_contents()

    def _find_contents(self) -> dict[str, Any]:
        return find_contents(sorted(self._packages), self._recorded.get("package_files", {}))

    def _note_files(self) -> None:
        for name, path in self._listed.items():
            self._add(name, path.read_bytes(), is_python=path.suffix == ".py")

    def _note_modules(self) -> None:
        self._count = len(sys.modules)
        found = find_code(self._roots, self._before)
        for name in found:
            if name not in self._loaded and (data := read_module(name)) is not None:
                known = self._bytes.get(name)
                self._loaded.add(name)
                if known is not None and known != hashlib.sha256(data).hexdigest():
                    raise ConfigDrift(
                        f"the module {name} was loaded from {find_file(name)}, and its code there differs from the "
                        "code that Holdfast recorded before the first step",
                        hint=(
                            "start again: the file was changed meanwhile, or sys.path now finds the module in another "
                            "folder"
                        ),
                    )
                self._add(name, data, is_python=find_file(name).endswith(".py"))
        self._packages |= find_packages(found)

    def _note_recorded(self, folder: Path) -> None:
        """Add the modules and packages that the checkpoint's record names and that the recipe hasn't imported yet."""
        for name in self._recorded.get("sources", {}).keys() - self._sources.keys():
            if (found := read_source(name, folder)) is not None:
                self._add(name, found[0], is_python=found[1])
        self._packages |= find_versions(self._recorded.get("packages", {}).keys() - self._packages.keys())

    def _add(self, name: str, data: bytes, *, is_python: bool) -> None:
        self._bytes[name] = hashlib.sha256(data).hexdigest()
        # If the checkpoint's record has the same bytes, take the hash from the record. To compute the hash, comments
        # would have to be stripped: 0.8 s for a megabyte of source.
        if self._bytes[name] == self._recorded.get("source_bytes", {}).get(name) and name in self._recorded["sources"]:
            self._sources[name] = self._recorded["sources"][name]
        else:
            self._sources[name] = hash_source(data) if is_python else self._bytes[name]


def read_recorded(config: RunConfig, number: int) -> dict[str, Any]:
    """Return a commit's ``environment`` (its machine and code); empty if there is no commit, or no such record.

    Args:
        number: the commit's number; 0 for none.
    """
    if not number:
        return {}
    folder = open_store(config.store).inside(config.run)
    try:
        metadata = read_metadata(folder, read_commit(folder, number).path)
    except (RecordDamaged, NameMissing):
        return {}  # ignore damage here, because the resume reads the same records and reports their damage
    return metadata.environment if metadata else {}


def _list_module_files() -> set[str]:
    """Return the files of all loaded modules."""
    return {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}


def _list_folders(training: Training) -> list[str]:
    """Return the folders that Holdfast itself reads and writes."""
    config = training.config
    return [f"{folder}/{config.run}" for folder in (config.store.removeprefix("file://"), config.log.folder)]
