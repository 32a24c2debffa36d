"""Tests of `holdfast docs`: find a page by its name or by words, and show it."""

import os
import pty
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from holdfast.cli import app, run_app
from holdfast.errors import WrongUse
from holdfast.looking import pages as documentation
from holdfast.looking.pages import list_pages, name_links, read_page, search_pages, split_page
from tests.conftest import COMMAND_WITHIN_S, ROOT

PAGE = "# A page\nfirst\n```\n# no heading\n```\n## Bits & `bytes`\nsecond\n### Deeper\nthird\n## Last\nfourth\n"


def test_a_page_is_split_at_its_headings() -> None:
    found = [(each.name, each.title, each.depth) for each in split_page("p", PAGE)]
    assert found == [
        ("p", "A page", 1),
        ("p#bits--bytes", "Bits & bytes", 2),
        ("p#deeper", "Deeper", 3),
        ("p#last", "Last", 2),
    ]
    assert "".join(each.text for each in split_page("p", PAGE)) == PAGE


def test_a_section_is_read_with_those_below_it(tmp_path: Path) -> None:
    (tmp_path / "p.md").write_text(PAGE)
    pages = {"p": tmp_path / "p.md"}
    assert read_page("docs/P.md", pages) == PAGE
    assert read_page("p.md#bits--bytes", pages) == "## Bits & `bytes`\nsecond\n### Deeper\nthird\n"
    assert read_page("q", pages) is None
    with pytest.raises(WrongUse) as caught:
        read_page("p#deep", pages)
    assert caught.value.hint == "holdfast docs p#deeper, or the whole page"


def test_links_are_shown_by_the_name_that_the_command_takes() -> None:
    text = (
        "[`x.md`](x.md) [x.md](x.md#a) [store](../holdfast/FORMAT.md#b) [code](../tests/a.py)\n```\n[no](no.md)\n```\n"
    )
    shown = name_links(text, dict.fromkeys(["x", "FORMAT"], Path()))
    x, anchor, format = "`holdfast docs x`", "`holdfast docs x#a`", "`holdfast docs FORMAT#b`"
    assert shown == f"`x.md` ({x}) {anchor} store ({format}) code\n```\n[no](no.md)\n```\n"


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("queue a Slurm job again", "slurm"),
        ("rights on a bucket", "storage#rights"),
        # A message, in which the names and the numbers are the user's own.
        ("the run's folder /data/runs/mine is gone: it was moved or deleted", "messages"),
        ("checkpoint runs/language/epoch-0001-step-00000077 (commit 5) is damaged", "messages"),
        ("pseudo-labels of a dataset", "loop-cases"),
    ],
)
def test_words_find_a_page(words: str, page: str) -> None:
    assert any(section.name.startswith(page) for section, _ in search_pages(words.split(), list_pages())[:3])


def test_the_command_lists_finds_and_prints_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["docs"]) == 0
    assert "  troubleshooting    what a run does after an error" in capsys.readouterr().out
    assert run_app(app, ["docs", "storage#rights"]) == 0
    assert capsys.readouterr().out.startswith("## Rights\n")
    assert run_app(app, ["docs", "preemption", "notice"]) == 0
    assert capsys.readouterr().out.startswith("holdfast docs ")
    assert run_app(app, ["docs", "qwertyuiop"]) == 1
    assert capsys.readouterr().err.endswith("hint: to list all pages: holdfast docs\n")


def test_an_installation_without_pages_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documentation, "PACKAGE", tmp_path / "holdfast")
    with pytest.raises(WrongUse, match="this installation of Holdfast lacks the documentation pages"):
        list_pages()


@pytest.mark.slow
def test_the_wheel_shows_a_page_laid_out_in_a_terminal(tmp_path: Path) -> None:
    """From the wheel's own files, without the repository."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=COMMAND_WITHIN_S)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    metadata = next((tmp_path / "site").glob("*.dist-info")) / "METADATA"
    _, _, page = metadata.read_text("utf-8").partition("\n\n")
    assert [page.index(word) for word in ("pip install", "holdfast new", "KILL", "holdfast prove")] == sorted(
        page.index(word) for word in ("pip install", "holdfast new", "KILL", "holdfast prove")
    )
    assert "](" not in page  # a relative link is dead on the package index
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "holdfast.cli", "docs", "slurm"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PAGER": "cat", "TERM": "xterm"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=theirs) as shown:
        os.close(theirs)
        said = b""
        while chunk := _read(ours):
            said += chunk
    assert shown.returncode == 0
    assert b"\x1b[" in said
    assert "compute.nodes=slurm" in said.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the command has ended
        return b""
