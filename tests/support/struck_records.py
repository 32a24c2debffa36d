"""The two tables of FORMAT.md about signatures and lost files, computed from a small run whose files are damaged."""

import contextlib
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

from holdfast.config import Retention
from holdfast.config.steps import Steps
from holdfast.errors import HoldfastError
from holdfast.journal import AuditRecord, Journal, RehearsalRecord, now, records
from holdfast.journal.answers import record_answer
from holdfast.journal.audits import record_audit
from holdfast.journal.coverage import ABSENT, CHECKPOINT, KINDS, FileKind, name_kind
from holdfast.journal.endings import Ending
from holdfast.journal.signature import SigningKey
from holdfast.journal.skips import write_skips
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.store import Store
from holdfast.store.memory import MemoryStore
from tests.support.makers import STEPS_PER_EPOCH, make_key, make_line, train

SHOWN = b'{"step": 1, "epoch": 0, "name": "a", "type": "text/plain", "text": "%s"}\n'
FORMAT = Path(__file__).parents[2] / "holdfast" / "FORMAT.md"
BEGIN, END = "<!-- begin: {} (make docs writes this) -->\n", "<!-- end: {} -->\n"
DAMAGES = ("deleted", "cut", "of another run", "of a different number", "older")
# The files of the commit that `make_run` quarantines.
OF_QUARANTINED = (
    "commits/00000003", "epoch-0003/", "metrics/00000003", "shown/00000003", "folders/epoch-0003",
    "signatures/00000003",
)  # fmt: skip


def make_run(store: Store, run: str, key: SigningKey, older: dict[str, bytes] | None = None) -> None:
    """Make a signed run with at least one file of each kind: three attempts, seven commits, of which four count.

    Args:
        older: receives the bytes that files had after the first attempt.
    """
    line = make_line(store, run, signing_key=key)
    journal = line.journal
    for _ in range(5):
        train(line, shown=SHOWN % run.encode(), size_bytes=64 if run == "run" else 96)
    journal.pin(2)
    journal.quarantine(3, f"damaged {run}", 1)
    prune_by_policy(journal, Retention(keep_last=1), STEPS_PER_EPOCH)
    journal.record_rehearsal(RehearsalRecord(attempt=1, commit=5, lines=[], difference=run, created_at=now()))
    journal.end_attempt(1, Ending("inexact", run, 50))
    for number in (2, 5):
        expected = journal.read_commit(number).checkpoint_sha256
        record_audit(journal, AuditRecord(
            commit=number, number=1, from_commit=number - 1, checkpoint_sha256=expected, notes=[], host=run,
            environment={}, created_at=now(),
        ))  # fmt: skip
    record_answer(journal, 5, f"a person of {run}")
    steps = Steps.parse("99")
    names = write_skips(journal, 1, steps, steps, 6, key, reason=run).names
    for name in ("report.html", "sinks/wandb.json"):
        journal.store.replace(name, b'{"older": true}')
    if older is not None:
        older.update(_read_all(store.inside(run)))
    line = make_line(store, run, epochs=10, signing_key=key)
    line.skip_records = names
    for _ in range(2):
        train(line)
    journal = line.journal
    prune_by_policy(journal, Retention(keep_last=9), STEPS_PER_EPOCH)
    journal.end_attempt(2, Ending("preempted", run, 70))
    record_answer(journal, 2, f"a person of {run}")
    make_line(store, run, epochs=11)
    for name in ("report.html", "sinks/wandb.json"):
        journal.store.replace(name, b"{}")


def _read_all(store: Store) -> dict[str, bytes]:
    names = (f"{folder}/{name}" for folder in store.list() for name in store.list(folder))
    return {name: store.read(name) for name in (*filter(store.exists, store.list()), *names)}


