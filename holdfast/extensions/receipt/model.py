"""The files of a model that a receipt signs, in OpenSSF's form, so that OpenSSF's model signing tools verify them.

OpenSSF's statement has a list of the files, and one subject whose digest is computed over the digests of all files.
Sources: https://github.com/sigstore/model-transparency/blob/main/docs/model_signing_format.md and, for the fields of
the predicate, `Payload` in its `_signing/signing.py`; https://docs.sigstore.dev/about/bundle/.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast.errors import ConfigError
from holdfast.journal.signature import STATEMENT_TYPE

MODEL_TYPE = "https://model_signing/signature/v1.0"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
# The name to use for the file if the model is a single file.
ALONE = "."
# Names at the top of a folder that model signing ignores by default.
OF_GIT = {".git", ".gitattributes", ".github", ".gitignore"}


def state_model(name: str, files: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return the statement about a model's files that a receipt signs.

    Args:
        name: the name of the model's file or folder, which no verifier compares.
        files: the SHA-256 of each file, by its path in the folder.
        more: further fields of the predicate, which model signing ignores.
    """
    ordered = sorted(files.items(), key=lambda each: PurePosixPath(each[0]).parts)
    root = hashlib.sha256(b"".join(bytes.fromhex(sha256) for _, sha256 in ordered)).hexdigest()
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": MODEL_TYPE,
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
            "resources": [{"name": path, "algorithm": "sha256", "digest": sha256} for path, sha256 in ordered],
            **more,
        },
    }


def hash_files(model: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, by its path in the folder. A single file has the name `ALONE`.

    Raises:
        ConfigError: there is no such file or folder, a file can't be read or signed, or the folder is empty.
    """
    try:
        if stat.S_ISDIR(_check_kind(model)):
            files = {path.relative_to(model).as_posix(): _hash_file(path) for path in _walk(model)}
        else:
            files = {ALONE: _hash_file(model)}
    except OSError as error:
        raise ConfigError(f"{error.filename or model} can't be read: {error.strerror}") from None
    if not files:
        raise ConfigError(
            f"the folder {model} contains no files", hint="holdfast export writes the weights into this folder"
        )
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of its subfolders."""
    pending = [each for each in folder.iterdir() if each.name not in OF_GIT]
    while pending:
        path = pending.pop()
        if stat.S_ISDIR(_check_kind(path)):
            pending += path.iterdir()
        else:
            yield path


def _check_kind(path: Path) -> int:
    """Return the mode of a file or folder.

    Raises:
        ConfigError: the path is neither a file nor a folder, but a link, for example; or its name is not UTF-8.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path} can't be signed, because its name is not UTF-8", hint="rename the file") from None
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a link" if stat.S_ISLNK(mode) else "no file"
        raise ConfigError(
            f"{path} can't be signed, because it is {kind}", hint="put a file in its place, or name a different path"
        )
    return mode


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
