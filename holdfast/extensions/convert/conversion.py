"""Convert a script: its loop, its kept state, its logging and its checkpoints, and the function that Holdfast calls."""

import ast
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeGuard

from holdfast.errors import ConfigError
from holdfast.extensions.convert.finding import Finder, Loops, counter_of, find_last_break, strip_wrappers
from holdfast.extensions.convert.script import (
    FUNCTIONS,
    LOOPS,
    Function,
    Loop,
    Script,
    arguments_of,
    assigned,
    called,
    class_of,
    dotted,
    enclosing,
    free_names,
    function_of,
    names_in,
    walk_own,
)
from holdfast.extensions.convert.state import State, StateFinder

WIDTH = 110
# The assumed number of steps of a loop whose number of steps is unknown.
STEPS = 1000
SAVES = re.compile(r"(^|\.)(torch\.save|_?save_checkpoint|_?save_ckpt|_?save_model|save_state|accelerator\.save)$")
# How scripts read their options, besides ``parser.parse_args()``.
PARSERS = re.compile(r"\.parse_\w*args\w*$|^tyro\.cli$")
FLAGS = re.compile(r"(^|\.)cudnn\.(benchmark\s*=\s*True|deterministic\s*=\s*False)$")
LOADS = re.compile(r"(^|\.)(torch\.load|load_checkpoint|load_ckpt|load_state)$")
SPLITTERS = re.compile(r"randperm|permutation|shuffle|random\.sample")
ADAPTERS = {"train": "transformers", "fit": "lightning"}
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
# The arguments by which a Trainer of another library gets its number of epochs.
LENGTHS = ("max_epochs", "num_train_epochs")
# The statements of a module that may stay at its top: each process that imports the script executes them.
PASSIVE = (ast.Import, ast.ImportFrom, *FUNCTIONS, ast.ClassDef)


@dataclass
class Conversion:
    """A converted script.

    Attributes:
        text: the new script.
        function: the function that Holdfast calls.
        epochs: the number of epochs; None if the script doesn't say it in a number.
        steps: the number of steps of an epoch, if the script counts steps; None if it is unknown.
        kept: the objects and variables that the loop keeps.
        questions: questions that a person has to answer, each with its line.
    """

    text: str
    function: str
    epochs: int | None = None
    steps: int | None = None
    kept: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)


def convert(text: str, name: str, line: int = 0, options: Sequence[str] = ()) -> Conversion:
    """Convert a script.

    Args:
        name: the file's name, for messages.
        line: the line of the loop to convert; 0 for the last one that trains.
        options: the command-line options that the script gets.

    Raises:
        ConfigError: the script isn't Python, or has no loop that this function understands.
    """
    try:
        script = Script(name, text)
        _ = script.tree
    except SyntaxError as error:
        raise ConfigError(f"{name}:{error.lineno}: this isn't valid Python: {error.msg}") from None
    if "holdfast" in names_in([script.tree], ast.Load) or "holdfast.Run" in text:
        raise ConfigError(f"the script {name} uses holdfast already", hint="holdfast prove tests it")
    changer: _Changer | _ForeignChanger
    try:
        changer = _Changer(script, line, options)
    except ConfigError:
        foreign = _find_foreign(script)
        if foreign is None or line:
            raise
        changer = _ForeignChanger(script, foreign, options)
    return changer.convert()


