"""The rule that distinguishes the user's own code from other code.

The record of code, the lines in errors, and the search for unsaved state follow this rule.

Code is the user's unless it belongs to Python or Holdfast, or is installed. Installed code is in ``site-packages`` or
``dist-packages``, or beside the ``.dist-info`` folder that lists it. After `claim` was called for a file of the
recipe's package, this package is the user's, even if it is installed.
"""

import functools
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

SITE_FOLDERS = {"site-packages", "dist-packages"}
STDLIB = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")})
ENGINE = str(Path(__file__).resolve().parents[1])
# The recipes that come with Holdfast, and their shared modules, count as the user's code, because a run trains them.
RECIPES = f"{ENGINE}{os.sep}recipes"

# Installed packages that count as the user's own code: the folder of each or, for a single module, the file.
_claimed: set[str] = set()


def claim(file: str) -> None:
    """Treat the installed package that contains a recipe's file as the user's own code, in this process."""
    path = Path(file)
    for each in {path, path.resolve()}:
        base = _find_base(str(each))
        is_pythons = _is_below(str(each), *STDLIB) and Path(base).name not in SITE_FOLDERS
        if base and not is_pythons and not _is_below(str(each), ENGINE):
            _claimed.add(str(Path(base, each.relative_to(base).parts[0])))


def is_own_file(file: str) -> bool:
    """Return whether the code in a file is the user's; False for a name that isn't a file, such as ``<string>``."""
    if not file or file.startswith("<"):
        return False
    if _is_below(file, ENGINE):
        return _is_below(file, RECIPES)
    return not _find_base(file) or is_claimed(file)


def is_claimed(file: str) -> bool:
    """Return whether a file belongs to an installed package that counts as the user's own code."""
    return _is_below(file, *_claimed)


def is_own(thing: Any) -> bool:
    """Return whether a function, a code object or a class is the user's.

    For a class, and for code compiled from a string (such as a dataclass's methods), the module's file decides.
    """
    code = getattr(thing, "__code__", thing)
    file = getattr(code, "co_filename", "<")
    if file.startswith("<"):
        module = sys.modules.get(str(getattr(thing, "__module__", "")))
        file = getattr(module, "__file__", None) or ""
    return is_own_file(file)


def _is_below(file: str, *folders: str) -> bool:
    # Compare paths as texts, because creating thousands of Path objects would take 0.2 s.
    return any(file == folder or file.startswith(f"{folder}{os.sep}") for folder in folders)


@functools.cache
def _find_base(file: str) -> str:
    """Return the folder into which a file's package was installed; empty for a file that wasn't installed.

    For a file of Python or Holdfast that isn't in such a folder, return the file's own folder.
    """
    path = Path(file)
    for each in dict.fromkeys((path, path.resolve())):
        sites = [str(parent) for parent in each.parents if parent.name in SITE_FOLDERS]
        if sites or _is_below(str(each), *STDLIB, ENGINE):
            return sites[0] if sites else str(each.parent)
    # pip install --target, pex and Bazel install into folders of other names. Such a folder has a RECORD, too, which
    # names the file.
    resolved = path.resolve()
    folders = (folder for folder in map(Path, sys.path) if resolved.is_relative_to(folder))
    return next((str(folder) for folder in folders if _is_recorded(resolved, folder)), "")


def _is_recorded(path: Path, folder: Path) -> bool:
    line = f"{path.relative_to(folder).as_posix()},"
    return any(line in _read_text(record) for record in folder.glob("*.dist-info/RECORD"))


@functools.cache
def _read_text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")
