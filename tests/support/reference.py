"""Make the pages of reference that are made from the code: commands.md, environment.md, errors.md and messages.md."""

import ast
import importlib
import itertools
import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import griffe
from cyclopts import App

from holdfast import errors
from holdfast.cli import EXIT_CODES, app
from holdfast.errors import HoldfastError
from holdfast.journal.endings import REASONS, Reason
from holdfast.machine.environment import CPU_VARIABLES, GPU_VARIABLES, PROCESS_VARIABLES
from holdfast.memory.switches import NAMES
from tests.support.api import escape, spell_text

ROOT = Path(__file__).parents[2]
ROOMS = ("holdfast", "tasks", "flows", "deployments")


def find_programs() -> dict[str, App]:
    """Return the programs with a command line: `holdfast`, and the modules that are started with ``python -m``."""
    paths = [path for room in ("flows", "deployments") for path in sorted((ROOT / room).glob("*.py"))]
    modules = [f"{path.parent.name}.{path.stem}" for path in paths if "\napp = App(" in path.read_text("utf-8")]
    apps = [app, *(importlib.import_module(module).app for module in modules)]
    return {str(each.name[0]): each for each in apps}


# ---- commands.md

COMMANDS = """\
# The commands

`holdfast` is the engine's command; `pip install .` installs it. The other programs on this page, such as
`python -m flows.train`, need a checkout of the repository. Each command prints its help with `--help`.

RUN is `<store>/<run>`, or the name of a run in the default store, `runs/`.

{exit_codes} [errors.md](errors.md) lists the codes of each error. For commands that compare, this page says what 2
means.

`make docs` generates this page from the commands' options and docstrings; a test compares them.
"""


def make_commands() -> str:
    """Return docs/commands.md: a section for each command of each program."""
    lines = [COMMANDS.format(exit_codes=EXIT_CODES)]
    for program, each in find_programs().items():
        lines += [f"## {program}", "", spell_prose(str(each.help or "")), ""]
        for name, command in list_commands(each):
            lines += [f"### {name}", ""] if name else []
            lines += describe_command(f"{program} {name}".rstrip(), command)
    return "\n".join(lines)


def list_commands(program: App) -> list[tuple[str, App]]:
    """Return a program's shown commands by name, sorted; itself, without a name, if it has no others."""
    named = [(name, program[name]) for name in program if not name.startswith("-")]
    return sorted((name, each) for name, each in named if each.show) or [("", program)]


def describe_command(name: str, command: App) -> Iterator[str]:
    """Yield the lines of a command: how it is called, what it does, and a table of its arguments and options."""
    function = command.default_command
    assert function is not None
    arguments = list(command.assemble_argument_collection())
    usage = (command.usage or "").replace("Usage: ", "").replace("\n       ", "\n") or spell_usage(name, arguments)
    yield from ["```", *usage.splitlines(), "```", ""]
    text, meanings = read_docstring(function)
    yield from [*text, ""]
    if not arguments:
        return
    yield from ["| argument or option | default | meaning |", "|---|---|---|"]
    for each in arguments:
        names = ", ".join(f"`{spelling}`" for spelling in each.names)
        meaning = spell_prose(meanings[each.field_info.name]).replace("|", "\\|")
        yield f"| {names} | {spell_default(each)} | {meaning} |"
    yield ""


def spell_usage(name: str, arguments: list[Any]) -> str:
    positional = [each.name if each.required else f"[{each.name}]" for each in arguments if each.index is not None]
    return " ".join([name, *positional, *(["[OPTIONS]"] if len(positional) < len(arguments) else [])])


def spell_default(argument: Any) -> str:
    if argument.required:
        return "required"
    default = argument.field_info.default
    return f"`{default}`" if default not in (None, "", False) and isinstance(default, str | int | float) else ""


def read_docstring(function: Any) -> tuple[list[str], Mapping[str, str]]:
    """Return the lines of a function's docstring before its arguments, and the meaning of each argument by its name."""
    text: list[str] = []
    meanings: dict[str, str] = {}
    for section in griffe.Docstring(function.__doc__ or "").parse("google", warnings=False):
        if isinstance(section, griffe.DocstringSectionText):
            text += spell_text(section.value)
        elif isinstance(section, griffe.DocstringSectionParameters):
            meanings |= {name: each.description for each in section.value for name in each.name.split(", ")}
    return text, meanings


