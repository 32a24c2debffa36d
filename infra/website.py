"""Make a website from the pages, with a search, that needs no network: ``make site``.

::

    .venv/site/bin/python infra/website.py [FOLDER]

The site is in ``build/site`` by default. The pages are copied to a folder beside the site, in the repository's folder
structure, so that their links remain valid. Files and folders of the repository to which pages link become pages, too.
The navigation comes from docs/README.md. The exit code is 1 if a link leads nowhere, or if a page would fetch anything
from another host.
"""

import ast
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = Path(__file__).parent / "website.yaml"
STYLE = Path(__file__).parent / "site"
INDEX = "docs/README.md"
PAGES = ("*.md", "docs/*.md", "holdfast/*.md", "tests/*.md")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".txt": "text", ".tf": "hcl", ".sh": "sh"}
PICTURES = (".png", ".svg")
FENCE, SPAN = re.compile(r"(^```.*?^```$)", re.M | re.S), re.compile(r"(`+[^`].*?`+)")
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
# Elements that a browser fetches from another host without a click: scripts, pictures, frames and styles.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^"' >]+
      | <link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preload|preconnect))[^>]*\bhref=["']?(?:https?:)?//[^"' >]+
      | url\(["']?(?:https?:)?//[^"')]+""",
    re.VERBOSE,
)


def main(folder: Path) -> int:
    """Make the site in a folder."""
    build = folder.parent
    pages = build / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    copy_pages(pages)
    config = build / "website.yaml"
    config.write_text(make_config(pages, folder), "utf-8")
    command = [Path(sys.executable).parent / "zensical", "build", "--strict", "--clean", "--config-file", config]
    if code := subprocess.run(command, cwd=build, check=False).returncode:
        return code
    found = list(find_fetched(folder))
    print(
        "\n".join(found)
        or f"{folder}/index.html; the search needs a server: python3 -m http.server --bind 127.0.0.1 -d {folder}"
    )
    return 1 if found else 0


def copy_pages(folder: Path) -> None:
    """Copy every page, every picture and the site's style, and write a page for each linked file or folder."""
    shutil.copytree(STYLE, folder)
    for page in sorted(page for pattern in PAGES for page in ROOT.glob(pattern)):
        name = page.relative_to(ROOT).as_posix()
        text, linked = rewrite(name, page.read_text("utf-8"))
        write(folder / name, text)
        for target, made in linked.items():
            if (ROOT / target).suffix in PICTURES:
                (folder / made).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / target, folder / made)
            elif not made.endswith("README.md") and made != target:
                write(folder / made, describe(ROOT / target))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def rewrite(page: str, text: str) -> tuple[str, dict[str, str]]:
    """Make a page's links, except in code, lead to the site's pages.

    Returns: the changed text, and for each linked file or folder of the repository the name of the page that shows it.
    """
    linked: dict[str, str] = {}

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[1]))
        linked[target] = find_page(target)
        return f"]({posixpath.relpath(linked[target], posixpath.dirname(page) or '.')}{link[2] or ''})"

    parts = FENCE.split(text)
    for number in range(0, len(parts), 2):
        spans = SPAN.split(parts[number])
        spans[::2] = [LINK.sub(replace, each) for each in spans[::2]]
        parts[number] = "".join(spans)
    return "".join(parts), linked


def find_page(target: str) -> str:
    """Return the name of the page that shows a file or a folder of the repository."""
    if (ROOT / target).is_dir():
        return f"{target}/README.md" if (ROOT / target / "README.md").is_file() else f"{target}/index.md"
    if target.endswith((".md", *PICTURES)):
        return target
    return f"{target.removeprefix('.')}.md"  # the site's builder ignores folders whose name begins with a dot


def describe(path: Path) -> str:
    """Return a page that shows a file of the repository, or lists a folder's files."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if path.is_dir():
        listed = sorted(each for each in path.rglob("*") if each.is_file() and "__pycache__" not in each.parts)
        return head + "\n".join(f"- `{each.relative_to(path)}`{describe_code(each)}" for each in listed) + "\n"
    text = path.read_text("utf-8")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=2))
    return f"{head}{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def describe_code(path: Path) -> str:
    """Return a colon and the first paragraph of a Python file's docstring; an empty text for any other file."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) if path.suffix == ".py" else None
    first = " ".join((docstring or "").partition("\n\n")[0].split()).removesuffix("::").replace("``", "`")
    return f": {first}" if first else ""


def make_config(pages: Path, folder: Path) -> str:
    """Return the configuration of the site: the text of `CONFIG`, and the site's name with the version, its folders and
    its navigation.
    """
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "holdfast" / "__init__.py").read_text("utf-8"), re.M)
    lines = [
        CONFIG.read_text("utf-8"),
        f"site_name: Holdfast {version[1] if version else ''}",
        f"docs_dir: {pages.name}",
        f"site_dir: {folder.name}",
        "nav:",
        "  - Holdfast: README.md",
    ]
    return "\n".join([*lines, *list_navigation((ROOT / INDEX).read_text("utf-8")), ""])


def list_navigation(index: str) -> Iterator[str]:
    """Yield the navigation as YAML: the headings of the index, and the links in the list below each heading."""
    yield f"  - All pages: {INDEX}"
    for line in index.splitlines():
        if line.startswith("## "):
            yield f"  - {line.removeprefix('## ')}:"
        elif found := re.match(r"- \[(.+?)\]\((.+?)\)", line):
            yield f"      - {found[1]}: {posixpath.normpath(posixpath.join(posixpath.dirname(INDEX), found[2]))}"


def find_fetched(folder: Path) -> Iterator[str]:
    """Yield a line for each element of a page or a style that would be fetched from another host."""
    for path in sorted(each for each in folder.rglob("*") if each.suffix in (".html", ".css")):
        yield from (f"{path.relative_to(folder)}: {found[0]}" for found in FETCHED.finditer(path.read_text("utf-8")))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").absolute()))
