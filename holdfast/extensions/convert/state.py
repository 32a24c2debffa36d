"""Find the state of a loop: the objects to keep, and the plain variables that one pass leaves to the next."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.extensions.convert.finding import Finder, Loops, counter_of
from holdfast.extensions.convert.script import (
    FUNCTIONS,
    arguments_of,
    assigned,
    called,
    class_of,
    dotted,
    enclosing,
    free_names,
    function_of,
    names_in,
    parent_of,
    walk_own,
)

Kind = Literal["module", "optimizer", "scheduler", "scaler", "generator", "container", "object", ""]
ORDER: tuple[Kind, ...] = ("module", "optimizer", "scheduler", "scaler")
MODULES = re.compile(r"(^|\.)(nn|models|timm)\.|from_pretrained|create_model|DataParallel|DDP$|AutoModel")
LOSSES = re.compile(r"Loss$|^(torch\.)?nn\.functional|^F\.")
OPTIMIZERS = re.compile(
    r"(^|\.)optim\.(?!lr_scheduler|swa_utils)|configure_optimizers|(^|\.)(SGD|Adam\w*|RMSprop|Adagrad|Adadelta|LBFGS|Lion|"
    r"NAdam|RAdam|Muon|Adafactor)$"
)
SCHEDULERS = re.compile(r"lr_scheduler\.|(LR|WarmRestarts|ReduceLROnPlateau)$|get_\w*schedule|get_scheduler")
GENERATORS = re.compile(r"(^|\.)(Generator|default_rng|RandomState|Random)$")
# The methods that a loop calls on a scheduler. `dampening` is a method of pytorch_warmup's schedulers.
SCHEDULING = {"step", "get_last_lr", "get_lr", "state_dict", "dampening"}
CONTAINERS = {"dict", "list", "deque", "collections.deque", "defaultdict", "collections.defaultdict", "Counter", "set"}
CHANGES = {"append", "appendleft", "extend", "add", "update", "push", "pop", "insert", "setdefault", "clear", "remove"}
MODEL = re.compile(r"model|net$|generator|discriminator|critic|actor|encoder|decoder|agent", re.IGNORECASE)
ENVIRONMENTS = re.compile(r"(^|\.)(make|make_vec)$|Env$|VectorEnv$")
PASSIVE = re.compile(r"(Dataset|Folder|Tokenizer\w*|Processor|Config|Extractor)(\.|$)|datasets\.|transforms\.")
NUMERIC = {"int", "float", "round", "max", "min", "abs", "divmod", "sum"}
CLOCKS = re.compile(r"(^|\.)(time|perf_counter|monotonic|process_time)$|datetime\.now|Event$")
NOT_STATE = {"tqdm", "argparse", "argumentparser", "dataloader", "progress", "accelerator"}


LOGGERS = ("logger", "writer")  # the ends of the names of loggers


@dataclass
class State:
    """The state of a loop.

    Attributes:
        kept: the objects to keep, as expressions by name.
        carried: the plain variables that a pass hands to the next, with the value at the beginning.
        unclear: variables that a pass hands to the next, and for which a person has to decide, with the reason.
        detached: for carried variables that are tensors: a format for the code that detaches the tensor.
        conditions: the tests of the `if` that makes a kept object, by name, for objects that nothing else makes.
    """

    kept: dict[str, str]
    carried: dict[str, str]
    unclear: dict[str, str]
    detached: dict[str, str]
    conditions: dict[str, str]


class StateFinder:
    """Finds the state of the loop that `Finder` has found."""

    def __init__(self, finder: Finder, found: Loops) -> None:
        self._script, self._found, self._finder = finder.script, found, finder
        self._code = finder.list_code(found)
        around = function_of(found.outer)
        self._scope: ast.AST = around or finder.script.tree
        self._modules = self._find_modules()

    def find(self) -> State:
        kept = {self._name_of(text): text for text in self._list_kept()}
        carried, unclear, detached = self._find_carried({*kept.values()})
        return State(kept, carried, unclear, detached, self._find_conditions(kept))

    def _find_conditions(self, kept: dict[str, str]) -> dict[str, str]:
        """Return the tests of the `if` without an `else` in which objects are made, for those made nowhere else."""
        found = dict[str, str]()
        for name, text in kept.items():
            makers = [each for each in self._assignments(text) if each.lineno < self._found.outer.lineno]
            around = parent_of(makers[0]) if len(makers) == 1 else None
            if isinstance(around, ast.If) and not around.orelse and around not in enclosing(self._found.outer):
                is_main = "__name__" in names_in([around.test], ast.Load)
                found |= {} if is_main else {name: self._script.segment(around.test)}
        return found

    def _name_of(self, text: str) -> str:
        return text.rpartition(".")[2].lstrip("_")

    # ---- objects

    def _list_kept(self) -> list[str]:
        """Return the expressions of the objects to keep that the loop's function can use, modules first."""
        used, kinds = self._used_expressions(), self._kinds()
        found = [text for text, kind in kinds.items() if kind and (kind != "container" or text in used)]
        return sorted(found, key=lambda text: ORDER.index(kinds[text]) if kinds[text] in ORDER else len(ORDER))

    def _kinds(self) -> dict[str, Kind]:
        """Return the kind of each variable that exists when the loop begins, judged by its creation and its methods."""
        found = dict[str, Kind]()
        scopes = [self._scope, *self._outer_scopes()]
        used = names_in([self._scope] if isinstance(self._scope, FUNCTIONS) else self._code, ast.Load)
        used |= {name for each in self._code if isinstance(each, FUNCTIONS) for name in free_names(each)}
        line = self._found.outer.lineno
        for scope in reversed(scopes):
            for node in ast.walk(scope):
                if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                    continue
                own = function_of(node)
                if own is not scope and not (scope is self._script.tree and own is None):
                    continue
                if scope is self._scope and node.lineno >= line:
                    continue
                for target, value in assigned(node):
                    text, kind = dotted(target), self._kind_of(value)
                    is_seen = scope is self._scope or text.partition(".")[0] in used
                    if text and is_seen and (kind or text not in found) and not isinstance(target, ast.Subscript):
                        found[text] = kind
        if isinstance(self._scope, FUNCTIONS):
            found |= self._attributes(self._scope)
            for parameter in (*self._scope.args.args, *self._scope.args.kwonlyargs):
                if parameter.arg not in ("self", "cls"):
                    found[parameter.arg] = ""
        return {text: kind or self._kind_by_use(text) for text, kind in found.items()}

    def _outer_scopes(self) -> list[ast.AST]:
        """Return the outer scopes whose variables the loop's function can use."""
        around = parent_of(self._scope)
        scopes = list[ast.AST]()
        while around is not None:
            if isinstance(around, (*FUNCTIONS, ast.Module)):
                scopes.append(around)
            around = parent_of(around)
        return scopes

    def _attributes(self, scope: ast.AST) -> dict[str, Kind]:
        """Return the kinds of the attributes that ``__init__`` sets on a method's object."""
        own = class_of(scope)
        found = dict[str, Kind]()
        for node in ast.walk(own) if own is not None else ():
            for target, value in assigned(node) if isinstance(node, ast.Assign) else ():
                if (text := dotted(target)).startswith("self."):
                    found[text] = self._kind_of(value) or found.get(text) or self._kind_by_use(text, own)
        return {text: kind for text, kind in found.items() if kind not in ("container", "object")}

    def _kind_of(self, value: ast.expr) -> Kind:
        name = called(value)
        last = name.rpartition(".")[2]
        if isinstance(value, (ast.Dict, ast.List, ast.Set)) or name in CONTAINERS:
            return "container"
        if isinstance(value, ast.Call) and any(map(_asks_gradients, value.keywords)):
            return "object"
        if not name or last.lower() in NOT_STATE or last.lower().endswith(LOGGERS) or LOSSES.search(name):
            return ""
        if PASSIVE.search(name):
            return "object" if last in self._classes() and self._is_changed_by(value, False) else ""
        if last in self._modules:
            return "module"
        for kind, pattern in (("scheduler", SCHEDULERS), ("optimizer", OPTIMIZERS), ("generator", GENERATORS)):
            if pattern.search(name):
                return kind  # type: ignore[return-value]
        if last == "GradScaler":
            return "scaler"
        if MODULES.search(name) or last in ("AveragedModel", "deepcopy"):
            return "module"
        if ENVIRONMENTS.search(name) or (last in self._classes() and self._is_changed_by(value)):
            return "object"
        return ""

    def _is_changed_by(self, value: ast.expr, by_others: bool = True) -> bool:
        """Return whether the loop calls methods of the object that an expression makes, or passes the object on.

        Args:
            by_others: whether to count that the loop passes the object on.
        """
        names = {dotted(each) for each in getattr(parent_of(value), "targets", [])}
        calls = [each for each in ast.walk(self._found.outer) if isinstance(each, ast.Call)]
        methods = {dotted(each.func.value) for each in calls if isinstance(each.func, ast.Attribute)}
        passed = {dotted(argument) for each in calls for argument in (*each.args, *(k.value for k in each.keywords))}
        return bool(names & (methods | (passed if by_others else set())))

    def _kind_by_use(self, text: str, within: ast.AST | None = None) -> Kind:
        """Return what a variable is by the methods that are called on it."""
        called_on = self._uses(text, within or self._scope)
        if called_on & {"zero_grad", "param_groups"} and "step" in called_on:
            return "optimizer"
        if called_on & {"parameters", "named_parameters", "train", "eval"} and "fit" not in called_on:
            return "module"
        if "" in called_on and MODEL.search(text):
            return "module"
        if {"reset", "step"} <= called_on:
            return "object"
        if "scale" in called_on and "update" in called_on:
            return "scaler"
        if called_on & SCHEDULING and re.search(r"sched", text, re.IGNORECASE):
            return "scheduler"
        return "container" if called_on & CHANGES and text in self._used_expressions() else ""

    def _uses(self, text: str, within: ast.AST, calls: int = 3) -> set[str]:
        """Return the methods that are called on a variable, with "" for the variable itself.

        Args:
            calls: how many calls to follow into the script's functions, one inside another.
        """
        found = set[str]()
        for node in ast.walk(within):
            if not isinstance(node, ast.Call):
                continue
            if dotted(node.func) == text:
                found.add("")
            elif isinstance(node.func, ast.Attribute) and dotted(node.func.value) == text:
                found.add(node.func.attr)
            if calls and (function := self._finder.function_called(node)) is not None:
                for parameter, argument in arguments_of(node, function).items():
                    found |= self._uses(parameter, function, calls - 1) if dotted(argument) == text else set()
        return found

    def _find_modules(self) -> set[str]:
        """Return the names of the script's classes that are modules."""
        bases = {
            each.name: {dotted(base).rpartition(".")[2] for base in each.bases}
            for each in ast.walk(self._script.tree)
            if isinstance(each, ast.ClassDef)
        }
        found = {name for name, own in bases.items() if any(base.endswith("Module") for base in own)}
        for _ in bases:
            found |= {name for name, own in bases.items() if own & found}
        return found

    def _classes(self) -> set[str]:
        """Return the script's classes whose objects may change, without classes of settings."""
        return {
            each.name
            for each in ast.walk(self._script.tree)
            if isinstance(each, ast.ClassDef)
            and not any("dataclass" in dotted(d) or "dataclass" in called(d) for d in each.decorator_list)
            and not re.search(r"args|config|options", each.name, re.IGNORECASE)
        }

    def _used_expressions(self) -> set[str]:
        """Return the containers that the loop changes. Leave out those that get readings of clocks."""
        found, clocks = set[str](), self._clocks(self._scope)
        for node in ast.walk(self._found.outer):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                given = [each for argument in node.args for each in ast.walk(argument)]
                is_clock = any(isinstance(each, ast.Call) and CLOCKS.search(called(each)) for each in given)
                if not is_clock and not names_in(node.args, ast.Load) & clocks:
                    found.add(dotted(_owner(node.func.value)))
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                found.add(dotted(_owner(node)))
        return found

    # ---- plain variables

    def _find_carried(self, kept: set[str]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        outer, batch = self._found.outer, self._found.batch
        loops = [outer, batch] if function_of(batch) is function_of(outer) and batch is not outer else [outer]
        names = set[str]()
        for loop in loops:
            own = names_in([loop.target], ast.Store) if isinstance(loop, ast.For) else set[str]()
            names |= find_live(loop.body, own) & names_in(loop.body, ast.Store)
        names -= self._clocks(self._scope) | kept | ({counter_of(outer)} if self._found.epoch is None else set())
        carried, unclear, detached = dict[str, str](), dict[str, str](), dict[str, str]()
        for name in sorted(names, key=lambda name: (self._first_line(name), name)):
            before, reset = self._value_before(name), self._value_inside(name)
            if self._is_shared(name):
                unclear[name] = "a different function reads or changes this variable"
            elif before is not None:
                carried[name] = name
            elif isinstance(reset, ast.Constant):
                carried[name] = ast.unparse(reset)
            elif (value := self._value_at_head(name)) is not None:
                carried[name] = "None"
                detached |= {name: _detach(value)} if _detach(value) else {}
            else:
                unclear[name] = "this variable has no value before the loop"
        for function in self._script.functions:
            for name in {name for n in ast.walk(function) if isinstance(n, ast.Global) for name in n.names} - kept:
                if function is not self._scope and name in names_in(function.body, ast.Store):
                    unclear[name] = f"this variable is global, and {function.name} changes it"
        for name in self._changed_attributes() - kept:
            unclear[name] = "a method changes it: put it into a dict of the object, and keep the dict"
        return {name: value for name, value in carried.items() if name not in unclear}, unclear, detached

    def _changed_attributes(self) -> set[str]:
        """Return the attributes of the loop's own object that its methods change."""
        own = class_of(self._scope)
        methods = [each for each in own.body if isinstance(each, FUNCTIONS) and each.name != "__init__"] if own else []
        stored = [each for method in methods for each in ast.walk(method) if isinstance(each, ast.Attribute)]
        return {dotted(each) for each in stored if isinstance(each.ctx, ast.Store) and dotted(each).startswith("self.")}

    def list_restarted(self) -> tuple[list[str], list[str]]:
        """Return the local variables that a resume resets: sums, and values that a pass leaves to the next."""
        batch = self._found.batch
        around = function_of(batch)
        if around is None or around is function_of(self._found.outer):
            return [], []
        changed = {dotted(each.target) for each in walk_own(batch.body) if isinstance(each, ast.AugAssign)}
        own = names_in([batch.target], ast.Store) if isinstance(batch, ast.For) else set[str]()
        live = find_live(batch.body, own) & names_in(batch.body, ast.Store) - self._clocks(around)
        return sorted(live & changed), sorted(live - changed)

    def _first_line(self, name: str) -> int:
        return min(
            (each.lineno for each in ast.walk(self._scope) if isinstance(each, ast.Name) and each.id == name), default=0
        )

    def _assignments(self, name: str) -> list[ast.Assign]:
        return [
            each
            for each in walk_own([*ast.iter_child_nodes(self._scope)])
            if isinstance(each, ast.Assign)
            and any(isinstance(n, ast.Name) and n.id == name for t in each.targets for n in ast.walk(t))
        ]

    def _value_before(self, name: str) -> ast.expr | None:
        found = [each.value for each in self._assignments(name) if each.lineno < self._found.outer.lineno]
        if found:
            return found[-1]
        parameters = self._scope.args.args if isinstance(self._scope, FUNCTIONS) else []
        return next((ast.Name(name) for each in parameters if each.arg == name), None)

    def _value_at_head(self, name: str) -> ast.expr | None:
        """Return the value that a variable gets at each epoch's beginning."""
        outer, batch = self._found.outer, self._found.batch
        found = [each for each in self._assignments(name) if each in outer.body and each.lineno < batch.lineno]
        return found[0].value if found and dotted(found[0].targets[0]) == name else None

    def _value_inside(self, name: str) -> ast.expr | None:
        found = [each.value for each in self._assignments(name) if each.lineno > self._found.outer.lineno]
        return found[0] if found else None

    def _is_shared(self, name: str) -> bool:
        """Return whether a function other than the loop's own reads this variable."""
        for function in self._script.functions:
            if function is self._scope:
                continue
            is_inside = any(each is function for each in ast.walk(self._scope))
            declared = any(isinstance(n, (ast.Global, ast.Nonlocal)) and name in n.names for n in ast.walk(function))
            stored = name in names_in(function.body, ast.Store) | {each.arg for each in function.args.args}
            if declared or (is_inside and not stored and name in names_in(function.body, ast.Load)):
                return True
        return False

    def _clocks(self, scope: ast.AST) -> set[str]:
        """Return the variables that contain readings of clocks, or numbers that are computed from them."""
        found = set[str]()
        for _ in range(3):
            for node in ast.walk(scope):
                if isinstance(node, ast.Assign) and _reads_clock(node.value, found):
                    found |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        return found


def _detach(value: ast.expr) -> str:
    """Return how to detach a variable, as a format, if its first value is a tensor or several; otherwise nothing."""
    if isinstance(value, ast.Tuple) and all(called(each).startswith("torch.") for each in value.elts):
        return "tuple(each.detach() for each in {})"
    return "{}.detach()" if called(value).startswith("torch.") else ""


def _asks_gradients(argument: ast.keyword) -> bool:
    return argument.arg == "requires_grad" and isinstance(argument.value, ast.Constant) and bool(argument.value.value)


def _reads_clock(node: ast.AST, clocks: set[str]) -> bool:
    """Return whether an expression is a clock's reading, or a number that is computed from readings."""
    if isinstance(node, ast.Name):
        return node.id in clocks
    if isinstance(node, ast.Call):
        if CLOCKS.search(called(node)):
            return True
        parts: list[ast.AST] = [*node.args] if dotted(node.func) in NUMERIC else []
        parts += [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return any(_reads_clock(each, clocks) for each in parts)
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Tuple, ast.Subscript, ast.Attribute)):
        return any(_reads_clock(each, clocks) for each in ast.iter_child_nodes(node))
    return False