def spell_prose(text: str) -> str:
    return escape(" ".join(text.replace("``", "`").split()))


# ---- environment.md

# Each variable of ours: what it does.
SET_BY_YOU = {
    "HOLDFAST_ALLOWED_RECIPES": "the recipes that runs on this machine may train: modules, recipes, files and "
    "folders, separated by commas. If the variable is unset, all recipes are allowed; if it is empty, none is. "
    "[SECURITY.md](../SECURITY.md#who-can-run-code) has an example",
    "HOLDFAST_ALLOWED_STORES": "the stores that runs on this machine may use: folders and URLs, separated by "
    "commas. [adding-a-store.md](adding-a-store.md) has an example",
    "HOLDFAST_HOST": "the name of this machine in the records of runs, in place of its host name; in a pod, for "
    "example, the name of the node: [trust.md](trust.md#which-machine-it-was)",
    "HOLDFAST_HEARTBEAT_S": "the seconds between two heartbeats of a Prefect flow run, from 1 to 10, by default 3. "
    "Set the same value for `make up` or `deployments.setup`, and for all workers: "
    "[operating.md](operating.md#a-fleet)",
    "HOLDFAST_NODE": "the number of this machine (node) in a run on several machines, from 0, if neither Slurm nor "
    "Kubernetes sets the number: [nodes.md](nodes.md)",
    "HOLDFAST_SERVER_LINGERS_S": "for how many seconds the temporary Prefect server of a command waits for the next "
    "command, by default 180. With 0 the server ends with its command",
    "HOLDFAST_STATE": "the folder in which `make up` stores its database, secret and logs; by default "
    "`~/.local/state/holdfast`",
    "HOLDFAST_WITHOUT": f"optimizations to turn off, separated by commas: {', '.join(f'`{each}`' for each in NAMES)}. "
    "Use it to find the cause of a problem, or to measure a gain: "
    "[performance.md](performance.md)",
}
SET_FOR_TESTS = {
    "HOLDFAST_EXAMPLES": "how many random sequences of kills and restarts the tests try; `make soak` sets it",
    "HOLDFAST_FAULT": "a point of the code at which a process kills itself. To set this variable, use the dict that "
    "`holdfast.testing.faults.fault` returns ([api.md](api.md#fault))",
    "HOLDFAST_FLIP": "a rank whose self-test fails. To set this variable, use the dict that "
    "`holdfast.testing.faults.flip` returns ([api.md](api.md#flip))",
    "HOLDFAST_HELM_CHARTS": "a folder of Helm charts, for `make check-infra` without a network",
    "HOLDFAST_TERRAFORM_PLUGINS": "a folder of Terraform providers, for `make check-infra` without a network",
    "HOLDFAST_TEST_DEVICE": "the device on which the tests of ranks train; `make test-gpus` sets it",
    "HOLDFAST_TEST_TABLE": "the file to which the tests of GPUs append their results; `make test-gpus` sets it",
    "HOLDFAST_TEST_UNTIL": "the time, in seconds since 1970, at which the tests of GPUs end; `make test-gpus` sets it",
    "HOLDFAST_TEST_WITHIN_S": "the longest time of `make test-gpus`, in seconds",
}
SET_BY_HOLDFAST = {
    "HOLDFAST_ATTEMPT": "the process id of the attempt that has started the ranks. With this id the next attempt finds "
    "ranks whose attempt has died",
    "HOLDFAST_BESIDE": "the process id of the attempt, in ranks that torchrun, accelerate or srun has started",
    "HOLDFAST_COMMIT": "the commit that new ranks will probably restore",
    "HOLDFAST_CONFIG": "the run's configuration as JSON, for ranks and metric sinks",
    "HOLDFAST_MEETING": "the file in memory through which several ranks of one machine find each other",
    "HOLDFAST_DOOR": "for ranks of [another launcher](launchers.md): the file descriptor of the socket through which "
    "they connect to the attempt, and the process id of the first rank",
    "HOLDFAST_END": "the pipe from which a rank that another launcher has started reads the attempt's exit code",
    "HOLDFAST_GPU": "the GPU that a worker of `make up GPUS=...`, and all of the worker's processes, use",
    "HOLDFAST_HEARTBEATS": "the file into which ranks write their step, so that their attempt sees their progress",
    "HOLDFAST_HELD": "1 in ranks that were started early, and wait before they build the recipe",
    "HOLDFAST_LAUNCHER": "the process id of the launcher, if another launcher has started the ranks",
    "HOLDFAST_LIVED": "the file with the log of the steps that aren't committed yet",
    "HOLDFAST_LONGEST_EPOCH": "the maximum number of steps of an epoch in a proof; longer epochs are shortened",
    "HOLDFAST_PATIENCE": "the factor by which the time limits for hanging ranks are multiplied",
    "HOLDFAST_RANKS": "a text by which an attempt recognizes its own ranks",
}
OF_OTHERS = {
    "CUDA_DEVICE_ORDER": "`PCI_BUS_ID` numbers GPUs of several models as `nvidia-smi` does; without it a run that "
    "finds several models checks all of them",
    "CUDA_VISIBLE_DEVICES": "the GPUs that a run may take",
    "GLOO_SOCKET_IFNAME": "the network interface for training on several machines; if you don't set this variable, "
    "Holdfast sets it and `NCCL_SOCKET_IFNAME`",
    "GROUP_RANK": "the number of a rank's machine. torchrun sets this variable, and `GROUP_WORLD_SIZE`, `LOCAL_RANK`, "
    "`LOCAL_WORLD_SIZE`, `RANK` and `WORLD_SIZE`. If you start `holdfast train` under a launcher that sets them, "
    "Holdfast hides them from its ranks",
    "JOB_COMPLETION_INDEX": "the number of this node, in an indexed Job of Kubernetes",
    "KUBERNETES_SERVICE_HOST": "the address of the cluster's API, in a pod; `KUBERNETES_SERVICE_PORT` is its port: "
    "[kubernetes.md](kubernetes.md)",
    "MASTER_ADDR": "the address at which ranks that torchrun, accelerate or srun has started connect; `MASTER_PORT` "
    "is the port: [launchers.md](launchers.md)",
    "NO_PROXY": "hosts to contact without a proxy; `make up` adds this machine",
    "PAGER": "the program with which `holdfast docs` shows a page, by default `less`",
    "POD_NAME": "the name of the attempt's own pod, from the pod's manifest: [kubernetes.md](kubernetes.md)",
    "PREFECT_API_URL": "the URL of Prefect's server; `PREFECT_API_AUTH_STRING` is its secret: "
    "[operating.md](operating.md)",
    "PYTHONPATH": "folders of modules; ranks on a Ray cluster receive this variable, too",
    "RAY_ADDRESS": "the address of the Ray cluster: [nodes.md](nodes.md)",
    "SLURM_JOB_ID": "the number of the Slurm job. Holdfast also reads `SLURM_RESTART_COUNT`, and for an array "
    "`SLURM_ARRAY_JOB_ID` and `SLURM_ARRAY_TASK_ID`: [slurm.md](slurm.md)",
    "SLURM_NODEID": "the number of this node, in a job of Slurm",
    "SLURM_PROCID": "the number of a task of `srun`; `SLURM_LOCALID` is the task's number on its node: "
    "[launchers.md](launchers.md)",
    "SLURM_STEP_ID": "the number of the job step that srun has started; `SLURM_STEP_NUM_NODES` and "
    "`SLURM_STEP_TASKS_PER_NODE` are the step's size: [slurm.md](slurm.md)",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "whether a rank ends when NCCL fails; by default Holdfast sets 1 for ranks of "
    "one machine, as torchrun does",
    "STORAGE_EMULATOR_HOST": "an emulator that replaces Google Cloud Storage; Holdfast then uses no credentials",
}

