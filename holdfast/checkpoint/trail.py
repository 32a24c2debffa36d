"""The trail of a checkpoint: one line of JSON for each of its steps, in ``metrics.jsonl``.

A copy of a commit's trail in ``metrics/`` remains when the checkpoint is deleted.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.metadata import METRICS
from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal import Commit, FileRecord, metrics_name
from holdfast.store import Store

if TYPE_CHECKING:
    from holdfast.journal import Journal

# Longer lines are refused, to bound memory. Holdfast's own lines are shorter; the longest are those of proofs,
# which name each tensor.
MAX_LINE_BYTES = 2**26

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Trail:
    """The facts of a trail that show whether another trail continues it.

    Attributes:
        step: the last step.
        first, last: the lines of the first and the last step; None if the trail is lost.
        losses: the loss of each step as the file has it: a string if the loss isn't finite.
        file: the record of the file that was read; None if the trail is lost.
    """

    step: int
    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    file: FileRecord | None = None
    losses: tuple[Any, ...] = ()


def read_trail(folder: Store, path: str) -> Trail:
    """Read the trail of a checkpoint.

    Raises:
        NameMissing: the checkpoint has no trail.
        RecordDamaged: a line is not a JSON object with a step, or a step between two lines is missing.
    """
    name = f"{path}/{METRICS}"
    digest, size_bytes = hashlib.sha256(), 0

    def pieces() -> Iterator[bytes]:
        nonlocal size_bytes
        for piece in folder.pieces(name):
            digest.update(piece)
            size_bytes += len(piece)
            yield piece

    first = last = None
    losses: list[Any] = []
    for read in _parse_lines(pieces(), name):
        if last is not None and read["step"] != last["step"] + 1:
            raise RecordDamaged(f"{name} has step {read['step']} after step {last['step']}")
        first, last = first or read, read
        losses.append(read.get("loss"))
    file = FileRecord(name=METRICS, size_bytes=size_bytes, sha256=digest.hexdigest())
    return Trail(last["step"] if last else 0, first, last, file, tuple(losses))


def name_trails(commit: Commit) -> tuple[str, str]:
    """Return the names of a commit's two trail files: the copy in ``metrics/``, and the checkpoint's own file."""
    return metrics_name(commit.number), f"{commit.path}/{METRICS}"


def read_commit_lines(folder: Store, commit: Commit) -> Lines:
    """Return the lines of a commit's trail; an empty list if both of its trail files are lost.

    Args:
        folder: the run's folder.

    Raises:
        RecordDamaged: a line is not a JSON object with a step.
    """
    return _read_first(folder, name_trails(commit))


def read_checkpoint_lines(folder: Store, path: str) -> Lines:
    """Return the lines of the trail in a checkpoint's folder; an empty list if the trail is lost.

    Raises:
        RecordDamaged: a line is not a JSON object with a step.
    """
    return _read_first(folder, [f"{path}/{METRICS}"])


def read_trail_before(journal: "Journal", commit: Commit, step: int, count: int) -> Lines:
    """Return the lines of a commit's trail, preceded by earlier commits' lines.

    The lines go back to ``count`` steps before ``step``, or to the run's first step.

    Raises:
        RecordDamaged: a line is not a JSON object with a step.
    """
    lines: Lines = [*read_commit_lines(journal.store, commit)]
    before: Commit | None = commit
    while before is not None and (not lines or step - int(lines[0]["step"]) < count):
        before = journal.read_parent(before)
        lines = [*read_commit_lines(journal.store, before), *lines] if before else lines
    return lines


def _read_first(folder: Store, names: Iterable[str]) -> Lines:
    for name in names:
        with contextlib.suppress(NameMissing):
            return [*_parse_lines(folder.pieces(name), name)]
    return []


def read_known_trail(folder: Store, path: str, step: int) -> Trail:
    """Read the trail of a checkpoint that ends with ``step``; return ``Trail(step)`` if the trail is unusable."""
    try:
        trail = read_trail(folder, path)
    except (NameMissing, RecordDamaged):
        return Trail(step)
    return trail if trail.step == step else Trail(step)


def find_break(parent: Trail, child: Trail) -> str:
    """Return why a checkpoint can't have been trained from its parent; empty if its trail continues the parent's trail.

    Args:
        parent: the trail of the parent; ``Trail(0)`` if the checkpoint is the run's first.
        child: the trail of the checkpoint, which has the steps after the parent's.
    """
    if child.first is None:
        return "its trail has no step"
    if child.first["step"] != parent.step + 1:
        return f"its trail begins with step {child.first['step']} and not with step {parent.step + 1}"
    return ""


def split_lines(pieces: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Yield the lines of a trail from pieces of its bytes.

    Args:
        name: the file's name, for the message.

    Raises:
        RecordDamaged: a line is longer than any line that Holdfast writes.
    """
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > MAX_LINE_BYTES:
            raise RecordDamaged(f"{name} has a line of more than {MAX_LINE_BYTES} bytes")
    if rest:
        yield rest


def _parse_lines(pieces: Iterator[bytes], name: str) -> Iterator[dict[str, Any]]:
    return (_parse(line, name) for line in split_lines(pieces, name))


def _parse(line: bytes, name: str) -> dict[str, Any]:
    try:
        read = json.loads(line)
        if type(read["step"]) is int:
            return dict(read)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise RecordDamaged(f"{name} has a line that isn't a step's metrics: {line[:40]!r}")
