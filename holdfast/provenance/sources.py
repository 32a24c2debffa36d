"""Hashes of the code with which a run is trained. Comments, blank lines and trailing whitespace don't count."""

import hashlib
import io
import os
import tokenize
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from holdfast.errors import RecipeError
from holdfast.provenance.imports import find_file, read_module


def hash_sources(names: Iterable[str], folder: Path = Path()) -> dict[str, str]:
    """Return the SHA-256 of each source's code, by name. Hashes are the same on every machine and in every checkout.

    In Python files, comments and blank lines don't count. In other files (an extension, for example) every byte counts.
    If a module isn't loaded, the file that an import would load is hashed. For a package, only ``__init__.py`` is
    hashed. Modules without a file are left out.

    Args:
        folder: the folder of the recipe's module, to which paths are relative.
    """
    found = {name: read_source(name, folder) for name in sorted(set(names)) if name}
    return {
        name: hash_source(each[0]) if each[1] else hashlib.sha256(each[0]).hexdigest()
        for name, each in found.items()
        if each is not None
    }


def read_source(name: str, folder: Path) -> tuple[bytes, bool] | None:
    """Return a recorded source's bytes, and whether it is Python; None if the module or file no longer exists.

    A file outside of the recipe's folder isn't read, because anyone who can write to the store can write its name.

    Args:
        folder: the folder of the recipe's module, to which paths are relative.
    """
    if all(part.isidentifier() for part in name.split(".")) and (data := read_module(name)) is not None:
        return data, find_file(name).endswith(".py")
    path = find_inside(name, folder)
    return (path.read_bytes(), path.suffix == ".py") if path is not None else None


def find_inside(name: str, folder: Path) -> Path | None:
    """Return the file of a recorded name in a folder; None if there is none, or the name leads out of the folder."""
    path = Path(os.path.realpath(folder / name))
    return path if path.is_relative_to(os.path.realpath(folder)) and path.is_file() else None


def find_listed(sources: "Iterable[str | PathLike[str]]", folder: Path) -> tuple[list[str], dict[str, Path]]:
    """Return the modules that a recipe lists as its sources, and the files by name. A folder stands for its files.

    Args:
        folder: the folder of the recipe's module, to which paths are relative.

    Raises:
        RecipeError: a source is neither a module nor a file.
    """
    modules: list[str] = []
    files: dict[str, Path] = {}
    for source in sources:
        path = folder / source
        is_path = not isinstance(source, str) or "/" in source
        if not is_path and find_file(str(source)):
            modules.append(str(source))
        elif path.is_dir():
            inside = (each for each in sorted(path.rglob("*")) if each.is_file() and not _is_hidden(each, path))
            files |= {_name(each, folder): each for each in inside}
        elif path.is_file():
            files[_name(path, folder)] = path
        else:
            what = "no file" if is_path else "no module and no file"
            raise RecipeError(
                f"the recipe's sources: there is {what} {str(source)!r}",
                hint=f"a path is relative to the folder of the recipe's module, {folder}",
            )
    return modules, files


def _name(path: Path, folder: Path) -> str:
    """Return a file's path relative to the recipe's folder; for a file elsewhere, the last two parts of its path."""
    inner = path.resolve()
    if inner.is_relative_to(folder):
        return inner.relative_to(folder).as_posix()
    return "/".join(inner.parts[-2:])


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts)


def hash_source(data: bytes) -> str:
    """Return the SHA-256 of a Python file's code; if the file is not valid Python, of the file's bytes."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.TextIOWrapper(io.BytesIO(data), encoding).read()  # the wrapper converts every line end to \n
        return hashlib.sha256(strip_source(text).encode()).hexdigest()
    except (SyntaxError, UnicodeError, tokenize.TokenError):
        return hashlib.sha256(data).hexdigest()


def strip_source(text: str) -> str:
    """Return Python source without comments, blank lines and trailing whitespace. Strings stay unchanged.

    Args:
        text: the source, with ``\\n`` as line end.

    Raises:
        SyntaxError, tokenize.TokenError: the text is not valid Python.
    """
    rows = text.split("\n")
    in_string = _cut_comments(rows)
    kept: list[str] = []
    for number, row in enumerate(rows, 1):
        if number in in_string:
            kept.append(row)
        # Keep a blank line after a backslash, because the blank line ends the statement. If the blank line were
        # removed, the next line would continue the statement.
        elif row.strip() or (kept and kept[-1].endswith("\\")):
            kept.append(row.rstrip())
    return "\n".join(kept)


def _cut_comments(rows: list[str]) -> set[int]:
    """Remove the comments from the rows in place. Return the numbers of the rows that end inside a string."""
    in_string: set[int] = set()
    open_strings: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO("\n".join([*rows, ""])).readline):
        kind, first, last = tokenize.tok_name[token.type], token.start[0], token.end[0]
        # This is an unterminated string. (Before Python 3.12 some letters of identifiers are error tokens, too.)
        if kind == "ERRORTOKEN" and {"'", '"'} & set(token.string):
            raise tokenize.TokenError(f"{token.string!r} has no end", token.start)
        if kind == "STRING":
            in_string.update(range(first, last))
        # Before Python 3.12 an f-string is one token, in which # doesn't start a comment. Treat f-strings of newer
        # versions in the same way.
        elif kind.endswith("STRING_START"):
            open_strings.append(first)
        elif kind.endswith("STRING_END"):
            in_string.update(range(open_strings.pop(), last))
        elif kind == "COMMENT" and not open_strings:
            rows[first - 1] = rows[first - 1][: token.start[1]]
    return in_string