ENVIRONMENT = """\
# The environment variables

Use a setting in a [configuration](configuration.md) for one run, and an environment variable for a machine or a
process.

## Variables that you may set

{yours}

## Variables of other programs

Holdfast reads these variables in the same way as the programs that define them. A key that signs commits can be in a
variable of any name: see `env:NAME` in [configuration.md](configuration.md).

{others}

The following variables select the kernels that compute, and so they can change bits. A checkpoint records them,
`holdfast doctor RUN` compares them with those of this machine, and `determinism.mode = "strict"` sets some of them for
the ranks ([RESUME.md](../holdfast/RESUME.md#determinism)):

{bits}

## Variables of tests

{tests}

## Variables that Holdfast sets

Holdfast sets these variables for its own processes. Don't set them yourself.

{internal}

This page lists every variable: a test compares it with the code.
"""


def make_environment() -> str:
    """Return docs/environment.md: every environment variable that the code reads."""
    tables = {"yours": SET_BY_YOU, "others": OF_OTHERS, "tests": SET_FOR_TESTS, "internal": SET_BY_HOLDFAST}
    bits = ", ".join(f"`{name}`" for name in PROCESS_VARIABLES + CPU_VARIABLES + GPU_VARIABLES)
    return ENVIRONMENT.format(bits=bits, **{name: make_variables(rows) for name, rows in tables.items()})


