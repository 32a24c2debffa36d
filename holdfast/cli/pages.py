"""The command `docs`: show a page of the documentation in the terminal, or find one by words."""

import io
import os
import shutil
import subprocess
import sys
import textwrap

from rich.console import Console
from rich.markdown import Markdown

from holdfast.errors import WrongUse
from holdfast.looking.pages import list_headings, list_pages, name_links, read_page, search_pages

WIDEST = 110


def docs(*page: str) -> None:
    """Show a page of the documentation, or find one. The pages need no network. Without a word, list all pages.

    Args:
        page: A page or a section, such as storage#rights; or words, such as those of a message.
    """
    pages = list_pages()
    if not page:
        print("holdfast docs PAGE shows a page; holdfast docs WORDS finds the pages about these words")
        print("\n".join(list_headings(pages)))
        return
    text = read_page(page[0], pages) if len(page) == 1 else None
    if text is not None:
        _show(name_links(text, pages) if sys.stdout.isatty() else text)
        return
    found = search_pages(page, pages)
    if not found:
        raise WrongUse(
            f"no page contains all of these words: {' '.join(page)!r}", hint="to list all pages: holdfast docs"
        )
    for section, line in found:
        print(f"holdfast docs {section.name}")
        shown = textwrap.wrap(line, WIDEST - 2, max_lines=2, placeholder=" ...", break_on_hyphens=False)
        print(textwrap.indent("\n".join(shown), "  "))


def _show(text: str) -> None:
    """Print a page: in a terminal laid out, and through the pager if there is one; otherwise its Markdown."""
    if not sys.stdout.isatty():
        print(text)
        return
    width = min(shutil.get_terminal_size().columns, WIDEST)
    laid_out = io.StringIO()
    console = Console(file=laid_out, force_terminal="NO_COLOR" not in os.environ, width=width)
    console.print(Markdown(text, hyperlinks=False))
    shown = laid_out.getvalue()
    pager = os.environ.get("PAGER") or "less"
    if shutil.which(pager.split()[0]):
        # As git does: keep colours, and end at once if the page fits the screen.
        environment = {"LESS": "FRX"} | os.environ
        subprocess.run(pager, shell=True, input=shown, encoding="utf-8", env=environment, check=False)
        return
    getattr(sys.stdout, "rich_proxied_file", sys.stdout).write(shown)
