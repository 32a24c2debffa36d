"""Make docs/api.md, the reference of the public names, from their signatures and docstrings. Nothing is imported."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import griffe

from tests.support.public import PUBLIC, list_names

ROOT = Path(__file__).parents[2]
# Modules of pages that are examples to copy, not promises; and the errors, which have a page of their own.
NOT_LISTED = ("holdfast.recipes.", "holdfast.errors.")
# Pages that describe a name in full.
ELSEWHERE = {
    "holdfast.RunConfig": "[configuration.md](configuration.md) lists its fields, the settings.",
    "holdfast.Commit": "[FORMAT.md](../holdfast/FORMAT.md#a-commit) describes its fields.",
    "holdfast.journal.Commit": "[FORMAT.md](../holdfast/FORMAT.md#a-commit) describes its fields.",
    "holdfast.ConfigDrift": "[errors.md](errors.md#errors) lists every error.",
    "holdfast.HoldfastError": "[errors.md](errors.md#errors) lists every error.",
}
LONGEST_LINE = 100

HEAD = """\
# The public names

You can import these names. Only a higher major version (below 1.0: a higher minor version) may remove one of them or
change its behaviour. Every other name may change in any release. The errors, all in `holdfast.errors`, are listed in
[errors.md](errors.md#errors).

`make docs` generates this page from the signatures and docstrings; a test compares them.
"""
FURTHER = """\
## Where to read on

- [adding-a-recipe.md](adding-a-recipe.md), [your-own-loop.md](your-own-loop.md), [trainer.md](trainer.md) and
  [lightning.md](lightning.md) show examples with these names.
- [adding-a-store.md](adding-a-store.md) and [metrics.md](metrics.md) show how to extend Holdfast.
- [commands.md](commands.md) describes the command line.
"""


def make_api() -> str:
    """Return docs/api.md: a section for each public module, and in it each public name."""
    lines = [*HEAD.splitlines(), ""]
    for module, names in find_public().items():
        lines += [f"## `{module}`", ""]
        for name in names:
            lines += [f"### {name}", "", *describe_name(module, name)]
    return "\n".join([*lines, FURTHER])


@functools.cache
def load() -> griffe.Module:
    """Return the package as griffe reads it from its source."""
    package = griffe.load("holdfast", search_paths=[ROOT], allow_inspection=False, docstring_parser="google")
    assert isinstance(package, griffe.Module)
    return package


@functools.cache
def find_public() -> Mapping[str, Sequence[str]]:
    """Return the public names by their modules, without the modules that have a page of their own."""
    listed = [module for module in PUBLIC if not f"{module}.".startswith(NOT_LISTED)]
    return without_repetitions({module: list_names(module) for module in listed})


def without_repetitions(public: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the names without those that a module before has, too."""
    seen: set[str] = set()
    kept: dict[str, list[str]] = {}
    for module, names in public.items():
        new = {name: find(module, name).path for name in names}
        kept[module] = [name for name, path in new.items() if path not in seen]
        seen |= set(new.values())
    return {module: names for module, names in kept.items() if names}


def find(module: str, name: str) -> griffe.Object:
    """Return what a public name stands for, wherever it is defined."""
    found = load()[f"{module}.{name}".removeprefix("holdfast").removeprefix(".")]
    return found.final_target if isinstance(found, griffe.Alias) else found


def describe_name(module: str, name: str) -> Iterator[str]:
    """Yield the lines of a public name: its signature, its docstring, and the public methods of a class."""
    found = find(module, name)
    if isinstance(found, griffe.Function):
        yield from [*fence(spell_call(f"{module}.{name}", found)), *describe_docstring(found)]
    elif isinstance(found, griffe.Class):
        yield from [*fence(spell_class(f"{module}.{name}", found)), *describe_docstring(found)]
        if elsewhere := ELSEWHERE.get(f"{module}.{name}"):
            yield from [elsewhere, ""]
        else:
            yield from describe_members(name, found)
    else:
        assert isinstance(found, griffe.Attribute)
        value = str(found.value).replace(" ** ", "**").replace("'", '"')
        yield from [*fence(f"{module}.{name} = {value}"), *describe_docstring(found)]


def describe_members(name: str, owner: griffe.Class) -> Iterator[str]:
    """Yield the lines of a class's public properties and methods, in the order of the source."""
    for member in owner.members.values():
        if member.name.startswith("_") or not isinstance(member, griffe.Function | griffe.Attribute):
            continue
        if not member.docstring or (isinstance(member, griffe.Attribute) and "property" not in member.labels):
            continue
        yield from [f"#### {name}.{member.name}", ""]
        if isinstance(member, griffe.Function):
            yield from fence(spell_call(f"{name}.{member.name}", member))
        yield from describe_docstring(member)


def spell_class(name: str, found: griffe.Class) -> str:
    """Return a class with its bases; of a dataclass the call that makes one."""
    if "dataclass" in found.labels and isinstance(init := found.members.get("__init__"), griffe.Function):
        return f"class {spell_call(name, init).removesuffix(' -> None')}"
    bases = [str(base) for base in found.bases if str(base) not in ("ABC", "Protocol")]
    return f"class {name}({', '.join(bases)})" if bases else f"class {name}"


def spell_call(name: str, function: griffe.Function) -> str:
    """Return a function's signature; one parameter a line if it is long."""
    text = re.sub(r"^([^(]*\()(?:self|cls)(?:, )?", r"\1", function.signature(name=name))
    if len(text) <= LONGEST_LINE:
        return text
    shown = [each for each in function.parameters if each.name not in ("self", "cls")]
    lines, before = [], None
    for each in shown:
        kind = each.kind
        if kind is griffe.ParameterKind.keyword_only and before not in (kind, griffe.ParameterKind.var_positional):
            lines.append("    *,")
        lines.append(f"    {spell_parameter(each)},")
        before = kind
    return "\n".join([f"{name}(", *lines, f") -> {function.returns}"])


def spell_parameter(parameter: griffe.Parameter) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    text = f"{stars.get(parameter.kind, '')}{parameter.name}"
    if parameter.annotation is not None:
        text += f": {parameter.annotation}"
    has_default = parameter.default is not None and parameter.kind not in stars
    return f"{text} = {parameter.default}" if has_default else text


def describe_docstring(found: griffe.Object) -> Iterator[str]:
    """Yield the lines of a docstring: its text, then a list for each of its sections."""
    if found.docstring is None:
        return
    for section in found.docstring.parse("google", warnings=False):
        if isinstance(section, griffe.DocstringSectionText):
            yield from [*spell_text(section.value), ""]
        elif isinstance(section, griffe.DocstringSectionRaises):
            yield from ["Raises:", "", *(spell_entry(str(each.annotation), each) for each in section.value), ""]
        elif isinstance(section, griffe.DocstringSectionParameters | griffe.DocstringSectionAttributes):
            title = "Attributes:" if isinstance(section, griffe.DocstringSectionAttributes) else "Arguments:"
            yield from [title, "", *(spell_entry(each.name, each) for each in section.value), ""]


def spell_entry(name: str, entry: griffe.DocstringElement) -> str:
    """Return an item of a list. Of ``a, b: text`` griffe takes ``b`` for the annotation of an attribute ``a,``."""
    name = f"{name} {entry.annotation}" if name.endswith(",") else name
    text = " ".join(spell_text(entry.description))
    return f"- {', '.join(f'`{each.strip()}`' for each in name.split(','))}: {text}"


def spell_text(text: str) -> list[str]:
    """Return a docstring's lines as Markdown: code in single backticks, and no HTML outside of code."""
    text = re.sub(r"(?m)^(.*)::$", r"\1:", text).replace("``\\ s", "``s")
    lines = text.replace("``", "`").splitlines()
    return [line if line.startswith("    ") else escape(line) for line in lines]


def escape(text: str) -> str:
    """Return text in which nothing outside of code is HTML."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def fence(text: str) -> list[str]:
    return ["```python", *text.splitlines(), "```", ""]
