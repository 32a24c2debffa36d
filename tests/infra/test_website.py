"""Tests of ``make site``: its links, its navigation, and that a browser asks no other host for anything."""

import functools
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support.chromium import AXE, Page, browser, find_browser, find_violations
from tests.support.tools import load

website = load("website")
PYTHON = ROOT / ".venv" / "site" / "bin" / "python"
needs_site = pytest.mark.skipif(not PYTHON.exists(), reason="make site installs its generator")
GROUPS = ["Start", "Guides", "Understand", "Troubleshooting", "Reference", "Examples", "Project"]
WIDTHS = (1440, 820, 390)


def test_links_outside_of_docs_lead_to_pages() -> None:
    text = "[a](../holdfast/errors.py) [`b`](../holdfast/store) [c](../tests) `[d](../x)`\n```\n[e](../x)\n```\n"
    text += "![f](train.png)\n[g](ranks.md#a) [h](#b) [i](https://example.org/x)\n"
    rewritten, linked = website.rewrite("docs/page.md", text)
    assert rewritten == (
        "[a](../holdfast/errors.py.md) [`b`](../holdfast/store/index.md) [c](../tests/README.md) `[d](../x)`\n"
        "```\n[e](../x)\n```\n![f](train.png)\n[g](ranks.md#a) [h](#b) [i](https://example.org/x)\n"
    )
    assert set(linked) == {"holdfast/errors.py", "holdfast/store", "tests", "docs/train.png", "docs/ranks.md"}


def test_files_and_folders_are_shown() -> None:
    assert '\n```python\n"""The errors that' in website.describe(ROOT / "holdfast" / "errors.py")
    assert "\n- `s3.py`: " in website.describe(ROOT / "holdfast" / "store")
    assert "pycache" not in website.describe(ROOT / "holdfast" / "store")


def test_the_navigation_is_that_of_the_index() -> None:
    config = yaml.safe_load(re.sub("!!.*", "", website.make_config(Path("pages"), Path("site"))))
    assert config["site_name"] == f"Holdfast {holdfast.__version__}"
    home, index, *groups = config["nav"]
    assert (home, index) == ({"Holdfast": "README.md"}, {"All pages": "docs/README.md"})
    assert [next(iter(group)) for group in groups] == GROUPS
    names = [name for group in groups for pages in group.values() for page in pages for name in page.values()]
    assert "holdfast/RESUME.md" in names
    assert [name for name in names if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', 1),
        ("<link rel=stylesheet href=//fonts.example/x.css>", 1),
        ("a { background: url('https://example.org/x.png') }", 1),
        ('<a href="https://example.org">x</a><link rel="canonical" href="https://example.org">', 0),
        ('<script src="../assets/x.js"></script><img src="train.png">', 0),
    ],
)
def test_what_is_fetched_from_another_host_is_found(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "page.html").write_text(text)
    assert len(list(website.find_fetched(tmp_path))) == count


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the whole site."""
    folder = tmp_path_factory.mktemp("site") / "site"
    done = make(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def make(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [PYTHON, ROOT / "infra" / "website.py", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN_S)


@pytest.fixture
def url(made: Path) -> Iterator[str]:
    """Serve the site on loopback; yield its address."""
    handler: Any = functools.partial(Quiet, directory=str(made))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and prints no request."""

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@needs_site
@pytest.mark.slow
def test_the_site_has_every_page(made: Path) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "holdfast").glob("*.md")]
    names = [page.relative_to(ROOT).with_suffix(".html").as_posix().replace("README", "index") for page in pages]
    assert [name for name in names if not (made / name).is_file()] == []


@needs_site
@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium")
def test_a_browser_shows_the_site_and_asks_no_other_host(url: str) -> None:
    with browser() as address:
        for name in ("index.html", "docs/gallery.html", "docs/messages.html"):
            for theme, is_dark in (("light", False), ("dark", True)):
                for width in WIDTHS:
                    with Page(address) as page:
                        page.open(f"{url}/{name}", width=width, theme=theme)
                        colour = page.ask("getComputedStyle(document.body).backgroundColor")
                        assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128) == is_dark, (name, theme)
                        assert page.ask("document.documentElement.scrollWidth <= innerWidth"), (name, width)
                        assert not page.errors
                        fetched = [each for each in page.requests if not each.startswith(("data:", "blob:"))]
                        assert [each for each in fetched if not each.startswith(url)] == []
                        assert not AXE.exists() or find_violations(page) == [], (name, theme, width)


@needs_site
@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium")
def test_the_search_finds_the_words_of_a_message_by_keyboard(url: str) -> None:
    with browser() as address, Page(address) as page:
        page.open(f"{url}/index.html")
        page.press("Tab")
        while page.ask("document.activeElement.className.includes('md-search__button')") is False:
            page.press("Tab")
        page.press("Enter")
        shadows = "[...document.querySelectorAll('*')].flatMap(each => each.shadowRoot ?? [])"
        page.await_true(f"{shadows}.some(each => each.activeElement?.tagName === 'INPUT')")
        page.do("Input.insertText", text="holdfast verify lists the remaining checkpoints")
        found = f"{shadows}.flatMap(each => [...each.querySelectorAll('a')])"
        page.await_true(f"{found}.some(each => each.href.includes('/docs/messages.html'))")


@needs_site
@pytest.mark.slow
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    website.copy_pages(pages)
    (pages / "docs" / "limits.md").write_text("# Limits\n\n[gone](gone.md) [lost](concepts.md#lost)\n")
    (tmp_path / "site.yaml").write_text(website.make_config(pages, tmp_path / "site"))
    command = [PYTHON.parent / "zensical", "build", "--strict", "--config-file", tmp_path / "site.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=COMMAND_WITHIN_S)
    assert done.returncode != 0
    assert "page does not exist" in done.stdout + done.stderr
    assert "anchor does not exist" in done.stdout + done.stderr
