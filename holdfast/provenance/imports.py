"""The search for the user's own modules in a process, and for these modules' files, without importing anything."""

import ast
import sys
from collections.abc import Collection, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import cast

from holdfast.provenance.ownership import claim, is_own_file

# Modules that a debugger or the machine's Python installation adds to a process. They don't depend on the recipe.
INJECTED = ("pydev", "_pydev", "sitecustomize", "usercustomize")


def find_file(name: str) -> str:
    """Return the file of a loaded module, or the file that an import would load; empty if the module has no file."""
    module = sys.modules.get(name)
    if module is not None:
        return str(getattr(module, "__file__", None) or "")
    spec = find_spec(name)
    return spec.origin or "" if spec is not None and spec.has_location else ""


def find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of the module that an import would load. Unlike importlib, don't import the parent packages."""
    spec: ModuleSpec | None = None
    path: list[str] | None = None
    for part in list_prefixes(name):
        try:
            spec = _ask_finders(part, path)
            path = None if spec is None else list(spec.submodule_search_locations or ())
        except KeyError:  # the spec of a namespace package needs its parent package, which isn't loaded
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
    """Return the bytes of a module's file, which may be inside a zip file; None if there is no readable file."""
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


def claim_recipe(name: str) -> None:
    """Treat the package that contains a recipe as the user's own code, even if the package is installed.

    See `ownership.claim`.

    Args:
        name: the recipe, as ``module:attribute`` or ``file.py:attribute``.
    """
    module = name.rpartition(":")[0]
    claim(str(Path(module).absolute()) if module.endswith(".py") else find_file(module))


def find_code(roots: Collection[str], before: Collection[str]) -> list[str]:
    """Return the names of the user's modules that the recipe has loaded, by an import statement or in another way.

    Args:
        roots: the recipe's modules. All modules of their packages count as the user's own code, even if the
            packages are installed.
        before: the modules that were loaded before the recipe. They are included only if the recipe's code imports
            them.
    """
    for root in roots:
        claim(find_file(root))
    # Skip names that no import would find, because torch.compile loads its generated code under such names.
    new = [name for name in list(sys.modules) if name not in before and is_users(name) and _is_found(name)]
    parents = [each for root in roots for each in list_prefixes(root)[:-1] if is_users(each)]
    waiting = [*(root for root in roots if find_file(root)), *parents, *new]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            imported = (each for each in list_imports(name) if each in sys.modules)
            waiting += [each for each in imported if each not in found and is_users(each)]
    return sorted(found)


def is_users(name: str) -> bool:
    """Return whether a module's code is the user's, judged by the files of the module and its top-level package."""
    top = name.partition(".")[0]
    file = find_file(name)
    if not file or name == "__main__" or top.startswith(INJECTED):
        return False
    return is_own_file(file) and (top == "holdfast" or is_own_file(find_file(top) or file))


def _is_found(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin == find_file(name)


def list_imports(name: str) -> set[str]:
    """Return the modules in a module's import statements, also inside functions; empty if its file isn't Python.

    For ``from a import b`` return ``a`` and ``a.b``.
    """
    file = find_file(name)
    data = read_module(name) if file.endswith(".py") else None
    try:
        tree = ast.parse(data) if data else None
    except (SyntaxError, ValueError):
        return set()
    package = name if Path(file).name == "__init__.py" else name.rpartition(".")[0]
    nodes = ast.walk(tree) if tree else ()
    return {part for node in nodes for target in _targets(node, package) for part in list_prefixes(target)}


def _targets(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and (module := find_source(node, package)):
        yield module
        yield from (f"{module}.{alias.name}" for alias in node.names if alias.name != "*")


def find_source(node: ast.ImportFrom, package: str) -> str:
    """Return the module from which a statement imports, which may be relative to a package; empty for no module."""
    parents = package.split(".")
    base = parents[: len(parents) + 1 - node.level] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def list_prefixes(name: str) -> list[str]:
    """Return a dotted name and its parents: ``a``, ``a.b``, ``a.b.c`` for ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
