"""Write the pages of docs/ that are made from the code, ``configuration.md`` and ``map.md``: ``make docs``."""

import ast
import itertools
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, MinLen
from pydantic.fields import FieldInfo

from holdfast.config import RunConfig, Section
from holdfast.provenance.changes import FIELD_CLASSES, classify

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROOMS = ("docs", "holdfast", "tasks", "flows", "deployments", "infra", "tests")
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".png", ".txt", ".js", ".css", ".jinja"}
# Descriptions of files that have no docstring.
SAID = {
    "README.md": "What Holdfast does, in ten minutes.",
    "CONTRIBUTING.md": "How to set up, test, write and commit.",
    "CHANGELOG.md": "What changed for users.",
    "SECURITY.md": "Who can run code, and what the authentication gives.",
    "LICENSE": "Apache 2.0.",
    "Makefile": "Every command of the project: set-up, train, test, check, bench, docs, soak.",
    "pyproject.toml": "Dependencies and extras, and the guards: layers, lint, types.",
    "constraints.txt": "Every version that the project is tested with.",
    "deployments/prefect.yaml": "All deployments, with their schedules.",
    "holdfast/FORMAT.md": "What is on disk, as a promise.",
    "holdfast/RESUME.md": "What a resume promises, and what catches a resume that is wrong.",
    "holdfast/ledger/traces/LICENSES.txt": "The sources of the traces that come with Holdfast, and their licences.",
    "holdfast/looking/report/curves.js": "The report's curves: values under the cursor, zoom, log scale, rolled-back steps.",
    "holdfast/looking/report/page.css": "The look of a report: light, dark, on a telephone and on paper.",
    "holdfast/looking/report/page.js": "What the report's scripts share: data, elements, numbers, the theme, copying.",
    "holdfast/looking/report/parallel.js": "Parallel coordinates of several runs' settings and results.",
    "holdfast/looking/report/tables.js": "The report's table of commits, page by page, and tables that can be sorted.",
    "holdfast/looking/report/vendor/uPlot.iife.min.js": "uPlot 1.6.32, as it is published: it draws the report's curves.",
    "holdfast/looking/report/vendor/uPlot.min.css": "uPlot's own styles.",
    "holdfast/recipes/chat.toml": "The settings of the recipe `chat`: 2.5 minutes on one core.",
    "holdfast/recipes/chat_template.jinja": "The chat template of Qwen2.5, with marks around the answers.",
    "holdfast/recipes/language.toml": "The settings of `make train`: about two minutes on two cores.",
    "holdfast/recipes/cards.toml": "Self-play on Kuhn poker: a few minutes on two cores.",
    "docs/adding-a-recipe.md": "Train a model of your own, step by step.",
    "docs/adding-a-store.md": "Keep runs on a storage of your own, step by step.",
    "docs/cards.md": "Train a policy for a card game by self-play, against a league of its own past.",
    "docs/chat.md": "Fine-tune a causal language model on conversations: data, templates, LoRA, your own model.",
    "docs/concepts.md": "The words of the design, and how a run works.",
    "docs/configuration.md": "Every setting; made from holdfast/config/fields.py.",
    "docs/containers.md": "Images, everything in containers on one machine, and a pool whose attempts are containers.",
    "docs/goodput.md": "Where a run's time goes, and what to expect on a recorded history of preemptions.",
    "docs/digits.md": "The recipe digits: train it, kill it, look at its confusion matrix.",
    "docs/keeping.md": "Keep, check, move and sign checkpoints.",
    "docs/kubernetes.md": "Train on the spot GPUs of a Kubernetes cluster, from an empty account to a preemption.",
    "docs/language.md": "The recipe language: samples, bf16, a compiled model, exported weights.",
    "docs/lightning.md": "Keep Lightning's Trainer: what to change, what is kept, what is refused.",
    "docs/looking.md": "Look at runs, watch them live, and compare two of them.",
    "docs/map.md": "This page; made from the modules' docstrings.",
    "docs/metrics.md": "Watch a run in TensorBoard, Weights & Biases, Trackio or MLflow, as one curve.",
    "docs/nodes.md": "Train one run on several machines: batch systems, Kubernetes, what happens when one goes.",
    "docs/operating.md": "Servers, work pools, lost machines, schedules, cancel.",
    "docs/performance.md": "What Holdfast costs, and what bounds each figure.",
    "docs/ranks.md": "Train on several ranks, and on any number of them to the same bytes.",
    "docs/report.md": "See a run, several runs or a store as one HTML page.",
    "docs/report-light.png": "Picture of a run's report: its curves.",
    "docs/report-dark.png": "Picture of a run's report in the dark theme: its attempts and its goodput.",
    "docs/report-sweep.png": "Picture of the report of a sweep.",
    "docs/report-store.png": "Picture of the index of a store.",
    "docs/storage.md": "What each storage needs: URL, credentials, rights, and how to test them.",
    "docs/attempt.png": "Picture of an attempt in Prefect's UI.",
    "docs/digits.png": "Picture of a confusion matrix in Prefect's UI.",
    "docs/form.png": "Picture of the form that starts a run.",
    "docs/summary.png": "Picture of a run's summary in Prefect's UI.",
    "docs/train.png": "Picture of a run in Prefect's UI.",
    "docs/trainer.md": "Keep a Hugging Face Trainer, or an SFTTrainer: what to change, what is kept, what is refused.",
    "docs/your-own-loop.md": "Keep a training loop that you have: several optimizers, batches of your own, any step.",
    "tests/README.md": "The map of the tests: what each folder is for, and how to run a part.",
    "tests/project": "Tests of the project itself: layers, public names, dependencies, the wheel, every page.",
    "tests/bench/peers.txt": "The packages that the benchmarks compare with.",
}

