"""The code that a run is trained with, hashed so that comments and layout between the lines don't count."""

import hashlib
import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path


def hash_sources(modules: Iterable[str]) -> dict[str, str]:
    """SHA-256, by module, of its code as `strip_source` leaves it: the same on every machine, in every checkout.

    A package stands for its ``__init__.py`` alone. A module that isn't imported, or has no ``.py`` file, is left out.
    """
    files = {module: getattr(sys.modules.get(module), "__file__", None) or "" for module in sorted(set(modules))}
    return {
        module: hash_source(Path(file).read_bytes())
        for module, file in files.items()
        if file.endswith(".py") and Path(file).is_file()
    }


def hash_source(data: bytes) -> str:
    """SHA-256 of a source file's code; of its bytes where that is no Python."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.TextIOWrapper(io.BytesIO(data), encoding).read()  # every line end becomes \n
        return hashlib.sha256(strip_source(text).encode()).hexdigest()
    except (SyntaxError, UnicodeError, tokenize.TokenError):
        return hashlib.sha256(data).hexdigest()


def strip_source(text: str) -> str:
    """Python source without comments, blank lines and trailing whitespace; what is in a string stays as it is.

    Args:
        text: with ``\\n`` as line end.

    Raises:
        SyntaxError, tokenize.TokenError: it is no Python.
    """
    rows = text.split("\n")
    in_string = _cut_comments(rows)
    kept: list[str] = []
    for number, row in enumerate(rows, 1):
        if number in in_string:
            kept.append(row)
        # A blank line after a backslash ends the statement: without it the next line would be part of it.
        elif row.strip() or (kept and kept[-1].endswith("\\")):
            kept.append(row.rstrip())
    return "\n".join(kept)


def _cut_comments(rows: list[str]) -> set[int]:
    """The rows lose their comments; the numbers of those whose end lies in a string are returned."""
    in_string: set[int] = set()
    open_strings: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO("\n".join([*rows, ""])).readline):
        kind, first, last = tokenize.tok_name[token.type], token.start[0], token.end[0]
        # A string without an end. (Before Python 3.12 some letters of identifiers are error tokens too.)
        if kind == "ERRORTOKEN" and {"'", '"'} & set(token.string):
            raise tokenize.TokenError(f"{token.string!r} has no end", token.start)
        if kind == "STRING":
            in_string.update(range(first, last))
        # Before Python 3.12 an f-string is one token, and a # in it no comment: so it is taken as a whole everywhere.
        elif kind.endswith("STRING_START"):
            open_strings.append(first)
        elif kind.endswith("STRING_END"):
            in_string.update(range(open_strings.pop(), last))
        elif kind == "COMMENT" and not open_strings:
            rows[first - 1] = rows[first - 1][: token.start[1]]
    return in_string
