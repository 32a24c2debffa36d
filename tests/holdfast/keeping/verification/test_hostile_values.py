"""Hostile values in every field of every record: each command ends with a documented exit code and one clear line."""

import contextlib
import hashlib
import io
import itertools
import json
import shutil
import sys
import traceback
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unicodedata import bidirectional

import pytest

from holdfast.attempt import Line
from holdfast.cli import app, run_app
from holdfast.config import Retention, parse_config
from holdfast.errors import ConfigError, RecordDamaged
from holdfast.journal import AttemptRecord, Journal
from holdfast.journal.endings import Ending
from holdfast.journal.records import MOST_DEPTH, MOST_VALUES
from holdfast.keeping.retention import prune_by_policy
from holdfast.ledger.goodput import make_ledger
from holdfast.ledger.history import read_losses
from holdfast.store.local import LocalStore
from holdfast.terminal import printable
from tests.support.makers import STEPS_PER_EPOCH, head_step, make_line, train
from tests.support.verified import check

VALUES: list[Any] = [
    "", "\x1b]0;owned\x07", "a\0\ud800\u202e", "../../etc", "9999-99-99T99:99:99Z", "x" * 10_000, -1, 0, 10**30, 1e308,
    None, [], {}, ["\x1b[31m"], {"\x1b[31m": {"\0": "\ud800"}},
]  # fmt: skip
COMMANDS = (
    ("runs", "{store}"), ("runs", "{store}", "--json"), ("show", "{run}"), ("show", "{run}", "--json"),
    ("verify", "{run}", "--all", "--deep"), ("verify", "{run}", "--json"), ("diff", "{run}"),
    ("diff", "{run}", "--json"),
    ("plan", "{run}"), ("plan", "{run}", "--json"), ("prune", "{run}", "--dry-run"), ("pack", "{run}", "{out}"),
    ("goodput", "{run}"), ("report", "{run}", "-o", "{page}"), ("report", "{run}", "{run}", "-o", "{page}"),
    ("report", "{store}", "-o", "{page}"), ("compare", "{run}", "{run}"),
)  # fmt: skip
RECORDS = (
    "run.json", "config.snapshot.json", "configs/*.json", "attempts/00000001.json", "endings/00000001.json",
    "commits/00000005.json", "commits/00000004.json", "quarantine/*.json", "pruned/*.json", "pins/*.json",
    "prunes/*.json", "latest.json", "epoch-0005/metadata.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with a run that has every kind of record."""
    folder = tmp_path_factory.mktemp("made")
    line = make_line(LocalStore(str(folder)))
    for _ in range(5):
        train(line)
    line.journal.pin(2)
    line.journal.quarantine(3, "damaged", 1)
    prune_by_policy(line.journal, Retention(keep_last=2), STEPS_PER_EPOCH)
    line.journal.end_attempt(1, Ending("preempted", "told to", head_step(line)))
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("pattern", RECORDS)
def test_every_command_survives_any_value_in_any_field(store: Path, pattern: str) -> None:
    (path, *_) = (store / "run").glob(pattern)
    good = path.read_bytes()
    fields = json.loads(good)
    del fields["record_sha256"]
    turns = itertools.cycle(COMMANDS)  # a field meets nearly every command, and a record each one with each value
    for name in fields:
        for value in VALUES:
            path.write_bytes(seal(fields | {name: value}))
            run_commands(store, (next(turns),), f"{pattern} {name} = {value!r:.60}")
    path.write_bytes(good)


@pytest.mark.parametrize("kind", ["folder", "empty", "not JSON", "not UTF-8", "a list", "a nest"])
def test_every_command_survives_a_file_that_is_no_record(store: Path, kind: str) -> None:
    data = {"empty": b"", "not JSON": b"{", "not UTF-8": b"\xff\xfe{\0}\0", "a list": b"[]", "a nest": b"[" * 10**5}
    turns = itertools.cycle(COMMANDS)
    for pattern in (*RECORDS, "metrics/00000005.jsonl", "metrics/5.jsonl", "epoch-0005/metrics.jsonl"):
        path = next((store / "run").glob(pattern), store / "run" / pattern)
        good = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        path.mkdir() if kind == "folder" else path.write_bytes(data[kind])
        run_commands(store, [next(turns) for _ in range(5)], f"{pattern} is {kind}")
        path.rmdir() if kind == "folder" else path.unlink()
        if good is not None:
            path.write_bytes(good)


@pytest.mark.parametrize(
    "name", ["\0", "a\0b", "\udcff", "\x1b[31m", "x" * 300, "a/" * 3000, "~nobody-of-this-name", "://"]
)
def test_every_command_survives_any_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command, *_ in COMMANDS:
        for place in (name, f"{name}/run", f"runs/{name}"):
            out = [str(tmp_path / "out.tar")] if command == "pack" else []
            run_command([command, place, *out], f"{command} {place!r:.60}")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, value, "a null character") for name in ("store", "log.folder") for value in ("\0", "a\0b")),
        *(
            (name, value, "expected text in UTF-8")
            for name in ("store", "log.folder", "settings.name", "settings.inner.list", "settings.\udcff")
            for value in ("\udcff", "\ud800x")
        ),
    ],
)
def test_a_configuration_holds_text_only(name: str, value: str, said: str) -> None:
    fields: dict[str, Any] = {"recipe": "m:f", "run": "a"}
    *tables, last = name.split(".")
    table = fields
    for each in tables:
        table = table.setdefault(each, {})
    table[last] = [value] if last == "list" else value
    with pytest.raises(ConfigError, match=said) as caught:
        parse_config(fields)
    assert name.partition(".")[0] in str(caught.value)


