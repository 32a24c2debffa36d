"""Find the loop that trains: the calls that lead to it, its loop over epochs, and its loop over batches."""

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from holdfast.errors import ConfigError
from holdfast.extensions.convert.script import (
    FUNCTIONS,
    LOOPS,
    Function,
    Loop,
    Script,
    called,
    class_of,
    dotted,
    enclosing,
    function_of,
)

# Functions that wrap a loader and leave its batches unchanged.
WRAPPERS = {"enumerate", "tqdm", "tqdm.tqdm", "tqdm.auto.tqdm", "track", "trange", "log_every", "notebook_tqdm"}
LOADER = re.compile(r"loader|_dl$|^dl$|^train_iter$|^trainset_iter$", re.IGNORECASE)
STEPS = re.compile(r"opt|scaler|adam|sgd|engine", re.IGNORECASE)
# For the loops of other libraries: the methods that train, by the ending of the class's name.
FOREIGN = {"Trainer": ("train", "fit")}


@dataclass
class Loops:
    """The loop that trains.

    Attributes:
        batch: the loop whose passes are steps, or batches of a step.
        epoch: the loop over epochs around it; None if there is none.
        loader: the expression of the loader in the batch loop's head; None if the loop makes its batches itself.
        calls: the calls that lead from the script's top to the loops, outermost first, with the called functions.
        others: further loops that train.
    """

    batch: Loop
    epoch: Loop | None
    loader: ast.expr | None
    calls: list[tuple[ast.Call, Function]]
    others: list[Loop] = field(default_factory=list)

    @property
    def outer(self) -> Loop:
        return self.epoch or self.batch

    @property
    def around(self) -> list[Loop]:
        """The loops around the outer loop, in its function or in a function that calls it: they train several times."""
        places = [self.outer, *(call for call, _ in self.calls_into(self.outer))]
        return [each for place in places for each in _loops_around(place)]

    def calls_into(self, loop: Loop) -> list[tuple[ast.Call, Function]]:
        """Return the calls that lead into a loop, or into the function around it."""
        around = function_of(loop)
        return self.calls[: next((n + 1 for n, (_, each) in enumerate(self.calls) if each is around), 0)]


