"""Hints about variables that begin anew when a run resumes inside an epoch, found in the source of a user's loop.

Three kinds of values differ after such a resume: an index from ``enumerate``, an iterable beside the run's batches,
and a variable that is set at an epoch's beginning and changed by each step. They are harmless if they are only printed
or logged. So a hint is given only if a call that trains, such as ``optimizer.step()``, depends on one of them.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

# The methods of modules, optimizers, schedulers and losses that train. So does every method whose name ends with "_",
# because such methods of torch change a tensor in place.
TRAINING = {"step", "zero_grad", "backward", "update_parameters", "load_state_dict"}
# The keys of an optimizer's parameter groups that loops set.
RATES = {"lr", "momentum", "weight_decay"}

Test = Callable[[ast.expr], bool]


@dataclass(frozen=True)
class _Start:
    """Variables that begin anew after a resume.

    Attributes:
        line: the line in the function's source.
        said: a phrase that names the variables.
        remedy: the code to write instead.
    """

    names: frozenset[str]
    line: int
    said: str
    remedy: str


def list_hints(
    frames: Sequence[types.FrameType], is_run: Callable[[object], bool], is_kept: Callable[[object], bool]
) -> Iterator[str]:
    """Yield a hint, with file and line, for each such variable of the running functions' loops.

    Args:
        is_run: returns whether a value is the run.
        is_kept: returns whether a value is one of the kept objects.
    """
    for frame in frames:
        values = {**frame.f_globals, **frame.f_locals}
        for outer in _list_loops(_parse(frame.f_code), _calls({"epochs"}, values, is_run)):
            takes = _calls({"batches", "steps"}, values, is_run)
            for inner in _list_loops(ast.Module(outer.body, []), takes):
                starts = [*_list_beside(inner, takes, values, is_kept), *_list_set(outer, inner, values, is_kept)]
                optimizers = {name for name, value in values.items() if isinstance(value, Optimizer)}
                for start in starts:
                    line = _find_dependent(outer, inner, start.names, optimizers)
                    if line:
                        offset = frame.f_code.co_firstlineno - 1
                        yield (
                            f"{frame.f_code.co_filename}:{start.line + offset}: {start.said} after a resume inside an "
                            f"epoch, and line {line + offset} may depend on it: {start.remedy}"
                        )


def _parse(code: types.CodeType) -> ast.Module:
    """Return the syntax tree of a function; an empty tree if its source can't be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _calls(methods: set[str], values: dict[str, object], is_run: Callable[[object], bool]) -> Test:
    """Return a function that tells whether an expression contains a call of one of these methods of the run."""

    def test(expression: ast.expr) -> bool:
        return any(
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr in methods
            and isinstance(each.func.value, ast.Name)
            and is_run(values.get(each.func.value.id))
            for each in ast.walk(expression)
        )

    return test


def _list_loops(tree: ast.AST, test: Test) -> list[ast.For]:
    return [each for each in ast.walk(tree) if isinstance(each, ast.For) and test(each.iter)]


def _list_beside(
    inner: ast.For, takes: Test, values: dict[str, object], is_kept: Callable[[object], bool]
) -> Iterator[_Start]:
    """Yield the index of an ``enumerate``, and the variables of an iterable that is zipped to the run's batches."""
    call = inner.iter
    if not isinstance(call, ast.Call) or not isinstance(inner.target, ast.Tuple) or len(inner.target.elts) < 2:
        return
    if _name_of(call.func) == "enumerate" and len(call.args) == 1 and not call.keywords:
        index = _names_in(inner.target.elts[0])
        remedy = "write enumerate(run.batches(), run.batch_number)"
        yield _Start(index, inner.lineno, f"the index {', '.join(sorted(index))} begins at 0 again", remedy)
    if _name_of(call.func) == "zip" and len(call.args) == len(inner.target.elts):
        for each, target in zip(call.args, inner.target.elts, strict=True):
            if not takes(each) and not (isinstance(each, ast.Name) and is_kept(values.get(each.id))):
                remedy = "use one loader that yields both, or keep a loader with a position"
                yield _Start(_names_in(target), inner.lineno, f"{ast.unparse(each)} begins anew", remedy)


