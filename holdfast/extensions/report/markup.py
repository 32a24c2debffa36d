"""HTML as text: all texts are escaped, except markup that Holdfast itself has made."""

import html
from collections.abc import Iterable, Sequence

# Elements that have no end tag.
VOID = {"img", "meta", "wbr"}


class Markup(str):
    """A text that is HTML already, so that `element` doesn't escape it again."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Return any value as HTML: markup unchanged, everything else escaped."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text), quote=True))


def join_html(*parts: object) -> Markup:
    """Join several values into one piece of HTML."""
    return Markup("".join(map(escape, parts)))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an HTML element. Texts in children and attributes are escaped, so that no text can become markup.

    Args:
        children: texts, which are escaped, and pieces of markup.
        attributes: by name, with ``_`` for ``-``, and ``class_`` for ``class``; an attribute that is None is omitted.
    """
    named = ((key.removesuffix("_").replace("_", "-"), value) for key, value in attributes.items())
    written = "".join(f' {key}="{escape(value)}"' for key, value in named if value is not None)
    end = "" if name in VOID else f"{join_html(*children)}</{name}>"
    return Markup(f"<{name}{written}>{end}")


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], caption: str, class_: str = "") -> Markup:
    """Return a table in a box that scrolls if the table is wider than the page.

    Args:
        rows: the cells of each row; the first cell is the row's heading.
        caption: the table's name for a screen reader.
    """
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    return table_of(heads, element("tbody", *body), caption, class_)


def table_of(heads: Sequence[object], body: Markup, caption: str, class_: str = "") -> Markup:
    """Return a table whose body is already given as markup; see `table`."""
    head = element("tr", *(element("th", each, scope="col") for each in heads))
    inner = element("table", element("caption", caption), element("thead", head), body)
    return element("div", inner, class_=f"scroll {class_}".strip(), tabindex=0, role="region", aria_label=caption)


def section(title: str, anchor: str, *children: object) -> Markup:
    """Return a section of the page, with a heading."""
    return element("section", element("h2", title, id=f"{anchor}-title"), *children, id=anchor)