def make_variables(rows: Mapping[str, str]) -> str:
    return "\n".join(
        ["| variable | meaning |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in rows.items())]
    )


# ---- errors.md

ERRORS = """\
# Exit codes, reasons and errors

## Exit codes

| code | meaning |
|---|---|
| 0 | success |
{codes}
| 130, 143 | the run was stopped by Ctrl-C (130), or by SIGTERM, SIGUSR1, SIGUSR2 or SIGHUP (143), and has saved |

A command that compares exits with 2 if it finds a difference: [commands.md](commands.md).

## Reasons

Each attempt records the reason why it ended;
[troubleshooting.md](troubleshooting.md#what-to-do-when-an-attempt-ends) tells you what to do for each. `holdfast train`
is one attempt, and exits with the *exit code*. On a Prefect work pool *another attempt* may follow, as often as the
setting of `[supervision]` in this column allows.

| reason | what happened | another attempt | exit code | in Prefect's UI |
|---|---|---|---|---|
{reasons}

## Errors

Every error is a class of `holdfast.errors`, and inherits from the builtin error in the column *is also*. *Retried*: the
same attempt tries again with new training processes (ranks). [messages.md](messages.md) lists the messages of each
error.

| error | is also | exit code | retried | ends an attempt as | meaning |
|---|---|---|---|---|---|
{errors}

This page is made from `holdfast/errors.py` and `holdfast/journal/endings.py` by `make docs`; a test compares them.
"""
CODES = {1: errors.WrongUse, 2: errors.Damage, 3: errors.RunStopped}


def make_errors() -> str:
    """Return docs/errors.md: the exit codes, the reasons why an attempt ends, and every error."""
    codes = [f"| {code} | {CODE_MEANINGS[code]} |" for code in CODES]
    reasons = [describe_reason(reason) for reason in REASONS.values()]
    rows = [describe_error(each) for each in list_errors()]
    return ERRORS.format(codes="\n".join(codes), reasons="\n".join(reasons), errors="\n".join(rows))


CODE_MEANINGS = {
    1: "wrong use: you can correct a setting, a name or an option, and nothing has run",
    2: "damage: bytes on the store aren't what was committed, or a run wouldn't continue exactly",
    3: "the run stopped early; the same command continues it",
}


def list_errors() -> list[type[HoldfastError]]:
    """Return every error below `HoldfastError`, in the order of the source."""
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, HoldfastError)]
    return [each for each in found if each is not HoldfastError]


def describe_reason(reason: Reason) -> str:
    follows = f"yes, `{reason.spends}`" if reason.retries else "no"
    return f"| `{reason.name}` | {reason.meaning} | {follows} | {find_exit_code(reason)} | {reason.state} |"


def find_exit_code(reason: Reason) -> str:
    """Return the exit code of a command whose attempt ends so; nothing for one that leaves no command."""
    if reason.name == "completed":
        return "0"
    if reason.name == "preempted":
        return f"{128 + signal.SIGTERM}, or {128 + signal.SIGINT} after Ctrl-C; 3 after a notice"
    if not reason.is_own:
        return ""
    codes = {each.exit_code for each in list_errors() if each.reason == reason.name and each not in CODES.values()}
    codes |= {each.exit_code for each in CODES.values() if each.reason == reason.name}
    return ", ".join(map(str, sorted(codes or {errors.RunStopped.exit_code})))


