"""The pages of the documentation, as files: in ``holdfast/docs`` in the wheel, in ``docs`` in the repository."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from holdfast.errors import WrongUse

PACKAGE = Path(__file__).parents[1]
INDEX = "README"
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
HEADING = re.compile(r"^(#+) (.+)$", re.M)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
PLACEHOLDER = re.compile(r"\{\w+\}|\.\.\.|hint:.*")
VALUE = re.compile(r"\d|/")
LEAST_SHARE = 0.6  # a line is found if it has the words that carry this share of the best line's weight
FOUND = 8


@dataclass(frozen=True)
class PageSection:
    """A heading of a page, with the text below it.

    Attributes:
        page: the page's name without ``.md``.
        anchor: the heading's anchor, as GitHub and the site make it; empty for the page's first heading.
        depth: the heading's level, from 1.
        text: the Markdown from the heading to the next one.
    """

    page: str
    anchor: str
    title: str
    depth: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}#{self.anchor}" if self.anchor else self.page

    @cached_property
    def lines(self) -> list[tuple[str, frozenset[str]]]:
        """The section's lines, each with its own words and the words of the heading."""
        title = find_words(self.title)
        return [(line, frozenset(title | find_words(line))) for line in self.text.splitlines() if line.strip()]


def list_pages() -> dict[str, Path]:
    """Return the pages of this installation by name: the index first, then as the index lists them.

    Raises:
        WrongUse: the installation has no pages, for example because only its Python files were copied.
    """
    folder = next(
        (each for each in (PACKAGE / "docs", PACKAGE.parent / "docs") if (each / "README.md").is_file()), None
    )
    if folder is None:
        raise WrongUse(
            "this installation of Holdfast lacks the documentation pages",
            hint="install Holdfast from its wheel or its repository",
        )
    found = {path.stem: path for path in (*sorted(folder.glob("*.md")), *sorted(PACKAGE.glob("*.md")))}
    listed = [Path(link).stem for _, link in LINK.findall(found[INDEX].read_text("utf-8"))]
    names = dict.fromkeys([INDEX, *(each for each in listed if each in found), *found])
    return {name: found[name] for name in names}


def split_page(page: str, text: str) -> list[PageSection]:
    """Return the sections of a page, in order."""
    hidden = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)  # a comment in code is no heading
    found = [*HEADING.finditer(hidden)]
    ends = [*(each.start() for each in found[1:]), len(text)]
    sections = []
    for number, (heading, end) in enumerate(zip(found, ends, strict=True)):
        anchor = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") if number else ""
        title = strip_markup(heading[2])
        sections.append(PageSection(page, anchor, title, len(heading[1]), text[heading.start() : end]))
    return sections


def read_page(name: str, pages: Mapping[str, Path]) -> str | None:
    """Return the Markdown of a page, or of one section with the sections below it; None if no page has this name.

    Args:
        name: such as ``storage``, ``storage.md``, ``docs/storage.md`` or ``storage#rights``.

    Raises:
        WrongUse: the page has no such section.
    """
    file, _, anchor = name.partition("#")
    names = {each.lower(): each for each in pages}
    page = names.get(file.rpartition("/")[2].removesuffix(".md").lower())
    if page is None:
        return None
    text = pages[page].read_text("utf-8")
    if not anchor:
        return text
    sections = split_page(page, text)
    first = next((number for number, each in enumerate(sections) if each.anchor == anchor), None)
    if first is None:
        near = get_close_matches(anchor, [each.anchor for each in sections], n=1, cutoff=0)
        raise WrongUse(f"{page} has no section #{anchor}", hint=f"holdfast docs {page}#{near[0]}, or the whole page")
    below = [each.depth > sections[first].depth for each in sections[first + 1 :]]
    count = 1 + (below.index(False) if False in below else len(below))
    return "".join(each.text for each in sections[first : first + count])


def search_pages(words: Sequence[str], pages: Mapping[str, Path]) -> list[tuple[PageSection, str]]:
    """Return the sections that fit these words best, each with its best line, the best first.

    A word counts by its rarity among all lines, so that a message is found although its names and numbers differ. Paths
    and words with a digit count only if there are no other words, because they are values of the message. Of two lines
    with the same words of the message, the line with fewer further words is better.
    """
    sections = [each for page, path in pages.items() for each in split_page(page, path.read_text("utf-8"))]
    asked = " ".join(words).split()
    wanted = find_words(" ".join(each for each in asked if not VALUE.search(each))) or find_words(" ".join(asked))
    counts = Counter(word for each in sections for _, found in each.lines for word in found & wanted)
    total = sum(len(each.lines) for each in sections)
    weights = {word: math.log(1 + total / count) for word, count in counts.items()}

    def weigh(section: PageSection, found: frozenset[str]) -> float:
        titled = wanted & find_words(f"{section.page} {section.title}")
        return sum(weights[word] for word in found & wanted) + sum(weights.get(word, 0) for word in titled) / 2

    def fit(line: str) -> float:
        said = find_words(PLACEHOLDER.sub("", line))
        return len(said & wanted) / max(len(said), 1)

    lines = [
        (*max((weigh(each, found) * (1 + fit(line)), line) for line, found in each.lines), each) for each in sections
    ]
    best = sorted(lines, key=lambda each: -each[0])[:FOUND]
    least = LEAST_SHARE * best[0][0]
    return [(section, strip_markup(line)) for weight, line, section in best if weight >= least and weight > 0]


def find_words(text: str) -> set[str]:
    """Return the words of a text in lower case, without an "s" at their ends: "signals" finds "signal"."""
    return {word.removesuffix("s") for word in re.findall(r"\w+", text.lower()) if len(word) > 1}


def list_headings(pages: Mapping[str, Path]) -> Iterator[str]:
    """Yield the index as text: its headings, and below each heading the pages with their descriptions."""
    for line in pages[INDEX].read_text("utf-8").splitlines():
        if line.startswith("## "):
            yield from ("", line.removeprefix("## "))
        elif (found := re.match(r"- \[.+?\]\((.+?)\): (.+)", line)) and (name := Path(found[1]).stem) in pages:
            yield f"  {name:18} {strip_markup(found[2])}"


def name_links(text: str, pages: Mapping[str, Path]) -> str:
    """Replace each link to a page by its text and the command that opens the page, and any other link by its text."""

    def replace(link: re.Match[str]) -> str:
        file, _, anchor = link[2].rpartition("/")[2].partition("#")
        page = file.removesuffix(".md")
        if "://" in link[2] or page not in pages or page == file:
            return link[1]
        command = f"`holdfast docs {page}{'#' if anchor else ''}{anchor}`"
        return command if link[1] == file else f"{link[1]} ({command})"

    parts = re.split(f"({FENCE.pattern})", text, flags=re.M | re.S)
    parts[::2] = [LINK.sub(replace, each) for each in parts[::2]]
    return "".join(parts)


def strip_markup(line: str) -> str:
    """Return a line of Markdown as plain text."""
    return re.sub(r"[`*|]+|^[-#>\s]+", "", LINK.sub(lambda link: link[1], line)).strip()
