"""The search for the user's own modules in a process, and for their files, without importing anything."""

import ast
import functools
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import cast

import holdfast

SITE_FOLDERS = {"site-packages", "dist-packages"}
STDLIB = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")})
ENGINE = str(Path(holdfast.__file__).resolve().parent)
INSTALLED = (ENGINE, *STDLIB)
# The package of the recipes that come with Holdfast, and of what they share.
RECIPES = "holdfast.recipes"
# Modules that a debugger or the site's Python adds to a process. They don't depend on the recipe.
INJECTED = ("pydev", "_pydev", "sitecustomize", "usercustomize")


def find_file(name: str) -> str:
    """Return the file of a module, loaded or as an import would find it; empty if the module has no file."""
    module = sys.modules.get(name)
    if module is not None:
        return str(getattr(module, "__file__", None) or "")
    spec = find_spec(name)
    return spec.origin or "" if spec is not None and spec.has_location else ""


def find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of the module that an import would load. Unlike importlib, don't import the module's parents."""
    spec: ModuleSpec | None = None
    path: list[str] | None = None
    for part in _prefixes(name):
        try:
            spec = _ask_finders(part, path)
            path = None if spec is None else list(spec.submodule_search_locations or ())
        except KeyError:  # a namespace package needs its parent, which isn't loaded
            spec, path = None, [str(Path(folder, part.rpartition(".")[2])) for folder in path or ()]
        if not path and part != name:
            return None
    return spec


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            if spec := getattr(finder, "find_spec", lambda *_: None)(name, path):
                return cast(ModuleSpec, spec)
        except (ImportError, ValueError, AttributeError):
            continue
    return None


def read_module(name: str) -> bytes | None:
    """Return the bytes of a module's file, also from inside a zip file; None if there is no readable file."""
    file = find_file(name)
    if not file:
        return None
    try:
        return Path(file).read_bytes()
    except OSError:
        spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
        get_data = getattr(getattr(spec, "loader", None), "get_data", None)
    try:
        return bytes(get_data(file)) if get_data else None
    except OSError:
        return None


def find_code(roots: Collection[str], before: Collection[str]) -> list[str]:
    """Return the names of the user's loaded modules: those that the recipe imports or loads in another way.

    Args:
        roots: the recipe's modules. They and the rest of their packages count as the user's even if installed.
        before: the modules that were loaded before the recipe; they count only if the recipe's code imports them.
    """
    own = {_find_package(root) for root in roots} - {"holdfast"}
    # Skip names that no import finds: torch.compile loads its generated code under such names.
    new = [name for name in list(sys.modules) if name not in before and is_users(name, own) and _is_found(name)]
    parents = [each for root in roots for each in _prefixes(root)[:-1] if is_users(each, own)]
    waiting = [*(root for root in roots if find_file(root)), *parents, *new]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            imported = (each for each in list_imports(name) if each in sys.modules)
            waiting += [each for each in imported if each not in found and is_users(each, own)]
    return sorted(found)


def _find_package(root: str) -> str:
    """Return the package of a recipe's module: the top-level one, or that of all recipes which come with Holdfast."""
    return RECIPES if root.startswith(f"{RECIPES}.") else root.partition(".")[0]


def is_users(name: str, own: Collection[str] = ()) -> bool:
    """Return whether a module is the user's code: not the standard library's, not installed, not Holdfast's.

    Args:
        own: packages that are the user's even if installed.
    """
    top = name.partition(".")[0]
    file = find_file(name)
    if not file or name == "__main__" or top.startswith(INJECTED):
        return False
    is_own = any(f"{name}.".startswith(f"{each}.") for each in own)
    return is_own or not any(_is_installed(each) for each in {file, find_file(top)} if each)


@functools.cache
def _is_installed(file: str) -> bool:
    if is_below(file, INSTALLED):
        return True
    path = Path(file).resolve()
    if is_below(str(path), INSTALLED):
        return True
    # pip install --target, pex and Bazel use other folders, but put a RECORD that names the file beside the package.
    return any(path.is_relative_to(folder) and _is_recorded(path, folder) for folder in map(Path, sys.path))


def is_below(file: str, folders: Iterable[str]) -> bool:
    """Return whether a file lies in one of the folders, or in a folder for installed packages."""
    # Compared as text: making thousands of Path objects takes 0.2 s.
    if any(f"{os.sep}{name}{os.sep}" in file for name in SITE_FOLDERS):
        return True
    return any(file.startswith(f"{folder}{os.sep}") for folder in folders)


def _is_recorded(path: Path, folder: Path) -> bool:
    line = f"{path.relative_to(folder).as_posix()},"
    return any(line in _read_text(record) for record in folder.glob("*.dist-info/RECORD"))


@functools.cache
def _read_text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")


def _is_found(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin == find_file(name)


def list_imports(name: str) -> set[str]:
    """Return the modules that a module's import statements name, also inside functions; empty if it is not Python.

    ``from a import b`` names ``a`` and ``a.b``.
    """
    file = find_file(name)
    data = read_module(name) if file.endswith(".py") else None
    try:
        tree = ast.parse(data) if data else None
    except (SyntaxError, ValueError):
        return set()
    package = name if Path(file).name == "__init__.py" else name.rpartition(".")[0]
    nodes = ast.walk(tree) if tree else ()
    return {part for node in nodes for target in _targets(node, package) for part in _prefixes(target)}


def _targets(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = parents[: len(parents) + 1 - node.level] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        if module:
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names if alias.name != "*")


def _prefixes(name: str) -> list[str]:
    """Return a dotted name and its parents: ``a``, ``a.b``, ``a.b.c`` for ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
