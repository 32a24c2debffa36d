"""The variables that a loop carries from one step to the next, found in its source: local ones, and attributes.

A checkpoint restores objects, not variables: a variable that is read in a step before that step assigns it, and that
the step assigns later, has another value after a resume unless its object is kept. So has an iterator from which a step
takes the next item.
"""

import ast
import builtins
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# The names that are assigned after code that can't be reached: all.
EVERYTHING = None
Assigned = set[str] | None
# The methods of a `Run` that a loop iterates over.
METHODS = {"steps", "epochs", "batches"}


@dataclass(frozen=True)
class Carried:
    """A variable that is carried from step to step.

    Attributes:
        line: the line of the source that reads it first.
    """

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}"


def find_carried(file: str, functions: Iterable[str]) -> list[Carried]:
    """Return the variables that a run's loops carry from one pass to the next.

    A run's loops are those over ``run.steps(...)``, ``run.epochs(...)`` and ``run.batches(...)``.

    Args:
        file: the source file.
        functions: names of functions in it; the functions of the file that these call are searched, too.

    Returns: nothing if the source can't be read.
    """
    found: dict[str, int] = {}
    for loop in _find_loops(file, functions):
        targets = _names_stored([loop.target])
        reads = _Reads()
        reads.visit_all(loop.body, targets)
        stored = (_names_stored(loop.body) | _names_advanced(loop.body)) - targets
        for name, line in reads.first.items():
            if name in stored and not hasattr(builtins, name):
                found[name] = min(line, found.get(name, line))
    return [Carried(name, file, line) for name, line in sorted(found.items(), key=lambda item: (item[1], item[0]))]


def find_stored(file: str, functions: Iterable[str]) -> set[str]:
    """Return the variables that a run's loops assign, or fill anew before they read them.

    See `find_carried` for the arguments.
    """
    loops = _find_loops(file, functions)
    stored = {name for loop in loops for name in _names_stored([loop.target, *loop.body]) if "." not in name}
    return stored.union(*map(_names_refilled, loops))


def _names_refilled(loop: ast.For) -> set[str]:
    """Return the arrays that an inner loop fills item by item, as ``values[i] = ...``, before they are read."""
    reads, filled, others = _Reads(), dict[str, int](), set[str]()
    reads.visit_all(loop.body, _names_stored([loop.target]))
    places = {
        id(each): inner.target.id
        for inner in ast.walk(loop)
        if isinstance(inner, ast.For) and inner is not loop and isinstance(inner.target, ast.Name)
        for each in ast.walk(inner)
    }
    for each in ast.walk(loop):
        match each:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Name(id=place), ctx=ast.Store()):
                if places.get(id(each)) == place:
                    filled[name] = min(each.lineno, filled.get(name, each.lineno))
                    continue
                others.add(name)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                others.add(name)
    return {name for name, line in filled.items() if name not in others and reads.first.get(name) == line}


def find_change(file: str, functions: Iterable[str], name: str) -> int:
    """Return the first line that may change a variable or an attribute of this name; 0 if none does.

    A run's loops come first, then the functions that they call. See `find_carried` for the arguments.
    """
    loops = (each for loop in _find_loops(file, functions) for each in ast.walk(loop))
    for nodes in (loops, _walk_functions(_parse(file), functions)):
        changed = (target for node in nodes if (target := _find_changed(node)) is not None)
        if lines := [each.lineno for each in changed if name in (getattr(each, "attr", ""), getattr(each, "id", ""))]:
            return min(lines)
    return 0


def _find_changed(node: ast.AST) -> ast.expr | None:
    """Return the variable or attribute that a node may change: by a method, by an item, or as an attribute."""
    match node:
        case ast.Call(func=ast.Attribute(value=target)) | ast.Subscript(value=target, ctx=ast.Store()):
            return target
        case ast.AugAssign(target=ast.Name() as target) | (ast.Attribute(ctx=ast.Store()) as target):
            return target
    return None


@functools.cache
def find_carried_attributes(file: str, kind: str) -> frozenset[str]:
    """Return the attributes that a class's own methods read before they assign them, and assign: ``h``, say.

    Args:
        file: the source file of the class.
        kind: the name of the class.
    """
    found: set[str] = set()
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.ClassDef) and node.name == kind:
            for method in (each for each in node.body if isinstance(each, ast.FunctionDef) and each.args.args):
                reads, own = _Reads(), f"{method.args.args[0].arg}."
                reads.visit_all(method.body, set())
                names = reads.first.keys() & _names_stored(method.body)
                found |= {name.removeprefix(own) for name in names if name.startswith(own)}
    return frozenset(found)