class Finder:
    """Finds the loops of a script that train, through the calls of the script's own functions."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._trains: dict[ast.AST, bool] = {}

    def find(self, line: int = 0) -> Loops:
        """Return the loop that trains: the last one of the script, or the one at a line.

        Raises:
            ConfigError: the script has no such loop.
        """
        paths = [path for path in self._paths(self.script.tree.body, ()) if any(isinstance(n, LOOPS) for n in path)]
        if line:
            paths = [path for path in paths if any(isinstance(n, LOOPS) and n.lineno == line for n in path)]
        if not paths:
            raise ConfigError(
                f"{self.script.name}{f':{line}' if line else ''} has no loop that calls backward() and an optimizer's "
                "step(), directly or in functions that it calls in this file",
                hint="put the function that has the loop into this file, and convert again: holdfast docs convert",
            )
        found = self._describe(paths[-1])
        loops = [next(node for node in path if isinstance(node, LOOPS)) for path in paths[:-1]]
        found.others = [loop for n, loop in enumerate(loops) if loop is not found.outer and loop not in loops[:n]]
        return found

    def _describe(self, path: Sequence[ast.AST]) -> Loops:
        loops = [node for node in path if isinstance(node, LOOPS)]
        calls = [(n, f) for n in path if isinstance(n, ast.Call) and (f := self.function_called(n))]
        for number, loop in reversed([*enumerate(loops)]):
            if (loader := self.loader_of(loop)) is not None:
                return Loops(loop, loops[number - 1] if number else None, loader, calls)
        if len(loops) > 1 and _counts(loops[0]) and _counts(loops[1]) and _is_split(loops[1]):
            return Loops(loops[1], loops[0], None, calls)
        return Loops(loops[0], None, None, calls)

    def _paths(self, body: Sequence[ast.AST], called_by: tuple[Function, ...]) -> Iterator[list[ast.AST]]:
        """Yield each path from statements to a loop that trains: the loops and calls on the path, outermost first."""
        for node in body:
            if isinstance(node, LOOPS) and self._is_training(node):
                inner = [*self._paths(node.body, called_by)]
                yield from ([node, *path] for path in inner or [[]])
            elif isinstance(node, ast.Call) and (function := self.function_called(node)):
                if function not in called_by and self._is_training(function):
                    inner = [*self._paths(function.body, (*called_by, function))]
                    yield from ([node, *path] for path in inner or [[]])
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                yield from self._paths([*ast.iter_child_nodes(node)], called_by)

    # ---- what trains

    def _is_training(self, node: ast.AST) -> bool:
        return self._has(node, "backward") and self._has(node, "step")

    def _has(self, node: ast.AST, what: str, seen: tuple[ast.AST, ...] = ()) -> bool:
        """Return whether a node, or a function that it calls, calls ``backward`` or updates weights."""
        for each in ast.walk(node):
            if what == "step" and isinstance(each, ast.Attribute) and each.attr == "grad":
                return True  # the code updates weights without an optimizer
            if not isinstance(each, ast.Call):
                continue
            if isinstance(each.func, ast.Attribute):
                name, owner = each.func.attr, self.script.segment(each.func.value)
                if what == "backward" and name in ("backward", "manual_backward"):
                    return True
                if what == "step" and name == "step" and STEPS.search(owner):
                    return True
            function = self.function_called(each)
            if function is not None and function not in seen and self._has(function, what, (*seen, function)):
                return True
        return False

    def function_called(self, call: ast.Call) -> Function | None:
        """Return the script's function or method that a call calls."""
        if isinstance(call.func, ast.Name):
            return self._plain.get(call.func.id)
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            owner = call.func.value.id
            around = function_of(call)
            own = class_of(around) if around is not None and owner == "self" else None
            name = own.name if own is not None else self._instances.get(owner, "")
            return self._methods.get((name, call.func.attr))
        return None

    def list_code(self, found: Loops) -> list[ast.AST]:
        """Return the outermost loop, and the script's functions that it calls."""
        code: list[ast.AST] = [found.outer]
        for each in code:
            for node in ast.walk(each):
                function = self.function_called(node) if isinstance(node, ast.Call) else None
                if function is not None and function not in code:
                    code.append(function)
        return code

    @cached_property
    def _plain(self) -> dict[str, Function]:
        return {each.name: each for each in self.script.functions if class_of(each) is None}

    @cached_property
    def _methods(self) -> dict[tuple[str, str], Function]:
        found = ((class_of(each), each) for each in self.script.functions)
        return {(own.name, each.name): each for own, each in found if own is not None}

    @cached_property
    def _instances(self) -> dict[str, str]:
        """Return the variables that are instances of the script's classes: the class, by the variable's name."""
        classes = {own for own, _ in self._methods}
        return {
            target.id: called(node.value)
            for node in ast.walk(self.script.tree)
            if isinstance(node, ast.Assign) and called(node.value) in classes
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    # ---- the loader

    def loader_of(self, loop: Loop) -> ast.expr | None:
        """Return the expression in a loop's head that yields batches of a loader."""
        if not isinstance(loop, ast.For):
            return None
        expression = strip_wrappers(loop.iter)
        if isinstance(expression, ast.Name) and (wrapped := self._assigned(expression, loop)) is not None:
            inner = strip_wrappers(wrapped)
            if inner is not wrapped and self._is_loader(inner, loop):
                return inner
        return expression if self._is_loader(expression, loop) else None

    def _is_loader(self, expression: ast.expr, loop: Loop) -> bool:
        text = self.script.segment(expression)
        if isinstance(expression, ast.Call):
            return called(expression).endswith("DataLoader")
        if LOADER.search(text):
            return True
        assigned = self._assigned(expression, loop)
        return assigned is not None and called(assigned).lower().endswith(("dataloader", "loader"))

    def _assigned(self, expression: ast.expr, loop: Loop) -> ast.expr | None:
        """Return the value that was assigned last, before a loop, to a variable."""
        name = dotted(expression)
        found = [
            node
            for node in ast.walk(function_of(loop) or self.script.tree)
            if isinstance(node, ast.Assign) and node.lineno < loop.lineno and name
            if any(dotted(each) == name for each in node.targets)
        ]
        return max(found, key=lambda node: node.lineno).value if found else None


def _loops_around(place: ast.AST) -> Iterator[Loop]:
    """Yield the loops around a place in its function."""
    for each in itertools.takewhile(lambda node: not isinstance(node, FUNCTIONS), enclosing(place)):
        if isinstance(each, LOOPS):
            yield each


def strip_wrappers(expression: ast.expr) -> ast.expr:
    """Return the iterable inside ``enumerate``, ``tqdm`` and the like."""
    while isinstance(expression, ast.Call) and expression.args:
        name = dotted(expression.func)
        if name not in WRAPPERS and name.rpartition(".")[2] not in WRAPPERS:
            break
        expression = expression.args[0]
    return expression


def _counts(loop: Loop) -> bool:
    """Return whether a loop counts with ``range``."""
    return isinstance(loop, ast.For) and called(strip_wrappers(loop.iter)) in ("range", "trange")


def _is_split(loop: Loop) -> bool:
    """Return whether a loop goes through slices of an array, as ``range(0, len(data), batch_size)`` does."""
    assert isinstance(loop, ast.For)
    head = strip_wrappers(loop.iter)
    text = ast.unparse(head)
    return isinstance(head, ast.Call) and (len(head.args) == 3 or "//" in text or "num_batches" in text)


def find_last_break(loop: Loop) -> ast.If | None:
    """Return the ``if`` with the break that ends a ``while True`` after a number of steps."""
    if isinstance(loop, ast.For) or not (isinstance(loop.test, ast.Constant) and loop.test.value):
        return None
    counts = {dotted(each.target) for each in loop.body if isinstance(each, ast.AugAssign)}
    last = loop.body[-1]
    if not isinstance(last, ast.If) or not isinstance(last.test, ast.Compare) or last.orelse:
        return None
    is_count = dotted(last.test.left) in counts and isinstance(last.test.ops[0], (ast.Gt, ast.GtE))
    return last if is_count and len(last.body) == 1 and isinstance(last.body[0], ast.Break) else None


def counter_of(loop: Loop) -> str | None:
    """Return the variable in which a loop counts."""
    if isinstance(loop, ast.For):
        return loop.target.id if isinstance(loop.target, ast.Name) else None
    end = find_last_break(loop)
    test = end.test if end is not None else loop.test
    return test.left.id if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) else None