class _Entry:
    """Edits that are common to all conversions: the function that Holdfast calls, and the imports."""

    def __init__(self, script: Script, options: Sequence[str]) -> None:
        self.script, self.finder, self.options = script, Finder(script), [*options]
        names = {each.id for each in ast.walk(script.tree) if isinstance(each, ast.Name)}
        names |= {each.arg for each in ast.walk(script.tree) if isinstance(each, ast.arg)}
        self.run = "run" if "run" not in names else "held_run"
        self.taken = names | {each.name for each in script.functions}
        self.result = Conversion("", "")

    def ask(self, node: ast.AST, question: str) -> None:
        self.result.questions.append(f"{self.script.place(node)}: {question}")

    def pass_run(self, calls: Sequence[tuple[ast.Call, Function]]) -> None:
        """Pass the run through calls, as the first argument."""
        for call, _ in calls:
            self._pass_into(call)
        for function in dict.fromkeys(function for _, function in calls):
            self._add_parameter(function)

    def _pass_into(self, call: ast.Call) -> None:
        if given := [*call.args, *(each.value for each in call.keywords)][:1]:
            name = call.keywords[0].arg if not call.args else None
            offset = -len(f"{name}=".encode()) if name else 0
            self.script.insert_at(given[0], offset, f"{self.run}, ")
            return
        head = len(self.script.segment(call.func).encode())
        offset = head + self.script.segment(call).encode()[head:].index(b"(") + 1
        self.script.insert_at(call, offset, self.run)

    def _add_parameter(self, function: Function) -> None:
        arguments = function.args
        given = [*arguments.posonlyargs, *arguments.args]
        if given and class_of(function):
            self.script.insert_at(given[0], len(self.script.segment(given[0]).encode()), f", {self.run}")
        elif given:
            self.script.insert_at(given[0], 0, f"{self.run}, ")
        else:
            has_more = bool(arguments.vararg or arguments.kwonlyargs or arguments.kwarg)
            offset = self.script.segment(function).encode().index(b"(") + 1
            self.script.insert_at(function, offset, f"{self.run}, " if has_more else self.run)

    def _give_options(self) -> list[str]:
        """Give the script its options. Return the lines to write at the beginning of the function, if any."""
        elsewhere: ast.AST | None = None
        given = json.dumps(self.options)
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Call) and dotted(node.func).endswith(".parse_args") and not node.args:
                self.script.insert_at(node, len(self.script.segment(node).encode()) - 1, given)
                self.ask(node, f"the options are {given} now: make those that you change parameters of the function")
            elif PARSERS.search(called(node)) or dotted(node) == "sys.argv":
                elsewhere = elsewhere or node
        if elsewhere is None:
            return []
        self.ask(elsewhere, f"the options are {given} now: make those that you change parameters of the function")
        return [f"    sys.argv[1:] = {given}"]

    def _allow_folders(self) -> None:
        """Let a resume find the folders that the script makes."""
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.keyword) and node.arg == "exist_ok" and self.script.segment(node.value) == "False":
                self.script.replace(node.value, "True")
                self.ask(node, "a resume finds this folder, so it may exist now")

    def _drop_flags(self) -> None:
        """Delete the lines that let torch choose algorithms by their speed: a run would refuse them."""
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Assign) and FLAGS.search(self.script.segment(node)):
                self.script.delete(node)
                self.ask(node, 'deleted, because equal bits need it; determinism.mode = "fast" would allow it')

    def finish(self, imports: Sequence[str]) -> Conversion:
        """Apply the edits, and make the function that Holdfast calls."""
        arguments = self._give_options()
        self._allow_folders()
        self._drop_flags()
        imports = [*imports, *(["import sys"] if arguments else [])]
        script = Script(self.script.name, self.script.apply())
        _drop_imports(script, ("wandb", "SummaryWriter"))
        script = Script(script.name, script.apply())
        name = next(each for each in ("train", "train_run", "train_held") if each not in self.taken)
        head = f"def {name}({self.run}: holdfast.Run) -> None:"
        guard = next(filter(_is_guard, script.tree.body), None)
        if guard is not None and all(_is_passive(node) for node in script.tree.body if node is not guard):
            outer = _list_globals(script, guard.body)
            text = script.text.splitlines(keepends=True)
            text[guard.lineno - 1] = "\n".join([head, *_declare(outer), *arguments, ""])
            self.result.text = "".join(text)
        else:
            self.result.text = _wrap(script, head, arguments, guard)
        self.result.function = name
        self.result.text = _add_imports(Script(script.name, self.result.text), imports)
        try:
            compile(self.result.text, script.name, "exec")
        except SyntaxError as error:
            raise ConfigError(
                f"{script.name} can't be converted: line {error.lineno} of the result isn't valid Python: {error.msg}",
                hint="convert it by hand: holdfast docs convert",
            ) from None
        return self.result


