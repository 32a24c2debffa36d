"""The attributes, and the items of dicts, to which a class's own code writes durations.

Durations differ in each process, so a comparison of two processes leaves them out.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

# The functions that read a clock.
READS = {
    "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns",
    "time", "time_ns",
}  # fmt: skip
# Functions that turn a duration into a duration, and modules of which every function counts as one.
NUMERIC, MODULES = {"abs", "float", "int", "max", "min", "round"}, {"math", "np", "numpy", "torch"}
ADDING = {"append", "appendleft", "extend"}


@dataclass
class WrittenTimes:
    """The durations that a class's code writes.

    Attributes:
        attributes: the names of attributes that get durations, or containers to which durations are added.
        items: for each dict in the code with items that are durations: the keys of the dict, and the keys of these
            items.
    """

    attributes: set[str] = field(default_factory=set)
    items: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)

    def has_item(self, container: Any, key: Any) -> bool:
        """Return whether an item of a dict is a duration, because the dict has all keys of a dict in the code."""
        return any(key in timed and keys <= container.keys() for keys, timed in self.items)


def find_written_times(kinds: Collection[type]) -> WrittenTimes:
    """Return the durations that the code of these classes writes, and that of their base classes."""
    found = WrittenTimes()
    for kind in dict.fromkeys(base for each in kinds for base in each.__mro__):
        own = _read_class(kind)
        found.attributes |= own.attributes
        found.items += own.items
    return found


@functools.cache
def _read_class(kind: type) -> WrittenTimes:
    found = WrittenTimes()
    if kind.__module__ in ("builtins", "abc", "typing", "enum", "collections"):
        return found
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # the class has no source code
        return found
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef):
            _read_function(each, found)
    return found


def _read_function(function: ast.FunctionDef, found: WrittenTimes) -> None:
    names: set[str] = set()
    for each in _in_order(function):
        if isinstance(each, ast.Assign) and _is_time(each.value, names):
            names |= {target.id for target in each.targets if isinstance(target, ast.Name)}
            found.attributes |= {target.attr for target in each.targets if isinstance(target, ast.Attribute)}
        elif isinstance(each, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in each.keys]
            timed = {key for key, value in zip(keys, each.values, strict=True) if _is_time(value, names)} - {None}
            if timed and None not in keys:
                found.items.append((frozenset(map(str, keys)), frozenset(map(str, timed))))
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in ADDING:
            owner = each.func.value
            if isinstance(owner, ast.Attribute) and any(_is_time(value, names) for value in each.args):
                found.attributes.add(owner.attr)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a function's nodes in the order of the source; `ast.walk` yields them by depth."""
    for each in ast.iter_child_nodes(node):
        yield each
        yield from _in_order(each)


def _is_time(value: ast.expr, names: Collection[str]) -> bool:
    """Return whether an expression computes a number from a reading of a clock.

    Args:
        names: the local variables that have such numbers.
    """
    if isinstance(value, ast.Name):
        return value.id in names
    if isinstance(value, ast.BinOp):
        return _is_time(value.left, names) or _is_time(value.right, names)
    if isinstance(value, ast.Subscript):
        return _is_time(value.value, names)
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Name):
        is_clock, is_numeric = value.func.id in READS, value.func.id in NUMERIC
    elif isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Name):
        owner = value.func.value.id
        is_clock, is_numeric = value.func.attr in READS and owner not in ("self", "cls"), owner in MODULES
    else:
        return False
    return is_clock or (is_numeric and any(_is_time(each, names) for each in value.args))