def describe_error(error: type[HoldfastError]) -> str:
    builtin = next(each for each in error.__mro__ if not issubclass(each, HoldfastError))
    base = "" if builtin is Exception else f"`{builtin.__name__}`"
    meaning = spell_prose((error.__doc__ or "").partition("\n\n")[0])
    retried = "yes" if error.is_retryable else ""
    return f"| `{error.__name__}` | {base} | {error.exit_code} | {retried} | `{error.reason}` | {meaning} |"


# ---- messages.md

MESSAGES = """\
# The messages

Search this page for the words of your message. A name in braces stands for a value in your message, and `...` for a
longer text. Optional words of a message are left out. The hint is the second line that the command prints. Each heading
is an error's class: [errors.md](errors.md) lists its exit code, and [troubleshooting.md](troubleshooting.md) tells you
what to do when an attempt ends. [concepts.md](concepts.md) explains the words, such as *commit*, *share* and *source*.

`make docs` generates this page from the code; a test compares them.
"""
# A value without a space beside it is a text that may be empty, such as a further clause.
FIRST = re.compile(r"(?:^|(?<= ))\{[a-z ]+\}(?=[a-z])|^\{[a-z ]+\}(?=\{)")
FURTHER = re.compile(r"(?<=[\w)}])\{[a-z ]+\}")
# A message without any of these words says nothing by itself.
WORDS = re.compile(r"[a-z]{3}")


def make_messages() -> str:
    """Return docs/messages.md: each message in the code with its hint, by the error's class."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    trees = [ast.parse(path.read_text("utf-8")) for path in paths]
    constants, functions = find_constants(trees), find_functions(trees)
    modules = {name: find_constants([tree]) for name, tree in zip(names, trees, strict=True)}
    for tree in trees:
        known = constants | find_imported(tree, modules), functions | find_functions([tree])
        for name, message, hint in find_messages(tree, *known):
            found[name][message] |= {hint} - {""}
    lines = [MESSAGES]
    for name in sorted(found):
        lines += [f"## {name}", ""]
        for message, hints in sorted(found[name].items()):
            lines.append(f"- {code(message)}" + (f"; hint: {' or '.join(map(code, sorted(hints)))}" if hints else ""))
        lines.append("")
    return "\n".join(lines)


def find_constants(trees: Iterable[ast.Module]) -> dict[str, ast.expr]:
    """Return the texts that modules give names in capitals; no name that stands for different texts."""
    found: dict[str, dict[str, ast.expr]] = defaultdict(dict)
    for name, value in (pair for tree in trees for pair in list_assigned(tree.body)):
        if name.isupper() and (is_text(value) or isinstance(value, ast.JoinedStr)):
            found[name][ast.unparse(value)] = value
    return {name: next(iter(values.values())) for name, values in found.items() if len(values) == 1}


def find_imported(tree: ast.Module, modules: Mapping[str, Mapping[str, ast.expr]]) -> dict[str, ast.expr]:
    """Return the texts in capitals that source code imports, such as the HINT of one of several modules."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    pairs = [(modules.get(node.module or "", {}), each) for node in imports for each in node.names]
    return {each.asname or each.name: texts[each.name] for texts, each in pairs if each.name in texts}


def find_functions(trees: Iterable[ast.Module]) -> dict[str, list[ast.expr]]:
    """Return the values that functions return, by the function's name; no name that stands for different functions."""
    found: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        found[node.name].append(node)
    return {
        name: [each.value for each in walk_scope(nodes[0]) if isinstance(each, ast.Return) and each.value is not None]
        for name, nodes in found.items() if len(nodes) == 1
    }  # fmt: skip


