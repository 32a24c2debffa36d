"""Tests of the pages: links work, generated pages are current, and files that pages name exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.looking.pages import list_pages, read_page
from holdfast.store.rights import BLOBS, KINDS, RIGHTS
from tests.conftest import ROOT
from tests.support.pages import DOCS, PAGES

WRITTEN = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("holdfast/*.md"), ROOT / "tests" / "README.md"])
README_LINES = 150
INDEX = DOCS / "README.md"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def find_links(text: str) -> Iterator[str]:
    """Yield the targets of a page's links and pictures, except in code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    yield from re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose))


def find_anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in find_links(page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        if ":" in path:  # of another site
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in find_anchors(target.read_text("utf-8")), link


def test_links_are_found() -> None:
    text = "# A *b*, c\n[`x`](x.md) ![p](p.png) `[no](no.md)`\n```\n[no](no.md)\n# no\n```\n[y](#a-b-c)\n"
    assert list(find_links(text)) == ["x.md", "p.png", "#a-b-c"]
    assert find_anchors(text) == {"a-b-c"}


@pytest.mark.parametrize("page", PAGES)
def test_generated_pages_are_current(page: str) -> None:
    assert (DOCS / page).read_text("utf-8") == PAGES[page](), "make docs"


def find_linked(page: Path) -> set[Path]:
    return {(page.parent / link.partition("#")[0]).resolve() for link in find_links(page.read_text("utf-8"))}


def test_the_readme_is_short_and_leads_to_the_index() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= README_LINES
    assert INDEX in find_linked(ROOT / "README.md")


def test_the_index_leads_to_every_page() -> None:
    assert {page.resolve() for page in WRITTEN} - find_linked(INDEX) == {INDEX}


def test_the_table_of_rights_is_the_codes() -> None:
    """Azure's rights have one long prefix, which the page says once."""
    _, _, text = (DOCS / "storage.md").read_text("utf-8").partition("## Rights\n")
    text, _, _ = text.partition("\n## ")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    heading = ["verb", "disk", "S3", "Google Cloud", "Azure"]
    for cells in rows[rows.index(heading) + 2 :]:
        verb, *rights = [cell.strip(" |") for cell in cells] + [""] * (len(heading) - len(cells))
        for kind, cell in zip(KINDS, rights, strict=True):
            assert re.findall("`([^`]+)`", cell) == [each.removeprefix(f"{BLOBS}/") for each in RIGHTS[kind][verb]]
    assert [cells[0] for cells in rows[rows.index(heading) + 2 :]] == [*RIGHTS["s3"]]
    assert BLOBS.removesuffix("/blobs") in text


def find_texts(source: str) -> Iterator[str]:
    """Yield the texts in source code, except docstrings of functions and modules; those of settings are shown."""
    tree = ast.parse(source)
    hidden = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            yield " ".join(node.value.split())


def test_messages_name_pages_by_the_command_that_shows_them() -> None:
    """A wheel has no folder docs/, so a message or a setting's description that names a file would name none."""
    pages = list_pages()
    texts = [
        (path.name, text)
        for room in ("holdfast", "tasks", "flows", "deployments")
        for path in (ROOT / room).rglob("*.py")
        for text in find_texts(path.read_text("utf-8"))
    ]
    named = {name for _, text in texts for name in re.findall(r"holdfast docs ([\w-]+(?:#[\w-]+)?)", text)}
    assert named >= {"troubleshooting#state-that-no-checkpoint-has", "layouts", "nodes"}
    assert [name for name in named - {"PAGE", "WORDS"} if not read_page(name, pages)] == []
    files = [(file, text) for file, text in texts if re.search(r"(?<![\w.])[\w-]+\.md\b", text)]
    assert [(file, text) for file, text in files if file != "pages.py"] == []


def test_files_that_pages_name_exist() -> None:
    for page in (each for each in WRITTEN if each.name not in PAGES):
        for path in re.findall(
            r"`((?:holdfast|tasks|flows|deployments|tests|docs)/[\w./-]+)`", page.read_text("utf-8")
        ):
            assert (ROOT / path).exists() or (page.parent / path).exists(), (page, path)


def test_holdfast_new_takes_no_name_of_the_readmes_own_files() -> None:
    """A person who follows both pages in one folder would be told that the file exists."""
    shown = set(re.findall(r"[Tt]his is `(\w+)\.py`", (ROOT / "README.md").read_text("utf-8")))
    made = {found for page in WRITTEN for found in re.findall(r"holdfast new (\w+)", page.read_text("utf-8"))}
    assert shown
    assert made
    assert not shown & made
