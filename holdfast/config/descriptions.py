"""The descriptions of fields: the docstrings under them, which editors show, too."""

import ast
import functools
import inspect
import textwrap
from itertools import pairwise

from pydantic import BaseModel


@functools.cache
def describe_fields(section: type[BaseModel]) -> dict[str, str]:
    """Return the description of each field that a class itself declares, in one line; empty if its source is missing.

    pydantic's own ``use_attribute_docstrings`` would read the source of every class at its definition, and importing
    the fields would take 70 ms instead of 25.
    """
    try:
        source = inspect.getsource(section)
    except (OSError, TypeError):
        return {}
    (node,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, text in pairwise(node.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found