CONFIGURATION = """\
# Configuration

A configuration is a TOML file. On the command line, `--set key=value` changes any key, with the value in TOML:

```
.venv/bin/holdfast train my_model.toml --set epochs=20 --set chunk.steps=31
```

`recipe` and `run` have no default. An unknown key is an error that names the nearest known one.

The class of a key says what happens if you change it between two attempts of a run:

| class | meaning | after a change |
|---|---|---|
| identity | it changes the mathematics: part of the fingerprint | refused, unless `resume.accept_drift` names it |
| schedule | it says how long to train | the run continues |
| operational | it never changes the trained bytes | the run continues |

This page is made from the descriptions in `holdfast/config/fields.py` by `make docs`; a test compares them.
"""

MAP = """\
# Map of the repository

Every file, and what its docstring says of it. `flows` import `tasks`, and `tasks` import `holdfast`, never the other
way round; the wheel ships `holdfast/` alone. `make docs` makes this page from the docstrings; a test compares them.
"""


# ---- configuration.md


def make_configuration() -> str:
    """Return docs/configuration.md: a table of fields for each section of the configuration."""
    sections = [("The top of the file", "", RunConfig), *list_sections(RunConfig)]
    return "\n".join([CONFIGURATION, *(make_section(title, prefix, section) for title, prefix, section in sections),
                      FURTHER_CONFIGURATION])  # fmt: skip


FURTHER_CONFIGURATION = """\
## Where to read on

- [concepts.md](concepts.md) explains the words: run, chunk, attempt, fingerprint.
- [keeping.md](keeping.md) shows retention at work, [operating.md](operating.md) work pools and preemption.
- [RESUME.md](../holdfast/RESUME.md#drift) says what else, beside settings, counts as drift.
"""


def list_sections(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, type[Section]]]:
    """Yield the tables inside of a section: title, prefix of its keys, class."""
    for name, field in section.model_fields.items():
        if inner := find_section(field):
            yield f"[{prefix}{name}]", f"{prefix}{name}.", inner
            yield from list_sections(inner, f"{prefix}{name}.")


def find_section(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field holds; None for a plain value."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def make_section(title: str, prefix: str, section: type[Section]) -> str:
    fields = [(name, field) for name, field in section.model_fields.items() if not find_section(field)]
    lines = [
        f"## {title}", "", clean(section.__doc__ or ""), "",
        "| key | type | default | class | meaning |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, field in fields:
        assert field.description, f"{prefix}{name} has no description"
        kind, default, meaning = describe_type(field), describe_default(field), clean(field.description)
        lines.append(f"| `{prefix}{name}` | {kind} | {default} | {classify_field(prefix + name)} | {meaning} |")
    return "\n".join([*lines, ""])


def classify_field(name: str) -> str:
    """Return the class of a field; raise KeyError for one that `holdfast.provenance.drift` doesn't list."""
    parts = name.split(".")
    if not any(".".join(parts[:count]) in FIELD_CLASSES for count in range(1, len(parts) + 1)):
        raise KeyError(name)
    return classify(name)


def describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    return "unset" if default is None else f"`{to_toml(default)}`"


def to_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(to_toml, value))}]"
    return "{}" if value == {} else f"{value:g}" if isinstance(value, float) else str(value)


