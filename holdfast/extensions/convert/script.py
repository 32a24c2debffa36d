"""A script as text and as a syntax tree, and edits of its text that keep everything else as it is."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.While)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While


@dataclass
class Script:
    """A Python script that is being edited.

    Attributes:
        name: the file's name, for messages.
        text: the script as it was read.
        edits: the bytes to replace, as (first, end, text); `apply` makes the new text.
    """

    name: str
    text: str
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    _deleted: set[ast.stmt] = field(default_factory=set)

    @cached_property
    def tree(self) -> ast.Module:
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                child.parent = node  # type: ignore[attr-defined]
        return tree

    @cached_property
    def _data(self) -> bytes:
        return self.text.encode()

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(each.end() for each in re.finditer(rb"\n", self._data))]

    @cached_property
    def functions(self) -> list[Function]:
        """All functions and methods, in the order of the text."""
        return [node for node in ast.walk(self.tree) if isinstance(node, FUNCTIONS)]

    # ---- the text

    def place(self, node: ast.AST) -> str:
        """Return a node's place, as ``file:line``."""
        return f"{self.name}:{cast(ast.stmt, node).lineno}"

    def segment(self, node: ast.AST) -> str:
        """Return a node's text."""
        first, end = self.span(node)
        return self._data[first:end].decode()

    def span(self, node: ast.AST) -> tuple[int, int]:
        found = cast(ast.stmt, node)
        assert found.end_lineno is not None
        assert found.end_col_offset is not None
        first = self._starts[found.lineno - 1] + found.col_offset
        return first, self._starts[found.end_lineno - 1] + found.end_col_offset

    def _lines(self, node: ast.stmt) -> tuple[int, int]:
        """Return the bytes of a statement's whole lines, decorators included."""
        decorators = [each.lineno for each in getattr(node, "decorator_list", [])]
        assert node.end_lineno is not None
        end = self._starts[node.end_lineno] if node.end_lineno < len(self._starts) else len(self._data)
        return self._starts[min([node.lineno, *decorators]) - 1], end

    def indent_of(self, node: ast.stmt) -> str:
        return " " * node.col_offset

    # ---- edits

    def replace(self, node: ast.AST, text: str) -> None:
        self.edits.append((*self.span(node), text))

    def replace_head(self, loop: ast.While, text: str) -> None:
        """Replace the head of a loop, up to its colon."""
        self.edits.append((self.span(loop)[0], self.span(loop.test)[1], text))

    def delete(self, statement: ast.stmt) -> None:
        """Delete a statement's lines. If nothing else is in its block, delete an ``if`` around it, or put ``pass``."""
        self._deleted.add(statement)
        around = parent_of(statement)
        block = next((each for each in _blocks(around) if statement in each), [])
        if around is None or not self._deleted.issuperset(block):
            self.edits.append((*self._lines(statement), ""))
        elif isinstance(around, ast.If) and not around.orelse and not _is_branch(around):
            self.delete(around)
        else:
            first, _ = self._lines(block[0])
            self.edits.append((first, self._lines(block[-1])[1], f"{self.indent_of(block[0])}pass\n"))

    def insert_before(self, statement: ast.stmt, *lines: str) -> None:
        first, _ = self._lines(statement)
        self.edits.append((first, first, "".join(f"{self.indent_of(statement)}{line}\n" for line in lines)))

    def insert_after(self, statement: ast.stmt, *lines: str) -> None:
        _, end = self._lines(statement)
        break_ = "" if end == 0 or self._data[end - 1 : end] == b"\n" else "\n"
        self.edits.append((end, end, break_ + "".join(f"{self.indent_of(statement)}{line}\n" for line in lines)))

    def insert_at(self, node: ast.AST, offset: int, text: str) -> None:
        """Insert a text this number of bytes after a node's beginning."""
        first, _ = self.span(node)
        self.edits.append((first + offset, first + offset, text))

    def apply(self) -> str:
        """Return the edited text. An edit inside the bytes of a larger one is left out."""
        parts, position = list[bytes](), 0
        for first, end, text in sorted(self.edits, key=lambda edit: (edit[0], edit[1] > edit[0], -edit[1])):
            if first >= position:
                parts += [self._data[position:first], text.encode()]
                position = end
        return b"".join([*parts, self._data[position:]]).decode()


# ---- the tree


def parent_of(node: ast.AST) -> ast.AST | None:
    return getattr(node, "parent", None)


def enclosing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes around a node, innermost first."""
    found = parent_of(node)
    while found is not None:
        yield found
        found = parent_of(found)


def function_of(node: ast.AST) -> Function | None:
    """Return the innermost function around a node; None at the top of the module."""
    return next((each for each in enclosing(node) if isinstance(each, FUNCTIONS)), None)


def class_of(function: ast.AST) -> ast.ClassDef | None:
    found = parent_of(function)
    return found if isinstance(found, ast.ClassDef) else None


def walk_own(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of statements, but not those inside functions and classes that they define."""
    for node in body:
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from walk_own(list(ast.iter_child_nodes(node)))


def assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with its value; those of ``a, b = x, y`` one by one."""
    assert node.value is not None
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def arguments_of(call: ast.Call, function: Function) -> dict[str, ast.expr]:
    """Return what a call gives for a function's parameters, by their names."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if class_of(function) else names
    given = dict(zip(names, call.args, strict=False))
    return given | {each.arg: each.value for each in call.keywords if each.arg}


def dotted(node: ast.AST) -> str:
    """Return a name such as ``torch.optim.SGD``; empty for any different expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def called(node: ast.AST) -> str:
    """Return the name of the called function, or the first name of a chain of calls: ``Net`` in ``Net().to("cpu")``."""
    while isinstance(node, ast.Call):
        if name := dotted(node.func):
            return name
        if not isinstance(node.func, ast.Attribute):
            return ""
        node = node.func.value
    return ""


def names_in(nodes: Sequence[ast.AST], context: type[ast.expr_context]) -> set[str]:
    """Return the names that statements load or store."""
    return {
        each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, context)
    }


def free_names(function: Function) -> set[str]:
    """Return the names that a function reads and doesn't store: those of the scopes around it."""
    parameters = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    return names_in(function.body, ast.Load) - names_in(function.body, ast.Store) - parameters


def _blocks(node: ast.AST | None) -> Iterator[list[ast.stmt]]:
    for field_ in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, field_, None), list):
            yield block


def _is_branch(node: ast.If) -> bool:
    """Return whether an ``if`` is an ``elif``."""
    around = parent_of(node)
    return isinstance(around, ast.If) and around.orelse == [node]