def _parse(file: str) -> ast.AST:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _find_loops(file: str, functions: Iterable[str]) -> list[ast.For]:
    """Return a run's loops in some functions of a file, and in those that they call."""
    nodes = _walk_functions(_parse(file), functions)
    return [each for each in nodes if isinstance(each, ast.For) and _is_of_a_run(each.iter)]


def _names_advanced(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of the iterators from which ``next`` takes."""
    calls = (each for node in nodes for each in ast.walk(node) if isinstance(each, ast.Call))
    return {
        name
        for each in calls
        if isinstance(each.func, ast.Name) and each.func.id == "next" and each.args
        if (name := _name_of(each.args[0]))
    }


def _walk_functions(tree: ast.AST, functions: Iterable[str]) -> Iterator[ast.AST]:
    """Yield the nodes of these functions, and of all functions in the tree that they name."""
    known = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    waiting = [name for name in functions if name in known]
    for name in waiting:
        for node in ast.walk(known[name]):
            yield node
            named = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if named in known and named not in waiting:
                waiting.append(named)


def _is_of_a_run(iterator: ast.expr) -> bool:
    calls = (each.func for each in ast.walk(iterator) if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Attribute) and each.attr in METHODS for each in calls)


def _names_stored(nodes: Iterable[ast.AST]) -> set[str]:
    return {
        name
        for node in nodes
        for each in ast.walk(node)
        if (name := _name_of(each)) and isinstance(getattr(each, "ctx", None), ast.Store)
    }


def _name_of(node: ast.AST) -> str:
    """Return the name of a variable, or of an attribute of one, such as ``self.best``; empty for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return f"{node.value.id}.{node.attr}" if is_attribute else ""  # type: ignore[attr-defined]


class _Reads:
    """A walk over statements that notes each name which may be read before the statements have assigned it.

    Attributes:
        first: the line of each such name's first read.
    """

    def __init__(self) -> None:
        self.first: dict[str, int] = {}

    def visit_all(self, body: Sequence[ast.stmt], assigned: Assigned) -> Assigned:
        """Visit statements one after the other. Return the names that are assigned after them on every path."""
        for statement in body:
            if assigned is EVERYTHING:
                break
            assigned = self._visit(statement, set(assigned))
        return assigned

    def _visit(self, statement: ast.stmt, assigned: set[str]) -> Assigned:
        match statement:
            case ast.If(test=test, body=body, orelse=orelse):
                self._read(test, assigned)
                return _both(self.visit_all(body, assigned), self.visit_all(orelse, assigned))
            case ast.For(target=target, iter=iterator, body=body, orelse=orelse):
                self._read(iterator, assigned)
                # An inner loop almost always has a pass. If it had none, the names that it assigns would be carried.
                after = self.visit_all(body, assigned | _names_stored([target]))
                return self.visit_all(orelse, _names_stored(body) | assigned if after is EVERYTHING else after)
            case ast.While(test=test, body=body, orelse=orelse):
                self._read(test, assigned)
                self.visit_all(body, assigned)
                self.visit_all(orelse, assigned)
                return assigned
            case ast.With(items=items, body=body):
                for item in items:
                    self._read(item.context_expr, assigned)
                    assigned |= _names_stored([item.optional_vars] if item.optional_vars else [])
                return self.visit_all(body, assigned)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
                after = self.visit_all([*body, *orelse], assigned)
                for handler in handlers:
                    after = _both(after, self.visit_all(handler.body, assigned | {handler.name or ""}))
                return self.visit_all(finalbody, after)
            case ast.AugAssign(target=target, value=value):
                self._read(value, assigned)
                self._read(target, assigned, is_update=True)
                return assigned | _names_stored([target])
            case ast.Continue() | ast.Break() | ast.Return() | ast.Raise():
                self._read(statement, assigned)
                return EVERYTHING
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self._read(statement, assigned | _names_stored([statement]))
                return assigned | {name}
            case _:
                self._read(statement, assigned)
                return assigned | _names_stored([statement])

    def _read(self, node: ast.AST, assigned: set[str], *, is_update: bool = False) -> None:
        """Note the names that an expression reads, apart from those that are assigned or the expression's own."""
        own = {
            name
            for each in ast.walk(node)
            if isinstance(each, ast.comprehension)
            for name in _names_stored([each.target])
        }
        own |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        for each in ast.walk(node):
            name = _name_of(each)
            if not name or name in assigned or name.partition(".")[0] in own:
                continue
            if isinstance(each.ctx, ast.Load) or is_update:  # type: ignore[attr-defined]
                self.first.setdefault(name, each.lineno)  # type: ignore[attr-defined]


def _both(one: Assigned, other: Assigned) -> Assigned:
    if one is EVERYTHING:
        return other
    return one if other is EVERYTHING else one & other