def describe_type(field: FieldInfo) -> str:
    """Return a readable form of a field's type and bounds."""
    limits = [*field.metadata]
    kind = name_type(field.annotation, limits)
    for limit in limits:
        if isinstance(limit, Ge):
            kind += f", at least {limit.ge:g}"
        elif isinstance(limit, Gt):
            kind += f", more than {limit.gt:g}"
        elif isinstance(limit, MinLen):
            kind += ", not empty"
    return kind


def name_type(annotation: Any, limits: list[Any]) -> str:
    """Return the name of a type in TOML, and append the bounds inside of it to the list."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        for each in annotation.__metadata__:
            limits += each.metadata if isinstance(each, FieldInfo) else [each]
        return name_type(arguments[0], limits)
    if origin is Literal:
        return " or ".join(f"`{to_toml(each)}`" for each in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(name_type(each, limits) for each in arguments if each is not type(None))
    if origin is tuple:
        return f"list of {name_type(arguments[0], limits)}"
    return {bool: "boolean", int: "integer", float: "number", str: "text", dict: "table"}[origin or annotation]


def clean(text: str) -> str:
    """Return text in one line, as Markdown for a cell of a table."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|").replace("<", "\\<")


# ---- map.md


def make_map() -> str:
    """Return docs/map.md: the repository's files, with the first paragraph of each docstring."""
    lines = [MAP, "## The root", ""]
    lines += [make_line(ROOT / name) for name in sorted(SAID, key=str.lower) if "/" not in name]
    for room in ROOMS:
        lines += ["", f"## {room}/", ""]
        lines += map(make_line, sorted(list_files(ROOT / room), key=lambda path: path.relative_to(ROOT).as_posix()))
    return "\n".join([*lines, ""])


def list_files(room: Path) -> Iterator[Path]:
    """Yield what the map lists of a room: files, packages, and folders of tests."""
    for path in room.rglob("*"):
        if any(part.startswith((".", "__pycache__")) for part in path.relative_to(room).parts):
            continue  # a tool's own
        if path.is_dir():
            is_package = (path / "__init__.py").exists()
            if is_package or any(path.glob("test_*.py")):
                yield path
            continue
        is_listed = path.suffix in SUFFIXES or room.name == "infra"
        if is_listed and path.name != "__init__.py" and not path.name.startswith("test_"):
            yield path


def make_line(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"- [`{name}{'/' if path.is_dir() else ''}`](../{name}): {describe(path, name)}"


def describe(path: Path, name: str) -> str:
    """Return the first paragraph of a module's docstring, or this module's description of another file."""
    if name in SAID:
        return SAID[name]
    if path.is_dir() and any(path.glob("test_*.py")):
        return f"Tests of {name.removeprefix('tests/')}/."
    path = path / "__init__.py" if path.is_dir() else path
    if path.suffix != ".py" and not path.name.endswith(".py.txt"):
        return read_comment(path, name)
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    if not docstring:
        raise KeyError(f"{name} has no docstring")
    return clean(docstring.partition("\n\n")[0]).removesuffix("::").rstrip()


def read_comment(path: Path, name: str) -> str:
    """Return the first sentence of the comment with which a file begins."""
    lines = path.read_text("utf-8").splitlines() if path.suffix not in {".md", ".png"} else []
    comment = itertools.takewhile(lambda line: line.startswith("# "), (line for line in lines if line[:2] != "#!"))
    text = " ".join(line[2:] for line in comment)
    if not text:
        raise KeyError(f"{name} is new: say in SAID what it is, or begin it with a comment")
    return clean(re.split(r"(?<=\.)\s", text)[0])


PAGES = {"configuration.md": make_configuration, "map.md": make_map}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make(), "utf-8")