def list_assigned(nodes: Iterable[ast.AST]) -> list[tuple[str, ast.expr]]:
    """Return the names that get a value in these nodes, each with the value."""
    pairs = [(target, node.value) for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    for target, value in list(pairs):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs += zip(target.elts, value.elts, strict=False)
    return [(target.id, value) for target, value in pairs if isinstance(target, ast.Name)]


def find_messages(
    tree: ast.Module,
    constants: Mapping[str, ast.expr],
    functions: Mapping[str, Sequence[ast.expr]] = MappingProxyType({}),
) -> Iterator[tuple[str, str, str]]:
    """Yield the class, the message and a hint of each error that source code makes; an empty hint for none.

    Args:
        constants: the texts to which names in capitals refer.
        functions: the values that functions return, by the function's name; see `find_functions`.
    """
    names = {each.__name__ for each in list_errors()}
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    own = find_constants([tree])  # such as a module's HINT, when other modules give other texts this name
    for scope in list_scopes(tree):
        assigned = list_assigned(walk_scope(scope))
        for call in (node for node in walk_scope(scope) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name not in names or not call.args:
                continue
            before = list_before(call, assigned, parents)
            hints = [keyword.value for keyword in call.keywords if keyword.arg == "hint"]
            used = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)}
            values = [[pair for pair in before if pair[0] == each] for each in sorted(used)]
            for chosen in itertools.product(*filter(None, values)):
                line = max((value.lineno for name, value in chosen), default=call.lineno)
                near = sorted(before, key=lambda pair: -abs(pair[1].lineno - line))
                texts = {**constants, **own, **dict(near), **dict(chosen)}
                message = spell(call.args[0], texts)
                if not has_words(message):
                    continue
                spelled = [spell(each, texts) for hint in hints for each in list_alternatives(hint, texts, functions)]
                for hint in [*filter(has_words, spelled)] or [""]:
                    yield name, leave_out_optional(message), leave_out_optional(hint)


def list_alternatives(
    node: ast.expr, texts: Mapping[str, ast.expr], functions: Mapping[str, Sequence[ast.expr]]
) -> list[ast.expr]:
    """Return the expressions of which a hint is one: the branches of a condition, and what a function returns."""
    if isinstance(node, ast.IfExp | ast.BoolOp):
        branches = node.values if isinstance(node, ast.BoolOp) else (node.body, node.orelse)
        return [found for each in branches for found in list_alternatives(each, texts, functions)]
    if isinstance(node, ast.Name) and isinstance(texts.get(node.id), ast.IfExp | ast.BinOp | ast.Call | ast.Name):
        return list_alternatives(texts[node.id], {**texts, node.id: ast.Constant("")}, functions)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
        return [found for each in functions[node.func.id] for found in list_alternatives(each, texts, {})]
    return [node]


def list_before(
    call: ast.Call, assigned: Iterable[tuple[str, ast.expr]], parents: Mapping[ast.AST, ast.AST]
) -> list[tuple[str, ast.expr]]:
    """Return the names and values that a call may find: no value that a later line has replaced in any case."""
    around = set[ast.AST]()
    node: ast.AST = call
    while node in parents:
        node = parents[node]
        around.add(node)
    found = list[tuple[str, ast.expr]]()
    for name, value in sorted(assigned, key=lambda pair: pair[1].lineno):
        if value.lineno > call.lineno:
            break
        statement: ast.AST = value
        while not isinstance(statement, ast.Assign):
            statement = parents[statement]
        fields = [value for _, value in ast.iter_fields(parents[statement]) if isinstance(value, list)]
        if any(statement in field and around.intersection(field) for field in fields):
            found = [pair for pair in found if pair[0] != name]
        found.append((name, value))
    return found


def leave_out_optional(text: str) -> str:
    text = FURTHER.sub("", FIRST.sub("", text))
    return text.replace("can't {where}", "can't {action}").replace("{action}: {text}", "{action}: {reason}")


def has_words(text: str) -> bool:
    return bool(WORDS.search(re.sub(r"\{[^}]*\}", "", text)))


def list_scopes(tree: ast.Module) -> list[ast.AST]:
    return [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))]


def walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module or a function, without those of the functions inside it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from walk_scope(child)


