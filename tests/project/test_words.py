"""One word per thing, in names; and the word that a native reader expects, in pages, messages and docstrings."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

ROOMS = ("holdfast", "tasks", "flows", "deployments", "examples")
GALLERY = ROOT / "examples" / "gallery"  # scripts with the names that their users give
# The words for things that have another word already.
INSTEAD_OF = {"why": "reason", "checkpoint_dir": "folder", "ckpt": "checkpoint"}
# A run is its name, or the `Run` that a loop takes; a folder on the store, a training and a flow run have words of
# their own.
RUN_IS = ("str", "Annotated[str", "Run", "'Run'")
# Their fields are keys on disk or of a command's JSON, which stay as they are.
KEYS = {"holdfast/journal/records.py", "holdfast/machine/contract.py"}
# The public names that two modules may define. The list only shrinks.
DEFINED_AGAIN = {
    "Settings",  # each recipe's own model of its settings: pydantic's messages name it
    "evaluate",  # a flow, which prefect.yaml names; and the language recipe's evaluation of its model
    "main",  # the entry point of each program
    "train",  # a flow, which prefect.yaml names; and the call that takes the place of transformers' `trainer.train()`
}
# Prose that reads as translated, with the words to write. Pages, messages, docstrings and comments have none.
NOT_ENGLISH = {
    r"another (?:number of|order|result|version of|CPU model|kind of)": "a different",
    r"(?<!the )(?<!any )(?<!no )(?<!all )(?<!its )(?<!some )other (?:bytes|bits|random numbers)": "different",
    r"(?:an)?other (?:\w+ ){1,2}than": "different ... than",
    r"lies? in(?:side)?": "is in, are in",
    r"gives? no batch": "yields no batch",
    r"in vain": "forever, without effect",
    r"take (?:the|its|your) weights out": "export the weights",
    r"give a receipt": "write a receipt",
    r"greatest": "maximum, highest",
    r"least (?:number|value|length|width|size|seconds)": "minimum",
}
NOT_READ = {"CHANGELOG.md"}  # what earlier versions said


def find_files(*hidden: Path) -> list[Path]:
    """Return the files of the code, without those in a hidden folder."""
    found = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return [path for path in found if not {*hidden} & {*path.parents}]


def find_names(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield the names that code gives: each with its annotation (empty for none) and line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, ast.unparse(node.annotation) if node.annotation else "", node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation), node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, "", node.lineno
        elif isinstance(node, ast.FunctionDef):
            yield node.name, "", node.lineno


def find_definitions() -> dict[str, list[str]]:
    """Return the modules that define each public class or function at their top level, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in find_files(GALLERY):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                found[node.name].append(path.relative_to(ROOT).as_posix())
    return found


def test_one_word_per_thing() -> None:
    found = []
    for path in find_files(GALLERY):
        place = path.relative_to(ROOT).as_posix()
        for name, annotation, line in find_names(ast.parse(path.read_text("utf-8"))):
            if name in INSTEAD_OF and place not in KEYS:
                found.append(f"{place}:{line}: {name}; the word is {INSTEAD_OF[name]}")
            if name == "run" and annotation and not annotation.startswith(RUN_IS):
                found.append(f"{place}:{line}: run: {annotation}; a run is a name")
    assert not found, "\n".join(found)


def test_a_public_name_is_defined_once() -> None:
    again = {name: places for name, places in find_definitions().items() if len(set(places)) > 1}
    found = [f"{name}: {', '.join(again[name])}" for name in sorted(again.keys() - DEFINED_AGAIN)]
    found += [f"{name}: defined once; take it off DEFINED_AGAIN" for name in sorted(DEFINED_AGAIN - again.keys())]
    assert not found, "\n".join(found)


def test_prose_has_the_words_of_the_field() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("holdfast/*.md")]
    found = []
    for path in [*find_files(), *sorted(pages)]:
        place = path.relative_to(ROOT).as_posix()
        text = "" if place in NOT_READ else re.sub(r"\s+(?:# )?", " ", path.read_text("utf-8"))
        for words, instead in NOT_ENGLISH.items():
            found += [f"{place}: {each[0]}; write: {instead}" for each in re.finditer(rf"\b{words}\b", text, re.I)]
    assert not found, "\n".join(found)
