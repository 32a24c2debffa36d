"""The lines of the user's code that change torch's settings."""

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.provenance.ownership import is_own_file

# Other functions and attributes that change a setting, by the last part of the setting's name.
ALSO = {
    "use_deterministic_algorithms": ("set_deterministic_debug_mode",),
    "fp32_precision": ("allow_tf32", "set_float32_matmul_precision"),
    "set_default_dtype": ("set_default_tensor_type",),
}


def find_setter(names: Sequence[str]) -> str:
    """Return ``file:line: `` of the first line of the user's modules that changes one of torch's settings.

    Args:
        names: the settings' names in torch's documentation, such as ``torch.backends.cudnn.benchmark``.

    Returns: an empty text if no line is found, for example because a library changes the setting.
    """
    last = [name.rpartition(".")[2] for name in names]
    wanted = {*last, *(other for name in last for other in ALSO.get(name, ()))}
    files = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
    for file in sorted(filter(is_own_file, files)):
        for line in _list_lines(file, wanted):
            return f"{file}:{line}: "
    return ""


def _list_lines(file: str, wanted: set[str]) -> Iterator[int]:
    try:
        tree = ast.parse(Path(file).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [each.attr for each in targets if isinstance(each, ast.Attribute) and _is_torchs(each)]
        elif isinstance(node, ast.Call):
            found = [getattr(node.func, "attr", getattr(node.func, "id", ""))]
        else:
            continue
        if wanted.intersection(found):
            yield node.lineno


def _is_torchs(target: ast.Attribute) -> bool:
    """Return whether an attribute belongs to a module of torch: ``cudnn.benchmark``, but not ``self.benchmark``."""
    return ast.unparse(target.value).rpartition(".")[2] in ("cudnn", "matmul", "mkldnn", "conv", "rnn", "backends")
