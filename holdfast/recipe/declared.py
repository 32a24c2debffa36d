"""The search for a recipe in the syntax tree of a module, without importing the module.

Importing a module executes it. So a record must not name any of the reader's scripts, but only a module that has a
recipe: a function annotated to return a `Recipe` or to take a `Run`, or a subclass of `Recipe`.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.provenance.imports import find_source, find_spec
from holdfast.recipe.annotations import RUN, is_last_part

RECIPE = "Recipe"
# The maximum number of names that the search follows, starting with the recipe's: imports, base classes, wrapped
# functions.
MOST_NAMES = 50
Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Search:
    """The search for one recipe.

    Args:
        may_read: decides by a module's name and file whether the search follows an import into this module.
    """

    def __init__(self, may_read: Callable[[str, Path], bool]) -> None:
        self._may_read = may_read
        self._seen: set[tuple[str, str]] = set()

    def finds(self, module: str, file: Path, name: str) -> bool:
        """Return whether a module binds a name to a recipe.

        Args:
            module: the module's dotted name, to which relative imports refer; empty for a file that is no module.
        """
        if (str(file), name) in self._seen or len(self._seen) >= MOST_NAMES:
            return False
        self._seen.add((str(file), name))
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return False
        return any(self._is_recipe(node, module, file, tree, name) for node in _list_statements(tree))

    def _is_recipe(self, node: ast.stmt, module: str, file: Path, tree: ast.Module, name: str) -> bool:
        if isinstance(node, Functions):
            return node.name == name and declares(node, tree)
        if isinstance(node, ast.ClassDef):
            is_it = node.name == name
            return is_it and any(_names(each, RECIPE, tree) or self._follows(module, file, each) for each in node.bases)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            bound = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_it = any(isinstance(each, ast.Name) and each.id == name for each in bound)
            return is_it and node.value is not None and self._follows(module, file, node.value)
        if isinstance(node, ast.ImportFrom):
            source = find_source(node, module if file.name == "__init__.py" else module.rpartition(".")[0])
            own = (alias.name for alias in node.names if name == (alias.asname or alias.name))
            return any(self._finds_imported(source, each) for each in own)
        return False

    def _follows(self, module: str, file: Path, value: ast.expr) -> bool:
        """Return whether a value is a recipe of the same module: its name, or a call that contains the name."""
        if isinstance(value, ast.Call):
            return any(self._follows(module, file, each) for each in (value.func, *value.args))
        if isinstance(value, ast.Name):
            return self.finds(module, file, value.id) or self.finds(module, file, f"{value.id}.__call__")
        return False

    def _finds_imported(self, module: str, name: str) -> bool:
        spec = find_spec(module)
        if spec is None or not spec.origin or not spec.has_location:
            return False
        file = Path(spec.origin).resolve()
        return self._may_read(module, file) and self.finds(module, file, name)


def declares(function: Functions, tree: ast.Module) -> bool:
    """Return whether a function's annotations say that it returns a `Recipe` or takes a `Run`."""
    arguments = function.args
    taken = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return _names(function.returns, RECIPE, tree) or any(_names(each.annotation, RUN, tree) for each in taken)


def _list_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module that run on its import, also below ``if``, ``try`` and ``with``."""
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.ClassDef):  # a recipe may be an instance of this class
            yield from (_named(each, f"{node.name}.{each.name}") for each in node.body if isinstance(each, Functions))
        elif not isinstance(node, Functions):
            waiting += ast.iter_child_nodes(node)


def _named(function: Functions, name: str) -> Functions:
    return ast.FunctionDef(name, function.args, [], [], function.returns)


def _names(annotation: ast.expr | None, name: str, tree: ast.Module) -> bool:
    """Return whether an annotation or a base class names this class, also in quotes or by an alias."""
    if isinstance(annotation, ast.Constant):
        return is_last_part(str(annotation.value), name)
    if isinstance(annotation, ast.Attribute):
        return annotation.attr == name
    if not isinstance(annotation, ast.Name):
        return False
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    aliases = {alias.asname: alias.name for node in imports for alias in node.names if alias.asname}
    return aliases.get(annotation.id, annotation.id) == name