def spell(node: ast.expr, texts: Mapping[str, ast.expr]) -> str:
    """Return the text of an expression; a name in braces for a value in it, and ``...`` for any other part."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return spell_joined(node, texts)
    if isinstance(node, ast.BinOp) and any(isinstance(each, ast.JoinedStr) or is_text(each) for each in ast.walk(node)):
        return spell(node.left, texts) + spell(node.right, texts)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "counted":
        return f"{{number}} {spell(node.args[1], texts)}s"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        given = iter(node.args)
        return re.sub(r"\{\}", lambda _: spell(next(given), {}), spell(node.func.value, texts))
    if isinstance(node, ast.IfExp) and ast.unparse(node.orelse) == "''":
        return spell(node.body, texts)
    if isinstance(node, ast.Name):
        known = texts.get(node.id)
        if isinstance(known, ast.Constant | ast.JoinedStr):
            return spell(known, {})
    name = name_value(node)
    return f"{{{name}}}" if name else "..."


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def spell_joined(node: ast.JoinedStr, texts: Mapping[str, ast.expr]) -> str:
    """Return the text of an f-string. If two values have one name, the second is called ``other``."""
    spelled, seen = "", dict[str, str]()
    for each in node.values:
        value = each.value if isinstance(each, ast.FormattedValue) else each
        if isinstance(value, ast.IfExp) and ast.unparse(value.orelse) == "''":
            value = value.body  # such as f" of {name}" if name else ""
        text = spell(value, texts)
        if text.startswith("{") and seen.setdefault(text, ast.unparse(value)) != ast.unparse(value):
            text = f"{{other {text[1:]}"
        spelled += text
    return spelled


# Names in the code that say little in a message: the word to show.
SHOWN_AS = {
    "apart": "names", "arg": "value", "args": "entry", "asked": "value", "broken": "names", "changed": "names",
    "checkpoint sha256": "content id", "chosen": "name", "complaints": "problems", "counts": "number",
    "current": "fingerprint", "cut": "name",
    "damaged": "problem", "done": "step", "double": "name", "each": "value", "else": "hint", "failed": "names",
    "filter": "names",
    "fitting": "names", "flaw": "problem", "given": "value", "has": "value", "join": "names", "known": "names",
    "lacking": "name", "lacks": "source", "lineno": "line", "means": "reason",
    "misfit": "entry", "missing": "name", "msg": "reason",
    "named": "names", "odd": "difference", "out": "path", "own": "own value", "qualname": "class",
    "renamed": "problem", "said": "text", "shown": "names", "some": "names", "st uid": "user id", "strerror": "reason",
    "taken": "path", "templates": "names", "theirs": "sizes", "together": "names", "trained with": "fingerprint",
    "unknown": "name", "unused": "name", "was": "time", "what": "kind", "who": "rank", "whole": "name", "whose": "kind",
}  # fmt: skip
# Beginnings of a function's name that aren't part of the name of its result.
VERBS = re.compile(r"^(?:describe|explain|find|list|name|read|shorten|spell)_")


def name_value(node: ast.expr) -> str:
    """Return the name to show for a value in a message; empty if it has none."""
    name = ""
    if isinstance(node, ast.Name):
        name = node.id
    elif isinstance(node, ast.Attribute):
        is_class = node.attr in ("__name__", "__qualname__") and ast.unparse(node.value).startswith("type(")
        name = "class" if is_class else node.attr
    elif isinstance(node, ast.Subscript):
        is_key = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        name = str(node.slice.value) if is_key and isinstance(node.slice, ast.Constant) else name_value(node.value)
    elif isinstance(node, ast.BoolOp):
        name = name_value(node.values[0])
    elif isinstance(node, ast.BinOp):
        name = name_value(node.left) or name_value(node.right)
    elif isinstance(node, ast.IfExp) and is_text(node.body) and is_text(node.orelse):
        return " or ".join(ast.unparse(each).strip("'") for each in (node.body, node.orelse))
    elif isinstance(node, ast.ListComp | ast.GeneratorExp):
        name = name_value(node.generators[0].iter)
    elif isinstance(node, ast.Call):
        name = name_result(node)
    name = name.strip("_").replace("_", " ").lower()
    return SHOWN_AS.get(name, name)


def name_result(call: ast.Call) -> str:
    """Return the name to show for a call's result: that of its argument, or that of the function without its verb."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    of = name_value(call.args[0]) if call.args else ""
    if isinstance(call.func, ast.Attribute) and function in dir(str) and not is_text(call.func.value):
        return name_value(call.func.value)  # such as text.strip()
    if function == "map":
        return name_value(call.args[1])
    if function == "spell_s":
        return "time"
    if function == "len":
        return f"number of {of}" if of else "number"
    if VERBS.match(function.strip("_")):
        return VERBS.sub("", function.strip("_"))
    return of or function.removeprefix("get")


def code(text: str) -> str:
    """Return text as a span of code in one line."""
    text = re.sub(r"\.{4,}", "...", " ".join(text.split()))
    return f"`` {text} ``" if "`" in text else f"`{text}`"
