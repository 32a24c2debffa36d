"""Write the pages of docs/ that are made from the code: ``make docs``. configuration.md and rooms.md are made here."""

import ast
import functools
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import grimp
from annotated_types import Ge, Gt, MinLen
from pydantic.fields import FieldInfo

from holdfast.config import RunConfig, Section
from holdfast.config.descriptions import describe_fields
from holdfast.provenance.changes import FIELD_CLASSES, classify
from tests.support import reference
from tests.support.api import escape, make_api
from tests.support.converted import make_convert
from tests.support.gallery import make_gallery
from tests.support.struck_records import FORMAT, fill_format

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ENGINE = ROOT / "holdfast"
# Rooms that are no packages.
SAID = {
    "deployments": "`make up`, `make down`, and the deployments, automations and work pools of a Prefect server.",
    "examples": "Recipes that are trained and tested here, and aren't in the wheel: the gallery, cards and chat.",
    "flows": "Prefect's flows: train, attempt, audit, evaluate, prune and sweep.",
    "infra": "Images, Kubernetes, Terraform, the site of the pages, and the checks of their files.",
    "tasks": "What Prefect adds to the engine: chunk tasks, hooks, artifacts, heartbeats.",
    "tests": "See [tests/README.md](../tests/README.md).",
}

CONFIGURATION = """\
# Configuration

A configuration is a TOML file. On the command line, `--set key=value` changes any key, with the value in TOML:

```
.venv/bin/holdfast train my_model.toml --set epochs=20 --set chunk.steps=31
```

You must set `recipe` and `run`; all other keys have defaults. An unknown key is an error that names the nearest
known key.

The class of a key decides what happens if you change it between two attempts of a run:

| class | meaning | after a change |
|---|---|---|
| identity | changes the mathematics; part of the fingerprint | refused, unless `resume.accept_drift` names the key |
| schedule | how long to train | the run continues |
| operational | never changes the trained bytes | the run continues |

`make docs` generates this page from the docstrings of the fields in `holdfast/config/fields.py`; a test compares them.
"""

ROOMS = """\
# The rooms

Each folder of the code ("room") has one purpose. A room imports only rooms below it on this page: `flows` import
`tasks`, and `tasks` import `holdfast`. The wheel contains `holdfast/` alone. `make docs` generates this page from the
packages' docstrings and imports; `make map` prints every file and inner room with the first line of its docstring.
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
- [keeping.md](keeping.md) shows retention; [operating.md](operating.md) describes work pools and preemption.
- [RESUME.md](../holdfast/RESUME.md#drift) lists what counts as drift besides settings.
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
    described = describe_fields(section)
    lines = [
        f"## {title}", "", clean(section.__doc__ or ""), "",
        "| key | type | default | class | meaning |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, field in fields:
        kind, default, meaning = describe_type(field), describe_default(field), clean(described[name])
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
    """Return text in one line, as Markdown for a cell of a table, with a link to each page that it names."""
    text = escape(" ".join(text.split()).replace("``", "`").replace("|", "\\|"))
    return re.sub(r"holdfast docs ([\w-]+)", link_page, text)


def link_page(named: re.Match[str]) -> str:
    """Return a link from a page in docs/ to the page that `holdfast docs PAGE` shows."""
    folder = "" if (DOCS / f"{named[1]}.md").exists() else "../holdfast/"
    return f"[{named[1]}.md]({folder}{named[1]}.md)"


# ---- rooms.md


def make_rooms() -> str:
    """Return docs/rooms.md: a line for each room."""
    engine = sorted(ENGINE.glob("*/__init__.py"))
    top = [f"- [`{name}/`](../{name}): {SAID[name]}" for name in ("deployments", "flows", "tasks")]
    lines = [ROOMS, *top, "- [`holdfast/`](../holdfast): the engine, in these rooms:"]
    lines += [make_line(ENGINE / room) for room in order_rooms([path.parent.name for path in engine])]
    lines += [f"- [`{name}/`](../{name}): {SAID[name]}" for name in ("examples", "infra", "tests")]
    return "\n".join([*lines, "", *FURTHER_ROOMS.splitlines(), ""])


FURTHER_ROOMS = """\
`holdfast/errors.py` defines every error with its exit code; `holdfast/terminal/command.py` contains the code that
all commands share.

[CONTRIBUTING.md](../CONTRIBUTING.md#add-something) lists the files to change for a new store, sink, reason or
setting.
"""


def order_rooms(rooms: list[str]) -> list[str]:
    """Return the engine's rooms from the top to the bottom: each before the rooms that it imports."""
    graph = grimp.build_graph("holdfast")
    for room in rooms:
        graph.squash_module(f"holdfast.{room}")

    @functools.cache
    def floor(room: str) -> int:
        imported = graph.find_modules_directly_imported_by(f"holdfast.{room}")
        below = {name.removeprefix("holdfast.") for name in imported} - {room}
        return 1 + max((floor(each) for each in below if each in rooms), default=0)

    return sorted(rooms, key=lambda room: (-floor(room), room))


def make_line(package: Path) -> str:
    name = package.relative_to(ROOT).as_posix()
    return f"    - [`{package.name}/`](../{name}): {describe(package / '__init__.py')}"


def describe(path: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    if not docstring:
        raise KeyError(f"{path} has no docstring")
    return clean(docstring.partition("\n\n")[0]).removesuffix("::").rstrip()


def print_map() -> None:
    """Print every Python file of the code, with its docstring's first paragraph."""
    for room in ("holdfast", "tasks", "flows", "deployments", "examples", "infra", "tests"):
        for path in sorted((ROOT / room).rglob("*.py")):
            print(f"{path.relative_to(ROOT)}: {describe(path)}")


PAGES = {
    "api.md": make_api,
    "commands.md": reference.make_commands,
    "configuration.md": make_configuration,
    "convert.md": make_convert,
    "environment.md": reference.make_environment,
    "errors.md": reference.make_errors,
    "gallery.md": make_gallery,
    "messages.md": reference.make_messages,
    "rooms.md": make_rooms,
}

if __name__ == "__main__":
    if sys.argv[1:] == ["map"]:
        print_map()
    else:
        for page, make in PAGES.items():
            (DOCS / page).write_text(make(), "utf-8")
        FORMAT.write_text(fill_format(FORMAT.read_text("utf-8")), "utf-8")
