"""The public names with their signatures, read from the sources: `python -m tests.support.public` writes the table.

Nothing is imported, so extras needn't be installed, and every Python spells a signature alike.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

TABLE = Path(__file__).parents[1] / "project" / "public.txt"
# The modules that users import from, each with its public names; "*" for all that it exports, or all of the errors.
PUBLIC: dict[str, tuple[str, ...]] = {
    "holdfast": ("*",),
    "holdfast.adapters.lightning": ("fit",),
    "holdfast.adapters.torchtitan": ("train",),
    "holdfast.adapters.transformers": ("train",),
    "holdfast.attempt": ("AttemptView", "CheckpointVerdict", "Observer", "live"),
    "holdfast.config": ("Section",),
    "holdfast.errors": ("*",),
    "holdfast.extending": ("Command", "Extension", "read_table"),
    "holdfast.looking.sinks": ("Facts", "Point", "Sink"),
    "holdfast.recipes.digits": ("Reader", "digits"),
    "holdfast.recipes.language": ("Decoder", "language"),
    "holdfast.schedule": ("Name", "Schedule"),
    "holdfast.store": ("*",),
    "holdfast.testing": ("*",),
    "holdfast.testing.arrays": ("array_ranks",),
    "holdfast.testing.faults": ("fault", "flip"),
    "holdfast.testing.stores": ("StoreTests",),
}

# Members without an underscore that are Holdfast's own all the same.
NOT_PROMISED = {
    "AttemptView.read_beats", "Facts.read", "Recipe.has_own_loop", "RunConfig.attached",
    "RunConfig.next_stop", "RunConfig.placed", "RunConfig.with_ranks", "RunGone.of",
}  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parse(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text("utf-8"))


def list_names(module: str) -> list[str]:
    """Return a module's public names."""
    names = PUBLIC[module]
    if names != ("*",):
        return [*names]
    for node in parse(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return sorted(
        node.name for node in parse(module).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def find(module: str, name: str) -> ast.stmt:
    """Return the statement that defines a name, in the module itself or where it imports the name from.

    Raises:
        LookupError: neither has it.
    """
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
        if isinstance(node, ast.ImportFrom) and any(name == (each.asname or each.name) for each in node.names):
            return find(str(node.module), next(each.name for each in node.names if name == (each.asname or each.name)))
    raise LookupError(f"{module} has no {name}")


def spell(name: str, node: ast.stmt) -> Iterator[str]:
    """Yield the lines of a name's promise: a signature, or a class's bases, fields and public methods."""
    if isinstance(node, Function):
        yield spell_function(name, node)
    elif isinstance(node, ast.ClassDef):
        yield f"class {name}({', '.join(ast.unparse(base) for base in node.bases)})"
        for each in node.body:
            if isinstance(each, Function) and is_promised(name, each.name):
                yield spell_function(f"{name}.{each.name}", each)
            elif isinstance(each, ast.AnnAssign) and is_promised(name, ast.unparse(each.target)):
                default = "" if each.value is None else " = ..."
                yield f"{name}.{ast.unparse(each.target)}: {ast.unparse(each.annotation)}{default}"
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        yield f"{name} = {ast.unparse(node.value)}" if node.value else name


def spell_function(name: str, node: Function) -> str:
    result = ast.unparse(node.returns) if node.returns else ""
    if any(ast.unparse(each) in ("property", "functools.cached_property") for each in node.decorator_list):
        return f"{name}: {result}"
    return f"{name}({ast.unparse(node.args)})" + (f" -> {result}" if result else "")


def is_promised(owner: str, name: str) -> bool:
    """Return whether a class promises a member: no private one, and no single test of a suite of tests."""
    return not re.match(r"_|test_|model_config$", name) and f"{owner}.{name}" not in NOT_PROMISED


def make_table() -> str:
    """Return the public names, a module after the other; of one that several modules have, the promise stands once."""
    lines: list[str] = []
    listed: dict[ast.stmt, str] = {}
    for module in PUBLIC:
        lines += ["", f"[{module}]"]
        for name in list_names(module):
            node = find(module, name)
            lines += [f"{name}: see {listed[node]}.{name}"] if node in listed else spell(name, node)
            listed.setdefault(node, module)
    return "\n".join([*lines[1:], ""])


if __name__ == "__main__":
    TABLE.write_text(make_table(), "utf-8")