class _Changer(_Entry):
    """The edits of a script with its own training loop."""

    def __init__(self, script: Script, line: int, options: Sequence[str]) -> None:
        super().__init__(script, options)
        self.found: Loops = self.finder.find(line)
        states = StateFinder(self.finder, self.found)
        self.state: State = states.find()
        self.restarted = states.list_restarted()
        self.scope = function_of(self.found.outer) or script.tree
        self.step = "step" if "step" not in self.taken else "now"
        self.store = "state" if "state" not in self.taken else "carried"

    def convert(self) -> Conversion:
        for other in self.found.others:
            self.ask(other, "this loop trains, too, and stays as it is; --line converts it instead")
        for around in self.found.around:
            self.ask(around, "a run trains once: take the loop that trains out of this loop")
        sums, others = self.restarted
        if sums:
            names = ", ".join(sums)
            self.ask(self.found.batch, f"after a resume inside an epoch, sums count only the batches since: {names}")
        if others:
            question = (
                f"a resume inside an epoch begins {', '.join(others)} anew, and a step depends on the step before"
            )
            self.ask(self.found.batch, f"{question}: keep it in a dict that {self.run}.keep(...) gets")
        self._use_accelerator()
        self._drop_checkpoints()
        has_logged = self._log_instead_of_writers()
        self._change_loops()
        if not has_logged:
            self._log_loss()
        self._keep()
        self._rename()
        self.pass_run(self.found.calls_into(self.found.batch))
        return self.finish(["import holdfast"])

    def _use_accelerator(self) -> None:
        """Let the script use the run's Accelerator in place of one that it makes."""
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Assign) and called(node.value).rpartition(".")[2] == "Accelerator":
                assert isinstance(node.value, ast.Call)
                self.script.replace(node.value, f"{self.run}.accelerator")
                for given in node.value.keywords:
                    name, value = f"{dotted(node.targets[0])}.{given.arg}", self.script.segment(given.value)
                    if given.arg == "gradient_accumulation_steps":
                        self.script.insert_after(node, f"{name} = {value}")
                    else:
                        text = f"{given.arg}={value}" if given.arg else f"**{value}"
                        self.ask(node, f"the run's Accelerator has no {text}; see compute in the configuration")

    # ---- the loops

    def _change_loops(self) -> None:
        outer, batch, loader = self.found.outer, self.found.batch, self.found.loader
        self._ask_about_breaks(batch)
        if self.found.epoch is None:
            self._change_steps(batch, loader)
            return
        if loader is None:
            self._change_split(outer, batch)
            return
        text = self._loader_outside(loader)
        self._replace_head(outer, f"{self.run}.epochs({text})")
        self._count_epochs(outer)
        self.script.replace(loader, f"{self.run}.batches()")
        self._continue_index(batch, loader)
        self._ask_about_split(outer, batch)

    def _loader_outside(self, loader: ast.expr) -> str:
        """Return the expression that yields the loader in the function with the loop over epochs."""
        expression: ast.expr = loader
        for call, function in reversed(self.found.calls):
            if function_of(self.found.outer) is function or function_of(self.found.batch) is self.scope:
                break
            expression = _find_argument(call, function, expression)
        return self.text_of(expression)

    def _replace_head(self, loop: Loop, iterable: str, target: str = "") -> None:
        """Replace a loop's iterable, and its target if a new one is given."""
        if isinstance(loop, ast.While):
            self.script.replace_head(loop, f"for {target or counter_of(loop) or 'epoch'} in {iterable}")
            return
        self.script.replace(strip_wrappers(loop.iter), iterable)
        if target:
            self.script.replace(loop.target, target)

    def _count_epochs(self, loop: Loop) -> None:
        start, stop = _bounds(loop)
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and _number(start) == 1:
            self.script.insert_before(loop.body[0], f"{loop.target.id} += 1")
        first = _number(start)
        last = self._find_number(stop)
        self.result.epochs = last - (first or 0) if last is not None else None
        if self.result.epochs is None:
            self.ask(loop, "how many epochs? Write the number into the configuration")

    def _continue_index(self, batch: Loop, loader: ast.expr) -> None:
        """Let ``enumerate`` continue with the batch's number."""
        heads = [batch.iter] if isinstance(batch, ast.For) else []
        wrappers = [*itertools.takewhile(lambda each: isinstance(each, ast.expr), enclosing(loader))]
        for around in dict.fromkeys([*wrappers, *(each for head in heads for each in ast.walk(head))]):
            if isinstance(around, ast.Call) and dotted(around.func) == "enumerate":
                starts = [*around.args[1:], *(each.value for each in around.keywords)]
                if starts:
                    self.script.replace(starts[0], f"{self.run}.batch_number + {self.text_of(starts[0])}")
                else:
                    end = len(self.script.segment(around).encode()) - 1
                    self.script.insert_at(around, end, f", {self.run}.batch_number")

    def _ask_about_split(self, outer: Loop, batch: Loop) -> None:
        """Ask about random numbers that are drawn at an epoch's beginning: a resume inside the epoch draws again."""
        for node in outer.body:
            if node.lineno >= batch.lineno:
                break
            for each in walk_own([node]):
                if isinstance(each, ast.Call) and SPLITTERS.search(called(each)):
                    question = "after a resume inside an epoch this line draws again, and gets different numbers"
                    self.ask(each, f"{question}: draw it with a generator that the epoch's number seeds")

    def _change_steps(self, loop: Loop, loader: ast.expr | None) -> None:
        """Change a loop over batches, or over a count of steps, that no loop over epochs surrounds."""
        step = self.step
        lines = list[str]()
        if loader is not None:
            assert isinstance(loop, ast.For)
            target = loop.target
            if (
                isinstance(loop.iter, ast.Call)
                and dotted(loop.iter.func) == "enumerate"
                and isinstance(target, ast.Tuple)
            ):
                lines.append(f"{self.text_of(target.elts[0])} = {step}.number")
                target = target.elts[1]
            lines.append(f"{self.text_of(target)} = {step}.batch")
            head = f"{self.run}.steps({self.text_of(loader)})"
            self.script.replace(loop.iter, head)
            self.script.replace(loop.target, step)
            self.result.epochs = 1
        else:
            start, stop = _bounds(loop)
            if stop is None and not _is_endless(loop):
                raise ConfigError(
                    f"{self.script.place(loop)}: this loop has no fixed number of steps: {ast.unparse(_head(loop))}",
                    hint="loop over range(number of steps), and convert again",
                )
            counter = counter_of(loop)
            is_used = counter is not None and counter in names_in(loop.body, ast.Load)
            if counter is not None and (is_used or isinstance(loop, ast.While)):
                offset = f"{self.text_of(start)} + " if start is not None and _number(start) != 0 else ""
                lines.append(f"{counter} = {offset}{step}.number")
            if stop is not None:
                self._replace_head_of_steps(loop, step, stop, start)
            else:
                self.ask(loop, f"this loop has no count that ends it: how many steps? {STEPS} is written")
                self._replace_head(loop, f"{self.run}.steps(per_epoch={STEPS})", step)
            number, first = self._find_number(stop), _number(start) or 0
            self.result.epochs, self.result.steps = 1, number - first if number is not None else None
        if lines:
            self.script.insert_before(loop.body[0], *lines)

    def _ask_about_breaks(self, loop: Loop) -> None:
        for each in walk_own(loop.body):
            if not isinstance(each, ast.Break) or each is self._last_break:
                continue
            if next(n for n in enclosing(each) if isinstance(n, LOOPS)) is loop:
                self.ask(each, "a run whose loop breaks stays incomplete: set the length in the configuration instead")

    @cached_property
    def _last_break(self) -> ast.Break | None:
        """Return the break at the end of ``while True``, after the count of the steps."""
        found = find_last_break(self.found.batch)
        return found.body[-1] if found is not None and isinstance(found.body[-1], ast.Break) else None

    def _replace_head_of_steps(self, loop: Loop, step: str, stop: ast.expr, start: ast.expr | None) -> None:
        count = self.text_of(stop)
        if (end := find_last_break(loop)) is not None:
            self.script.delete(end)
            assert isinstance(end.test, ast.Compare)
            count += " + 1" if isinstance(end.test.ops[0], ast.Gt) else ""
        if start is not None and _number(start) != 0:
            is_sum = isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Add)
            if isinstance(stop, ast.BinOp) and is_sum and self.text_of(stop.right) == self.text_of(start):
                count = self.text_of(stop.left)
            else:
                count = f"{count} - {self.text_of(start)}"
        self._replace_head(loop, f"{self.run}.steps(per_epoch={count})", step)

    def _change_split(self, outer: Loop, batch: Loop) -> None:
        """Change a loop over epochs that contains a loop over slices of an array."""
        assert isinstance(batch, ast.For)
        if function_of(batch) is not function_of(outer) or strip_wrappers(batch.iter) is not batch.iter:
            raise ConfigError(
                f"{self.script.place(batch)}: this loop iterates over slices of an array, which convert can't turn "
                "into batches",
                hint="give the array to a DataLoader, and convert again",
            )
        parts = self.text_of(strip_wrappers(batch.iter))
        step = self.step
        self._replace_head(outer, f"{self.run}.epochs(per_epoch=len({parts}))")
        self._count_epochs(outer)
        self._replace_head(batch, f"{self.run}.steps()", step)
        self.script.insert_before(
            batch.body[0], f"{self.text_of(batch.target)} = {parts}[{step}.number % len({parts})]"
        )
        self._ask_about_split(outer, batch)

    def _find_number(self, expression: ast.expr | None, names: int = 8) -> int | None:
        """Return the number that an expression stands for, if the script's constants or options give it one.

        Args:
            names: the maximum number of names to follow, one after the other.
        """
        if expression is None or not names:
            return None
        if (number := _number(expression)) is not None:
            return number
        if isinstance(expression, ast.BinOp) and (compute := OPERATORS.get(type(expression.op))):
            left, right = (self._find_number(each, names - 1) for each in (expression.left, expression.right))
            return compute(left, right) if left is not None and right is not None else None
        if isinstance(expression, ast.Call) and dotted(expression.func) == "int" and expression.args:
            return self._find_number(expression.args[0], names - 1)
        if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
            last = str(expression.slice.value)
        else:
            expression = self._argument_outside(expression)
            if (number := _number(expression)) is not None:
                return number
            last = dotted(expression).rpartition(".")[2]
        values = [*_values_of(self.script.tree, last, self.options)]
        numbers = {self._find_number(each, names - 1) for each in values} - {None}
        return numbers.pop() if len(numbers) == 1 else None

    def _argument_outside(self, expression: ast.expr) -> ast.expr:
        """Return the argument that the script's outermost call passes for a parameter of the loop's function."""
        for call, function in reversed(self.found.calls_into(self.found.outer)):
            expression = _find_argument(call, function, expression)
        return expression

    # ---- the state

    def _keep(self) -> None:
        kept, carried = dict(self.state.kept), self.state.carried
        lines = list[str]()
        if carried:
            items = [f'"{name}": {value}' for name, value in carried.items()]
            lines += _fold(f"{self.store} = {{", items, "}")
            kept[self.store] = self.store
        if not kept:
            self.ask(
                self.found.outer,
                f"which objects does training change? Write {self.run}.keep(model=model, ...) before this loop",
            )
        else:
            for test in dict.fromkeys(["", *self.state.conditions.values()]):
                parts = [f"{name}={text}" for name, text in kept.items() if self.state.conditions.get(name, "") == test]
                keep = _fold(f"{self.run}.keep(", parts, ")") if parts else []
                lines += [f"if {test}:", *(f"    {line}" for line in keep)] if test else keep
        for name, reason in self.state.unclear.items():
            question = f"does a step depend on the value of {name} that the step before left?"
            self.ask(self.found.outer, f"{question} It isn't kept, because {reason}")
        self.script.insert_before(self.found.outer, *lines)
        for name, form in self.state.detached.items():
            item = f'{self.store}["{name}"]'
            self.script.insert_after(self.found.batch.body[-1], f"{item} = {form.format(item)}")
        self.result.kept = [*self.state.kept, *carried]

    def _rename(self) -> None:
        """Replace the variables that one step leaves to the next by items of a dict, which the run keeps."""
        if not self.state.carried:
            return
        for node in walk_own([*ast.iter_child_nodes(self.scope)]):
            if getattr(node, "lineno", 0) < self.found.outer.lineno:
                continue
            if isinstance(node, ast.JoinedStr):
                if (text := self.text_of(node)) != self.script.segment(node):
                    self.script.replace(node, text)
            elif isinstance(node, ast.Name) and node.id in self.state.carried and not _is_in_text(node):
                self.script.replace(node, f'{self.store}["{node.id}"]')

    def text_of(self, node: ast.AST) -> str:
        """Return a node's text, with each variable that the run keeps as an item of the kept dict."""
        first, _ = self.script.span(node)
        parts, position, data = list[str](), 0, self.script.segment(node).encode()
        for each in walk_own([node]):
            text = ""
            if isinstance(each, ast.JoinedStr) and not _is_in_text(each):
                text = self._rename_in_text(self.script.segment(each))
            elif isinstance(each, ast.Name) and each.id in self.state.carried and not _is_in_text(each):
                text = f'{self.store}["{each.id}"]'
            if text:
                begins, ends = (place - first for place in self.script.span(each))
                parts += [data[position:begins].decode(), text]
                position = ends
        return "".join([*parts, data[position:].decode()])

    def _rename_in_text(self, text: str) -> str:
        """In the braces of an f-string, replace the variables that the run keeps by items of the kept dict."""
        quote = "'" if text.rstrip().endswith('"') else '"'
        names = "|".join(map(re.escape, self.state.carried)) or r"\b\B"

        def rename(found: re.Match[str]) -> str:
            return re.sub(rf"(?<![\w.'\"])({names})(?!\w)", rf"{self.store}[{quote}\1{quote}]", found[0])

        return re.sub(r"\{[^{}]*\}", rename, text)

    # ---- logging

    def _log_instead_of_writers(self) -> bool:
        """Replace writers of TensorBoard and wandb by ``run.log``. Return whether the loop logs."""
        writers = {
            dotted(target): node
            for node in ast.walk(self.script.tree)
            if isinstance(node, ast.Assign) and called(node.value).rpartition(".")[2] == "SummaryWriter"
            for target in node.targets
        }
        has_logged = False
        inside = {id(each) for loop in (self.found.outer, self.found.batch) for each in ast.walk(loop)}
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Assign) and (node in writers.values() or called(node.value) == "wandb.init"):
                self.script.delete(node)
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
                continue
            name, call = dotted(node.value.func), node.value
            owner, _, method = name.rpartition(".")
            if name == "wandb.log" and id(node) in inside and call.args:
                self.script.replace(node, f"{self.run}.log(**{self.text_of(call.args[0])})")
                has_logged = True
            elif owner in writers and method == "add_scalar" and len(call.args) >= 2 and id(node) in inside:
                self.script.replace(node, self._log_scalar(call))
                has_logged = True
            elif name in ("wandb.init", "wandb.watch", "wandb.finish") or (owner in writers):
                self.script.delete(node)
                if owner in writers and method not in ("close", "flush", "add_scalar"):
                    self.ask(node, f"{method} is deleted: run.show shows pictures and texts")
        if has_logged:
            self.result.questions.append(
                'sinks = ["tensorboard"] or ["wandb"] under [log] in the configuration writes the numbers'
            )
        return has_logged

    def _log_scalar(self, call: ast.Call) -> str:
        tag, value = call.args[0], self.text_of(call.args[1])
        if isinstance(tag, ast.Constant) and isinstance(tag.value, str) and tag.value.isidentifier():
            return f"{self.run}.log({tag.value}={value})"
        return f"{self.run}.log(**{{{self.text_of(tag)}: {value}}})"

    def _log_loss(self) -> None:
        """Log the loss at the end of each step."""
        batch = self.found.batch
        for node in walk_own(batch.body):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr.endswith("backward")
            ):
                given = node.args[0] if node.args else node.func.value
                inner = given.args[0] if isinstance(given, ast.Call) and given.args else given
                if isinstance(inner, ast.Name):
                    self.script.insert_after(batch.body[-1], f"{self.run}.log(loss={self.text_of(inner)})")
                    return
        for node in walk_own(batch.body):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "loss" in node.targets[0].id:
                self.script.insert_after(batch.body[-1], f"{self.run}.log(loss={self.text_of(node.targets[0])})")
                return

    # ---- checkpoints

    def _drop_checkpoints(self) -> None:
        """Delete the code that saves inside the loop, and the code before it that restores an optimizer."""
        found = {id(node): node for each in self.finder.list_code(self.found) for node in ast.walk(each)}
        for node in found.values():
            if isinstance(node, ast.Expr) and SAVES.search(called(node.value)):
                self.script.delete(node)
                self.ask(
                    node, "deleted, because the run saves; for the best model see run.observe and retention.keep_best"
                )
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Call) and node.lineno < self.found.outer.lineno and _begins_file(node):
                self.ask(node, "each start of the run begins this file anew: open it to append, or use run.log")
        for node in walk_own([*ast.iter_child_nodes(self.scope)]):
            is_before = isinstance(node, ast.If) and node.lineno < self.found.outer.lineno and not node.orelse
            if isinstance(node, ast.If) and is_before and self._restores(node):
                self.script.delete(node)

    def _restores(self, node: ast.If) -> bool:
        calls = [each for each in walk_own(node.body) if isinstance(each, ast.Call)]
        loads = any(LOADS.search(called(each)) for each in calls)
        restored = [dotted(each.func) for each in calls if dotted(each.func).endswith(".load_state_dict")]
        stored = names_in(node.body, ast.Store)
        elsewhere = [n for n in walk_own([*ast.iter_child_nodes(self.scope)]) if isinstance(n, ast.Name)]
        known = {each.id for each in elsewhere if isinstance(each.ctx, ast.Store) and each.lineno < node.lineno}
        later = {
            each.id for each in elsewhere if isinstance(each.ctx, ast.Load) and each.lineno > (node.end_lineno or 0)
        }
        return loads and any("opt" in each for each in restored) and not (stored - known) & later


