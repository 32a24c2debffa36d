"""The folders in which Python searches for the user's modules, and the question whether a folder is in a store.

Anyone who can write to a store can put modules there. So the current folder never comes first in ``sys.path``: a file
such as ``json.py`` or ``holdfast.py`` in it must not replace a module of Python or Holdfast.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.store.permission import split_store

ENGINE_FOLDER = Path(__file__).resolve().parents[2]
SITE_FOLDERS = ("site-packages", "dist-packages")


def python_command(*arguments: str) -> list[str]:
    """Return the command that starts this Python without the current folder in ``sys.path``."""
    return [sys.executable, "-P", *arguments]


def describe_modules() -> dict[str, str]:
    """Return an environment in which no Python searches the current folder first, and every Python finds Holdfast.

    Child processes inherit this environment, also the processes that Prefect starts for flow runs in a pool's folder.
    """
    folders = filter(None, [str(ENGINE_FOLDER), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}


def spell_module_path() -> str:
    """Return the value of PYTHONPATH with which a child process, which imports the recipe, finds the same modules.

    The current folder is left out, because the child appends it itself after its first imports: see
    `search_current_folder`.
    """
    return os.pathsep.join(_list_others(sys.path))


def search_current_folder(module: str) -> None:
    """Let this process find a module of the user's in the current folder, too; see `place_current`.

    If the current folder is in a store, this adds the folder only if the module is there: a library must not find
    further modules there.

    Args:
        module: the module's dotted name, from the user's own configuration.
    """
    current = Path.cwd()
    top = current / module.partition(".")[0]
    is_there = top.is_dir() or top.with_name(f"{top.name}.py").is_file()
    if str(current) not in sys.path and (is_there or not is_store(current)):
        sys.path[:] = place_current(sys.path)


def place_current(path: Sequence[str]) -> list[str]:
    """Return a module search path with the current folder before the installed packages, but after Python's modules.

    In a store the current folder comes last, so that no file there can replace an installed module.
    """
    current, found = Path.cwd(), _list_others(path)
    sites = [place for place, folder in enumerate(found) if Path(folder).name in SITE_FOLDERS]
    found.insert(len(found) if not sites or is_store(current) else sites[0], str(current))
    return list(dict.fromkeys(found))


def _list_others(path: Sequence[str]) -> list[str]:
    current = Path.cwd()
    folders = dict.fromkeys(Path(folder).absolute() for folder in path)
    return [str(folder) for folder in folders if folder != current or folder == ENGINE_FOLDER]


def is_store(folder: Path) -> bool:
    """Return whether a folder holds runs, or is in a run."""
    return lies_in_run(folder) or next(folder.glob("*/run.json"), None) is not None


def lies_in_store(path: Path, root: Path | None = None) -> bool:
    """Return whether a path, whose links are resolved, is in a folder of runs.

    The current folder and its parents may hold runs beside the user's code, so they count only as a run's folder.

    Args:
        root: the folder of a store, if it is known.
    """
    project = Path.cwd()
    others = [folder for folder in path.parents if folder not in (project, *project.parents)]
    return lies_in_run(path, root) or any(next(folder.glob("*/run.json"), None) is not None for folder in others)


def lies_in_run(path: Path, root: Path | None = None) -> bool:
    """Return whether a path is in the folder of a known store, or in a run. This lists no folder."""
    folders = [path, *path.parents]
    return root in folders or any((folder / "run.json").is_file() for folder in folders)


def find_root(store: str) -> Path | None:
    """Return the resolved folder of a store; None for a store that isn't a folder."""
    parts = split_store(store)
    return Path(*parts[1:]) if parts[:1] == ("",) else None