def _list_set(
    outer: ast.For, inner: ast.For, values: dict[str, object], is_kept: Callable[[object], bool]
) -> Iterator[_Start]:
    """Yield the variables that are set at an epoch's beginning, and that each step changes."""
    changed = {name for each in inner.body for name, value in _list_assigned(each) if name in _names_in(value)}
    changed |= {
        each.args[0].id
        for each in ast.walk(inner)
        if isinstance(each, ast.Call)
        and _name_of(each.func) == "next"
        and each.args
        and isinstance(each.args[0], ast.Name)
    }
    for statement in outer.body:
        if statement is inner or inner in ast.walk(statement):
            return
        for name, _ in _list_assigned(statement):
            if name in changed and not is_kept(values.get(name)):
                remedy = f'keep it in a dict, state = {{"{name}": ...}}, and call run.keep(state=state)'
                yield _Start(frozenset({name}), statement.lineno, f"{name} begins anew", remedy)


def _list_assigned(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the variables that statements assign, each with an expression on which its value depends."""
    for each in ast.walk(tree):
        if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, each
        elif isinstance(each, ast.Assign):
            for target in each.targets:
                pairs = [(target, each.value)]
                if isinstance(target, ast.Tuple) and isinstance(each.value, ast.Tuple):
                    pairs = [*zip(target.elts, each.value.elts, strict=False)]
                for one, value in pairs:
                    yield from (
                        (name, value) for name in _names_in(one) if not isinstance(one, ast.Subscript | ast.Attribute)
                    )


def _find_dependent(outer: ast.For, inner: ast.For, names: frozenset[str], optimizers: set[str]) -> int:
    """Return the first line of a call that trains and that depends on these variables; 0 if there is none."""
    body = [*inner.body, *outer.body[outer.body.index(inner) + 1 :]] if inner in outer.body else inner.body
    known, before = set(names), 0
    while len(known) > before:
        before = len(known)
        known |= {name for each in body for name, value in _list_assigned(each) if known & _names_in(value)}
    lines = [line for each in body for line in _list_training(each, known, optimizers, is_chosen=False)]
    return min(lines, default=0)


def _list_training(tree: ast.AST, known: set[str], optimizers: set[str], *, is_chosen: bool) -> Iterator[int]:
    """Yield the lines that train and depend on some variables.

    Args:
        known: the variables.
        optimizers: the variables that contain an optimizer. A call trains if one of them is its argument.
        is_chosen: whether one of the variables decides whether this code runs.
    """
    if isinstance(tree, ast.If | ast.While | ast.IfExp):
        is_chosen = is_chosen or bool(known & _names_in(tree.test))
    if isinstance(tree, ast.Continue) and is_chosen:
        yield tree.lineno
    if isinstance(tree, ast.Call) and _trains(tree, optimizers) and (is_chosen or known & _names_in(tree)):
        yield tree.lineno
    if isinstance(tree, ast.Assign) and (is_chosen or known & _names_in(tree.value)):
        keys = [each.slice.value for each in tree.targets if _has_key(each)]  # type: ignore[attr-defined]
        yield from (tree.lineno for key in keys if key in RATES)
    for child in ast.iter_child_nodes(tree):
        yield from _list_training(child, known, optimizers, is_chosen=is_chosen)


def _trains(call: ast.Call, optimizers: set[str]) -> bool:
    given = [*call.args, *(each.value for each in call.keywords)]
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    is_method = name in TRAINING or (name.endswith("_") and not name.startswith("_"))
    return is_method or any(isinstance(each, ast.Name) and each.id in optimizers for each in given)


def _has_key(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)


def _names_in(tree: ast.AST) -> frozenset[str]:
    return frozenset(each.id for each in ast.walk(tree) if isinstance(each, ast.Name))


def _name_of(function: ast.expr) -> str:
    """Return the last part of a function's name, such as ``cycle`` for ``itertools.cycle``."""
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