class Struck:
    """A run of which a copy can be damaged, and the commands that may find the damage."""

    def __init__(self, key_file: Path) -> None:
        self.older: dict[str, bytes] = {}
        signing, self.key = make_key(key_file)
        store = MemoryStore(key_file.as_posix())
        for run in ("run", "other"):
            make_run(store, run, signing, self.older if run == "run" else None)
        self.files, self.others = _read_all(store.inside("run")), _read_all(store.inside("other"))
        self._whole = self._check(store)

    def list_cells(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield what finds each damage of a file; an empty text where the damage isn't possible."""
        data = self.files[name]
        folder = name.rpartition("/")[0]
        of_kind = [each for each in self.files if each.rpartition("/")[0] == folder and "/" in name and each != name]
        candidates = {
            "deleted": [None],
            "cut": [data[: len(data) // 2]],
            "of another run": [self.others.get(name)],
            "of a different number": [self.files[each] for each in of_kind if Path(each).suffix == Path(name).suffix],
            "older": [self.older.get(name)],
        }
        for damage, contents in candidates.items():
            content = next((each for each in contents if each != data), data)
            is_possible = damage == "deleted" or (content is not None and content != data)
            yield damage, self._find(name, content) if is_possible else ""

    def _find(self, name: str, content: bytes | None) -> str:
        copy = MemoryStore(f"struck/{name}")
        try:
            for each, data in (self.files | {name: content}).items():
                if data is not None:
                    copy.replace(f"run/{each}", data)
            return self._name_finder(copy, name, content)
        finally:
            copy.delete_folder("run")

    def _name_finder(self, store: Store, name: str, content: bytes | None) -> str:
        problems, notes, signed, uncovered = self._check(store)
        if problems:
            return "`verify`"
        if signed:
            return "`verify --key`"
        if notes != self._whole[1]:
            return "`verify`, a note"
        if self._is_told_by_an_attempt(store, name, content):
            return "the next attempt"
        return "listed" if name in uncovered and content is not None else "nothing"

    def _check(self, store: Store) -> tuple[list[str], list[str], list[str], list[str]]:
        """Return the problems and notes of `verify`, the problems that only a key shows, and what isn't covered."""
        try:
            journal = Journal(store, "run")
            plain = verify_run(journal)
            if plain.problems:
                return plain.problems, [], [], []
            signed = verify_run(Journal(store, "run"), trusted_keys=[self.key])
        except HoldfastError as error:
            return [str(error)], [], [], []
        return [], plain.notes, signed.problems, [each for files in signed.uncovered.values() for each in files]

    def _is_told_by_an_attempt(self, store: Store, name: str, content: bytes | None) -> bool:
        """Return whether the next attempt refuses the run, warns of the file, or writes it again."""
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("holdfast").addHandler(handler)
        try:
            make_line(store, trusted_keys=[self.key])
        except HoldfastError:
            return True
        finally:
            logging.getLogger("holdfast").removeHandler(handler)
        now_there = store.read(f"run/{name}") if store.exists(f"run/{name}") else None
        return any(name in line for line in told) or now_there != content


def make_coverage() -> str:
    """Return the table of what signatures cover."""
    rows = ["| file | covered by signatures | what an uncovered file decides |", "|---|---|---|"]
    rows += [f"| {_name(kind)} | {kind.covered or 'no'} | {kind.risk} |" for kind in KINDS]
    return "\n".join([*rows, f"| no file | no | {ABSENT} |", ""])


def make_losses() -> str:
    """Return the table of what finds each damage of each kind of file."""
    rows = [f"| file | {' | '.join(DAMAGES)} | why not all is found |", f"|---|{'---|' * len(DAMAGES)}---|"]
    with tempfile.TemporaryDirectory() as folder, _ticking():
        struck = Struck(Path(folder) / "key")
        for kind in KINDS:
            names = [name for name in struck.files if name_kind(name) == kind.name]
            rows.append(_make_row(struck, _name(kind), [names[0], names[-1]], kind.unnoticed))
        names = [name for name in struck.files if name.startswith(OF_QUARANTINED)]
        rows.append(_make_row(struck, "any file of a quarantined commit", names, "no run continues from the commit"))
    return "\n".join([*rows, ""])


@contextlib.contextmanager
def _ticking() -> Iterator[None]:
    """Let each record have another time, so that no two records are equal by chance."""
    ticks = itertools.count()

    class Ticking(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(2026, 1, 1, tzinfo=tz) + timedelta(seconds=next(ticks))

    logger = logging.getLogger("holdfast")
    kept, records.datetime = records.datetime, Ticking  # type: ignore[misc]
    propagates, logger.propagate = logger.propagate, False  # the damages are meant
    try:
        yield
    finally:
        records.datetime = kept  # type: ignore[misc]
        logger.propagate = propagates


def _make_row(struck: Struck, title: str, names: Sequence[str], reason: str) -> str:
    """Return a row that says for each damage what finds it in these files: all answers, if they differ."""
    cells = [dict(struck.list_cells(name)) for name in dict.fromkeys(names)]
    found = ["; ".join(dict.fromkeys(cell[each] for cell in cells if cell[each])) or "-" for each in DAMAGES]
    return f"| {title} | {' | '.join(found)} | {reason} |"


def _name(kind: FileKind) -> str:
    return "a file of a checkpoint" if kind.name == CHECKPOINT else f"`{kind.name}`"


TABLES: dict[str, Callable[[], str]] = {"coverage": make_coverage, "losses": make_losses}


def fill_format(text: str) -> str:
    """Return FORMAT.md with its tables as the code computes them."""
    for name, make in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text
