"""Texts and pictures that a recipe or a loop shows to people, in ``shown.jsonl`` beside a checkpoint's trail.

They aren't part of the state, so they don't change a content id. `read_shown` reads the texts and pictures of one
commit, and `list_shown` of a whole run. Don't trust a picture, because a recipe's code has made it: put an SVG into a
page as an image, never as markup.
"""

import base64
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.checkpoint import SHOWN
from holdfast.errors import NameMissing, RecipeError, RecordDamaged
from holdfast.journal import Commit, shown_name

if TYPE_CHECKING:
    from holdfast.journal import Journal

TEXT, SVG, PNG = "text/plain", "image/svg+xml", "image/png"
SUFFIXES = {TEXT: "txt", SVG: "svg", PNG: "png"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# The root element of an SVG must begin within this number of characters, after an XML declaration, a document type and
# comments.
SVG_WITHIN = 4096
# The largest size of one text or picture, and of all texts and pictures of one checkpoint together. They are limited
# because a server and a browser have to hold them in memory.
MAX_BYTES = 2**20
MAX_FILE_BYTES = 16 * 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shown:
    """One text or picture.

    Attributes:
        step: the step after which it was shown, counted from 1 over the whole run.
        epoch: the epoch of that step, counted from 1.
        media_type: `TEXT`, `SVG` or `PNG`.
        data: the bytes of the text or picture; UTF-8 for a text or an SVG.
    """

    step: int
    epoch: int
    name: str
    media_type: str
    data: bytes

    @property
    def file_name(self) -> str:
        """Return a name for a file with this text or picture, such as ``samples-00000480.txt``."""
        return f"{self.name}-{self.step:08d}.{SUFFIXES[self.media_type]}"

    def to_line(self) -> bytes:
        """Return the line for this text or picture in ``shown.jsonl``."""
        is_text = self.media_type != PNG
        content = {"text": self.data.decode()} if is_text else {"base64": base64.b64encode(self.data).decode()}
        known = {"step": self.step, "epoch": self.epoch, "name": self.name, "type": self.media_type}
        return (json.dumps(known | content, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_line(cls, line: bytes, file: str) -> "Shown":
        """Return the text or picture that `to_line` wrote.

        Raises:
            RecordDamaged: `to_line` hasn't written this line; the message begins with ``file``.
        """
        try:
            read = json.loads(line)
            media_type, name = read["type"], read["name"]
            data = base64.b64decode(read["base64"], validate=True) if media_type == PNG else read["text"].encode()
            if media_type not in SUFFIXES or not NAME.fullmatch(name):
                raise ValueError(name)
            return cls(int(read["step"]), int(read["epoch"]), name, media_type, data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RecordDamaged(f"{file} has a line that isn't a text or picture: {line[:40]!r}") from None


class Gallery:
    """The texts and pictures that were shown since the last checkpoint, as lines for ``shown.jsonl``."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size_bytes = 0

    def add(self, shown: Shown) -> None:
        """Add a text or picture. If the file would then exceed `MAX_FILE_BYTES`, log a warning instead."""
        line = shown.to_line()
        if self._size_bytes + len(line) > MAX_FILE_BYTES:
            log.warning(
                "%s of step %d is not stored: the texts and pictures of this chunk already have %d MiB; show fewer, or "
                "shorten the chunk",
                shown.name, shown.step, MAX_FILE_BYTES >> 20,
            )  # fmt: skip
            return
        self._lines.append(line)
        self._size_bytes += len(line)

    def put_back(self, lines: bytes) -> None:
        """Put the lines that `take` returned back, before the current lines."""
        self._lines[:0] = [lines]
        self._size_bytes += len(lines)

    def read(self) -> bytes:
        """Return the lines."""
        return b"".join(self._lines)

    def take(self) -> bytes:
        """Return the lines, and empty the gallery."""
        lines = self.read()
        self._lines, self._size_bytes = [], 0
        return lines


def to_shown(name: str, value: object, step: int, epoch: int) -> Shown:
    """Convert a value to a `Shown`: a text or a picture.

    Args:
        value: a string is a text; bytes are a picture, PNG or SVG.
        step, epoch: see `Shown`.

    Raises:
        RecipeError: the name or the value can't be shown, or the value is too large.
    """
    if not NAME.fullmatch(name):
        raise RecipeError(
            f"{name!r} can't be the name of a text or a picture",
            hint="give a name of up to 64 letters, digits and . _ -",
        )
    if isinstance(value, str):
        media_type, data = TEXT, value.encode("utf-8", "replace")
    elif isinstance(value, bytes):
        media_type, data = _find_type(name, value), value
    else:
        raise RecipeError(
            f"{name}: expected a text or a picture, found a {type(value).__name__}",
            hint="give a str for a text, or the bytes of a PNG or an SVG",
        )
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{name} has {len(data):,} bytes, too many to show", hint=f"show at most {MAX_BYTES:,} bytes")
    return Shown(step, epoch, name, media_type, data)


def _find_type(name: str, data: bytes) -> str:
    if data.startswith(PNG_SIGNATURE):
        return PNG
    try:
        if "<svg" in data.decode()[:SVG_WITHIN]:
            return SVG
    except UnicodeDecodeError:
        pass
    raise RecipeError(
        f"{name}: expected the bytes of a PNG or an SVG, found {data[:12]!r}",
        hint="to show a text, give a str: decode() the bytes",
    )


def read_shown(journal: "Journal", commit: Commit) -> list[Shown]:
    """Return the texts and pictures that a commit's steps have shown, in order; empty if none exist or all are lost.

    Raises:
        RecordDamaged: the file differs from the commit.
    """
    record = next((file for file in commit.files if file.name == SHOWN), None)
    for name in (shown_name(commit.number), f"{commit.path}/{SHOWN}") if record else ():
        try:
            data = journal.store.read(name, 0, MAX_FILE_BYTES + 1)
        except NameMissing:
            continue
        if record is None or hashlib.sha256(data).hexdigest() != record.sha256:
            raise RecordDamaged(f"{name} and commit {commit.number} contradict each other")
        return [Shown.from_line(line, name) for line in data.splitlines()]
    return []


def list_shown(journal: "Journal") -> Iterator[Shown]:
    """Yield the texts and pictures of a run's committed steps, oldest first. They are read commit by commit.

    Raises:
        RecordDamaged: a file differs from its commit.
    """
    for commit in _find_commits(journal):
        yield from read_shown(journal, commit)


def read_newest(journal: "Journal") -> list[Shown]:
    """Return the newest text or picture of each name in the newest commit that has any, sorted by name.

    Raises:
        RecordDamaged: the file differs from its commit.
    """
    for commit in reversed(_find_commits(journal)):
        if found := read_shown(journal, commit):
            return [shown for _, shown in sorted({shown.name: shown for shown in found}.items())]
    return []


def _find_commits(journal: "Journal") -> list[Commit]:
    """Return the commits with texts or pictures, oldest first. Include pruned commits, but no quarantined commits."""
    newest = journal.newest_number()  # shown/ is missing if the run was just unpacked
    numbers = {*journal.numbers("shown"), newest} - set(journal.numbers("quarantine"))
    return [commit for number in sorted(numbers) if (commit := journal.find_commit(number))]
