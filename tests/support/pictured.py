"""Pictures of reports, for docs/report.md: ``python -m tests.support.pictured [FOLDER]``.

A small language model is trained with three interruptions of different reasons, and a sweep beside it.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holdfast.extensions.report.comparing import make_comparison
from holdfast.extensions.report.gathering import Gatherer
from holdfast.extensions.report.index import make_index, read_rows
from holdfast.extensions.report.page import make_page
from holdfast.journal import Journal
from holdfast.journal.runs import choose_runs
from holdfast.store import open_store
from tests.conftest import ROOT, kill_tree
from tests.support.chromium import Page, browser

SMALL = {
    "determinism.threads": 1, "settings.layers": 2, "settings.width": 48, "settings.heads": 2, "settings.context": 64,
    "settings.batch_size": 8, "settings.grad_accum": 1,
}  # fmt: skip
SWEEP = {"lr": (1e-2, 3e-3, 1e-3), "width": (32, 64)}


def start(folder: Path, run: str, **settings: object) -> "subprocess.Popen[bytes]":
    """Start the training of a run, in a session of its own."""
    known = SMALL | {"run": run, "store": folder / "runs", "log.folder": folder / "logs", **settings}
    sets = [word for name, value in known.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "holdfast.cli", "train", "holdfast/recipes/language.toml", *sets]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)


def train_interrupted(folder: Path) -> Journal:
    """Train a run that is told to end, killed, and drained, and then ends."""
    journal, drain = Journal(open_store(str(folder / "runs")), "language"), folder / "drain"
    options = {"chunk.steps": 40, "resume.drain_file": drain}

    def begin(commits: int) -> "subprocess.Popen[bytes]":
        process = start(folder, "language", **options)
        while process.poll() is None and len(journal.numbers("commits")) < commits:
            time.sleep(0.1)
        return process

    with begin(2) as process:
        process.send_signal(signal.SIGTERM)
    with begin(5) as process:
        kill_tree(process.pid)
    with begin(8) as process:
        drain.touch()
    drain.unlink()
    with start(folder, "language", **options) as process:
        assert process.wait() == 0
    return journal


def train_sweep(folder: Path) -> list[Journal]:
    """Train a short run for each combination of two settings, one after the other."""
    journals = []
    for lr, width in itertools.product(*SWEEP.values()):
        run = f"sweep-lr-{lr:g}-width-{width}"
        with start(folder, run, epochs=1, **{"settings.lr": lr, "settings.width": width}) as process:
            assert process.wait() == 0
        journals.append(Journal(open_store(str(folder / "runs")), run))
    return journals


def draw_reports(chromium: str, scratch: Path, docs: Path) -> None:
    """Train the runs, and write the pictures of their reports."""
    journal, journals = train_interrupted(scratch), train_sweep(scratch)
    store = open_store(str(scratch / "runs"))
    pages = {
        "report": make_page(Gatherer(journal).gather()),
        "report-sweep": make_comparison([Gatherer(each).gather() for each in journals]),
        "report-store": make_index(store, read_rows(choose_runs(store, None))),
    }
    for name, text in pages.items():
        (scratch / f"{name}.html").write_text(text.replace(f"{scratch}{os.sep}", ""), "utf-8")
    taken = (
        ("report", "report-light", 1000, 972, "light", "#curves"),
        ("report", "report-dark", 1140, 958, "dark", "#attempts"),
        ("report-sweep", "report-sweep", 1000, 850, "light", "#runs"),
        ("report-store", "report-store", 1000, 546, "dark", "header"),
    )
    with Page(chromium) as page:
        for name, picture, width, height, theme, place in taken:
            page.open((scratch / f"{name}.html").as_uri(), width, height, theme)
            page.ask(f"document.querySelector({place!r}).scrollIntoView(); 0")
            page.settle()
            page.take(docs / f"{picture}.png")
            assert not page.errors, page.errors
            print(docs / f"{picture}.png")


def main() -> None:
    """Take the pictures of reports alone."""
    docs = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch, browser() as chromium:
        draw_reports(chromium, Path(scratch), docs)


if __name__ == "__main__":
    main()