class _ForeignChanger(_Entry):
    """The edits of a script that calls another library's loop."""

    def __init__(self, script: Script, call: ast.Call, options: Sequence[str]) -> None:
        super().__init__(script, options)
        self.call = call

    def convert(self) -> Conversion:
        assert isinstance(self.call.func, ast.Attribute)
        trainer, method = self.script.segment(self.call.func.value), self.call.func.attr
        given = [self.script.segment(each) for each in self.call.args]
        given += [
            f"{each.arg}={self.script.segment(each.value)}"
            for each in self.call.keywords
            if each.arg not in ("ckpt_path", "resume_from_checkpoint")
        ]
        given = given if method == "fit" else []
        self.script.replace(self.call, f"held.{method}({', '.join([self.run, trainer, *given])})")
        self.pass_run([*_find_calls(self.finder, function_of(self.call))])
        lengths = [each for each in ast.walk(self.script.tree) if isinstance(each, ast.keyword) and each.arg in LENGTHS]
        numbers = [number for each in lengths if (number := _number(each.value)) is not None]
        self.result.epochs = numbers[0] if len(numbers) == 1 else None
        if self.result.epochs is None:
            self.ask(self.call, "write the Trainer's number of epochs into the configuration, too")
        self.ask(self.call, f"write {self.run}.keep(...) before this line for state that the Trainer doesn't save")
        return self.finish(["import holdfast", f"from holdfast.adapters import {ADAPTERS[method]} as held"])