def _owner(node: ast.expr) -> ast.expr:
    """Return the container of an item, or of an item's item."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def find_live(body: Sequence[ast.stmt], stored: set[str]) -> set[str]:
    """Return the variables whose value from an earlier pass the statements may read.

    An inner loop counts as run at least once: otherwise the first pass would end with an error.

    Args:
        stored: the names that were assigned before.
    """
    live = set[str]()
    _follow(body, stored, live)
    return live


def _follow(body: Sequence[ast.stmt], stored: set[str], live: set[str]) -> set[str]:
    """Add to ``live`` the names that statements read before they are certainly assigned. Return the assigned names."""
    for node in body:
        match node:
            case ast.If():
                live |= names_in([node.test], ast.Load) - stored
                inside = _follow(node.body, {*stored}, live)
                stored = inside & _follow(node.orelse, {*stored}, live)
            case ast.For() | ast.AsyncFor():
                live |= names_in([node.iter], ast.Load) - stored
                stored = _follow(node.body, stored | names_in([node.target], ast.Store), live)
                stored = _follow(node.orelse, stored, live)
            case ast.While():
                live |= names_in([node.test], ast.Load) - stored
                stored = _follow(node.body, {*stored}, live)
            case ast.With() | ast.AsyncWith():
                items: list[ast.AST] = [*node.items]
                live |= names_in(items, ast.Load) - stored
                stored = _follow(node.body, stored | names_in(items, ast.Store), live)
            case ast.Try():
                inside = _follow(node.body, {*stored}, live)
                for handler in node.handlers:
                    _follow(handler.body, {*stored}, live)
                stored = _follow(
                    node.finalbody, _follow(node.orelse, inside, live) if not node.handlers else stored, live
                )
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                live |= names_in(node.body, ast.Load) - names_in(node.body, ast.Store) - stored
                stored = stored | {node.name}
            case ast.AugAssign():
                live |= (names_in([node.value], ast.Load) | names_in([node.target], ast.Store)) - stored
                live |= names_in([node.target], ast.Load) - stored
                stored = stored | names_in([node.target], ast.Store)
            case _:
                own = {target for each in ast.walk(node) if isinstance(each, ast.comprehension)
                       for target in names_in([each.target], ast.Store)}  # fmt: skip
                live |= names_in([node], ast.Load) - stored - own
                stored = stored | (names_in([node], ast.Store) - own)
    return stored