def test_an_attempt_with_an_invalid_time_is_damaged(store: Path) -> None:
    """The time between losses is computed from this record."""
    path = store / "run" / "attempts" / "00000001.json"
    fields = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "record_sha256"}
    path.write_bytes(seal(fields | {"created_at": "yesterday"}))
    with pytest.raises(RecordDamaged, match=r"attempts/00000001.json can't be read: created_at: "):
        Journal(LocalStore(str(store)), "run").read_attempt(1)
    read_losses(Journal(LocalStore(str(store)), "run"), 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", 10**30), ("stall_s", 1e300), ("train_s", -1.0), ("created_at", "0001-01-01T00:00:00+00:00")],
)
def test_a_commit_with_a_number_that_no_run_has_is_damaged_and_the_rest_is_shown(
    store: Path, field: str, value: object
) -> None:
    path = store / "run" / "commits" / "00000004.json"
    fields = {name: old for name, old in json.loads(path.read_bytes()).items() if name != "record_sha256"}
    path.write_bytes(seal(fields | {field: value}))
    journal = Journal(LocalStore(str(store)), "run")
    with pytest.raises(RecordDamaged, match=rf"commits/00000004.json can't be read: {field}: "):
        journal.read_commit(4)
    assert any("commits/00000004.json" in line for line in make_ledger(journal).missing)
    reading = pytest.importorskip("holdfast.extensions.watch.reading")
    assert [commit.number for commit in reading.RunReader(journal).begin().commits] == [1, 2, 3, 5]
    gathering = pytest.importorskip("holdfast.extensions.report.gathering")
    history = gathering.Gatherer(journal).gather()
    assert any(line.startswith(f"commits/00000004.json can't be read: {field}") for line in history.problems)
    page = pytest.importorskip("holdfast.extensions.report.page")
    assert "commits/00000004.json" in page.make_page(history)


def test_terminal_control_characters_are_escaped() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b[2J\r\x9b\x7f\ud800\u202e") == r"\x1b[2J\r\x9b\x7f\ud800\u202e"
    assert printable("grün 漢字 🙂") == "grün 漢字 🙂"


def test_every_character_that_sets_the_writing_direction_is_escaped() -> None:
    # The marks themselves have the direction of a letter, so the class doesn't tell.
    classes = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    marks = {"\u200e", "\u200f", "\u061c"} | {
        each for each in map(chr, range(0x3000)) if bidirectional(each) in classes
    }
    assert len(marks) == 12
    assert not marks & set(printable("".join(marks)))


def run_commands(store: Path, commands: Sequence[tuple[str, ...]], case: str) -> None:
    for command in commands:
        out = store.parent / "out.tar"
        out.unlink(missing_ok=True)
        names = {"store": str(store), "run": f"{store}/run", "out": str(out), "page": f"{out}.html"}
        run_command([part.format(**names) for part in command], case)


def run_command(arguments: list[str], case: str) -> None:
    """Run a command; check that its exit code is documented and its output has no terminal control characters."""
    with captured() as streams:
        try:
            code = run_app(app, arguments)
        except BaseException:
            pytest.fail(f"{case}: {arguments}\n{traceback.format_exc()}")
    text = "".join(stream.getvalue().decode() for stream in streams)
    assert code in (0, 1, 2, 3), (case, arguments)
    assert "Traceback" not in text, (case, arguments, text)
    assert printable(text) == text, (case, arguments, text)


@contextlib.contextmanager
def captured() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Capture stdout and stderr for the block, as the bytes that a terminal would get."""
    streams = io.BytesIO(), io.BytesIO()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (io.TextIOWrapper(stream, "utf-8", write_through=True) for stream in streams)
    wrappers = sys.stdout, sys.stderr
    try:
        yield streams
    finally:
        sys.stdout, sys.stderr = before
        for wrapper in wrappers:
            wrapper.detach()


def seal(fields: dict[str, Any]) -> bytes:
    """Return a record with these fields and the matching hash."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.dumps(fields | {"record_sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def test_a_record_of_many_values_is_damaged_and_takes_no_memory(line: Line) -> None:
    """A megabyte of empty lists would take 30 MB, and several threads read records at once."""
    name = "attempts/00000001.json"
    lists: list[Any] = [[] for _ in range(MOST_VALUES)]
    data = line.journal.read_attempt(1).model_copy(update={"environment": {"sources": lists}}).to_bytes()
    tracemalloc.start()
    try:
        with pytest.raises(RecordDamaged, match="it has more than 500000 values"):
            AttemptRecord.from_bytes(data, name)
        assert tracemalloc.get_traced_memory()[1] < len(data) / 10
    finally:
        tracemalloc.stop()
    line.journal.store.replace(name, data)
    assert check(line).problems == [f"{name} can't be read: it has more than 500000 values"]


@pytest.mark.parametrize("depth", [MOST_DEPTH, MOST_DEPTH + 1])
def test_a_record_that_is_nested_too_deeply_is_damaged(line: Line, depth: int) -> None:
    """pydantic can't write such a record, and the comparison of settings would recurse too deeply."""
    nested: Any = []
    for _ in range(depth - 4):  # the record, config, settings and the list itself
        nested = {"a": nested}
    name = "config.snapshot.json"
    fields = json.loads(line.journal.store.read(name))
    del fields["record_sha256"]
    fields["config"] = fields["config"] | {"settings": {"deep": nested}}
    line.journal.store.replace(name, seal(fields))
    problem, *_ = check(line).problems
    assert ("the record has values nested deeper than 200 levels" in problem) == (depth > MOST_DEPTH), problem