def _find_foreign(script: Script) -> ast.Call | None:
    """Return the call of another library's loop: ``trainer.train()`` or ``trainer.fit(...)``."""
    trainers = {
        dotted(target)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign) and called(node.value).endswith("Trainer")
        for target in node.targets
    }
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in ADAPTERS:
            continue
        if dotted(node.func.value) in trainers or called(node.func.value).endswith("Trainer"):
            return node
    return None


def _find_calls(finder: Finder, function: Function | None) -> Iterator[tuple[ast.Call, Function]]:
    """Yield the calls that lead to a function from the script's top."""
    seen = set[Function]()
    while function is not None and function not in seen:
        seen.add(function)
        call = next(
            (each for each in ast.walk(finder.script.tree)
             if isinstance(each, ast.Call) and finder.function_called(each) is function), None,
        )  # fmt: skip
        if call is None:
            return
        yield call, function
        function = function_of(call)


# ---- the tree


def _is_in_text(node: ast.AST) -> bool:
    """Return whether a node is inside an f-string, which is edited as a whole."""
    return any(isinstance(each, ast.JoinedStr) for each in enclosing(node))


def _head(loop: Loop) -> ast.expr:
    return loop.iter if isinstance(loop, ast.For) else loop.test


def _bounds(loop: Loop) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the first number of a counting loop, and the number before which it ends."""
    if isinstance(loop, ast.For):
        head = strip_wrappers(loop.iter)
        if isinstance(head, ast.Call) and called(head) in ("range", "trange") and len(head.args) < 3:
            return (head.args[0], head.args[1]) if len(head.args) == 2 else (None, head.args[0])
        return (head.args[0] if isinstance(head, ast.Call) and head.args and _is_endless(loop) else None), None
    end = find_last_break(loop)
    test = end.test if end is not None else loop.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.left, ast.Name):
        return None, None
    return None, test.comparators[0] if end is not None or isinstance(test.ops[0], ast.Lt) else None


def _begins_file(call: ast.Call) -> bool:
    """Return whether a call opens a file for writing, and so empties it."""
    place = 1 if called(call) == "open" else 0
    modes = [*call.args[place : place + 1], *(each.value for each in call.keywords if each.arg == "mode")]
    is_open = called(call).rpartition(".")[2] == "open"
    return is_open and any(isinstance(mode, ast.Constant) and str(mode.value).startswith("w") for mode in modes)


def _is_endless(loop: Loop) -> bool:
    """Return whether a loop counts without an end, as ``for episode in count(1)`` does."""
    return isinstance(loop, ast.For) and called(strip_wrappers(loop.iter)) in ("count", "itertools.count")


def _number(expression: ast.expr | None) -> int | None:
    value = expression.value if isinstance(expression, ast.Constant) else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def _values_of(tree: ast.AST, name: str, options: Sequence[str]) -> Iterator[ast.expr]:
    """Yield the values that a script gives a name: a variable, an attribute, an item of a dict, an option's default.

    Args:
        options: the command-line options that the script gets.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Assign():
                yield from (v for t, v in assigned(node) if dotted(t).rpartition(".")[2] == name)
            case ast.AnnAssign() if dotted(node.target) == name:
                yield node.value or ast.Constant(None)
            case ast.arguments():
                given = [*node.posonlyargs, *node.args][-len(node.defaults) :] if node.defaults else []
                yield from (v for a, v in zip(given, node.defaults, strict=True) if a.arg == name)
            case ast.Dict():
                yield from (
                    v
                    for k, v in zip(node.keys, node.values, strict=True)
                    if isinstance(k, ast.Constant) and k.value == name
                )
            case ast.Call(func=ast.Name(id="dict")):
                yield from (each.value for each in node.keywords if each.arg == name)
            case ast.Call() if dotted(node.func).endswith("add_argument"):
                names = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
                said = [value for option, value in itertools.pairwise(options) if option in names and value.isdigit()]
                if name in [each.lstrip("-").replace("-", "_") for each in names]:
                    default = [each.value for each in node.keywords if each.arg == "default"]
                    yield from [ast.Constant(int(each)) for each in said[-1:]] or default


