"""Hundreds of flipped bits in a run: each is detected, or changes nothing that is read from the run."""

import random
import re
from pathlib import Path

import pytest

from holdfast.checkpoint import PAYLOAD
from holdfast.config import Retention
from holdfast.errors import RecordDamaged
from holdfast.journal import Journal
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.ledger.standing import Standing, read_standing
from holdfast.store.local import LocalStore
from tests.conftest import IS_SOAK
from tests.support.makers import STEPS_PER_EPOCH, load, make_line, train

FLIPS = 3000 if IS_SOAK else 300
# The files of the quarantined commit, whose damage is no problem.
QUARANTINED = re.compile(r"(commits|metrics)/00000003|epoch-0003")
CLASSES = ("header", "tensors", "padding", "metadata", "metrics", "commit", "latest", "config", "others")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of six commits, of which one is quarantined, one pinned and two pruned."""
    store = LocalStore(str(tmp_path_factory.mktemp("store")))
    line = make_line(store)
    for _ in range(5):
        train(line, size_bytes=320)
    line.journal.pin(2)
    line.journal.quarantine(3, "damaged", 1)
    prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
    train(line, size_bytes=320)
    return Path(store.root) / "run"


def places(run: Path) -> dict[str, list[tuple[Path, range]]]:
    """Return the positions of all bytes of the run, by class: for each file, the range of its bytes in that class."""
    found: dict[str, list[tuple[Path, range]]] = {name: [] for name in CLASSES}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name, size = path.relative_to(run).as_posix(), path.stat().st_size
        if path.name == PAYLOAD:
            data = path.read_bytes()
            header = 8 + int.from_bytes(data[:8], "little")
            text = len(data[:header].rstrip(b" "))
            found["header"].append((path, range(text)))
            found["padding"].append((path, range(text, header)))
            found["tensors"].append((path, range(header, size)))
        elif path.name in ("metadata.json", "metrics.jsonl"):
            found[path.stem].append((path, range(size)))
        elif name.startswith(("commits/", "configs/", "latest", "config.")):
            key = "commit" if name.startswith("commits/") else name[:6]
            found[key].append((path, range(size)))
        else:
            found["others"].append((path, range(size)))
    return found


def answers(run: Path) -> tuple[bool, list[str], Standing | None, list[object]]:
    """Return everything that is read from a run: verification, standing, commits and whether they can be loaded."""
    journal = Journal(LocalStore(str(run.parent)), run.name)
    report = verify_run(journal, deep=True)
    try:
        standing = read_standing(journal)
    except RecordDamaged as error:
        return False, [str(error), *report.problems], None, []
    commits = list(journal.candidates())
    return report.ok, report.problems, standing, [*commits, *(load(journal.store, commit) for commit in commits)]


def test_a_flipped_bit_is_detected(run: Path) -> None:
    good = answers(run)
    assert good[0], good[1]
    by_class = places(run)
    assert all(any(len(part) for _, part in files) for name, files in by_class.items()), by_class
    chosen = random.Random(20)
    for count in range(FLIPS):
        files = [(path, part) for path, part in by_class[CLASSES[count % len(CLASSES)]] if part]
        path, part = chosen.choice(files)
        position, bit = chosen.choice(part), 1 << chosen.randrange(8)
        original = path.read_bytes()
        flipped = bytearray(original)
        flipped[position] ^= bit
        path.write_bytes(flipped)
        try:
            found = answers(run)
        finally:
            path.write_bytes(original)
        where = f"{path.relative_to(run)} at {position}"
        if found[0]:
            assert QUARANTINED.search(where), f"{where} was not detected"
            assert found == good, where
        else:
            problems = " ".join(found[1])
            assert path.name in problems or path.parent.name in problems, (where, problems)