def _find_argument(call: ast.Call, function: Function, parameter: ast.expr) -> ast.expr:
    """Return the argument that a call passes for a parameter; a name that is no parameter is returned unchanged."""
    return arguments_of(call, function).get(dotted(parameter), parameter)


def _is_guard(node: ast.stmt) -> TypeGuard[ast.If]:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and "__name__" in names_in([node.test], ast.Load)
    )


def _list_globals(script: Script, body: Sequence[ast.stmt]) -> list[str]:
    """Return the names that these statements assign and that further statements or functions of the module use."""
    stored = {each.id for each in walk_own(body) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    inside = {id(each) for node in body for each in ast.walk(node)}
    others = [node for node in script.tree.body if id(node) not in inside and not _is_guard(node)]
    read = {each.id for each in walk_own(others) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    for function in script.functions:
        declared = {name for n in ast.walk(function) if isinstance(n, ast.Global) for name in n.names}
        if id(function) not in inside:
            read |= free_names(function)
        read |= declared
    return sorted(stored & read)


def _is_passive(node: ast.stmt) -> bool:
    """Return whether a statement may stay at the top of the module, because it only defines or imports."""
    if isinstance(node, PASSIVE) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return True
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(each, ast.Call) for each in ast.walk(node))
    return isinstance(node, ast.Try) and all(isinstance(each, (ast.Import, ast.ImportFrom)) for each in node.body)


def _wrap(script: Script, head: str, arguments: Sequence[str], guard: ast.If | None) -> str:
    """Put a module's statements into a function, from the first one that does something.

    Args:
        arguments: the lines that give the script its options.
        guard: the statement ``if __name__ == "__main__":``, whose body becomes a part of the function's.
    """
    body = script.tree.body
    first = next((n for n, node in enumerate(body) if not _is_passive(node)), len(body) - 1)
    active = body[first:]
    outer = _list_globals(script, active)
    fixed = {
        line
        for node in ast.walk(script.tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and (node.end_lineno or 0) > node.lineno
        if not isinstance(node, ast.Constant) or isinstance(node.value, (str, bytes))
        for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)
    }
    dissolved = set(range(guard.lineno + 1, (guard.end_lineno or 0) + 1)) if guard is not None else set[int]()
    start = min([active[0].lineno, *(each.lineno for each in getattr(active[0], "decorator_list", []))])
    lines = script.text.splitlines(keepends=True)
    start = _with_comments(lines, start)
    moved = [
        line if number in fixed or number in dissolved or not line.strip() else f"    {line}"
        for number, line in enumerate(lines[start - 1 :], start)
        if guard is None or number != guard.lineno
    ]
    gap = "" if start < 2 else "\n" * (2 - sum(not line.strip() for line in lines[max(0, start - 3) : start - 1]))
    first_lines = "\n".join([head, *_declare(outer), *arguments, ""])
    return "".join([*lines[: start - 1], gap, first_lines, *moved])


def _declare(names: Sequence[str]) -> list[str]:
    """Return the line that declares a function's global variables."""
    return [f"    global {', '.join(names)}"] if names else []


def _with_comments(lines: Sequence[str], start: int) -> int:
    """Return the first line of the comments right above a line."""
    while start > 1 and lines[start - 2].startswith("#") and not lines[start - 2].startswith("#!"):
        start -= 1
    return start


def _drop_imports(script: Script, names: Sequence[str]) -> None:
    """Delete imports of names that are no longer used, because their packages may be missing."""
    used = names_in([script.tree], ast.Load)
    for node in ast.walk(script.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and len(node.names) == 1:
            name = node.names[0].asname or node.names[0].name
            if name in names and name not in used:
                script.delete(node)


def _add_imports(script: Script, imports: Sequence[str]) -> str:
    found = [node for node in script.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imports = [each for each in imports if each not in map(script.segment, found)]
    if found:
        script.insert_after(found[-1], "", *imports)
    else:
        script.insert_before(script.tree.body[0], *imports, "")
    return script.apply()


def _fold(head: str, parts: Sequence[str], tail: str) -> list[str]:
    """Return a call or dict on one line, or on several if it is long."""
    line = head + ", ".join(parts) + tail
    return [line] if len(line) <= WIDTH else [head, *(f"    {part}," for part in parts), tail]
