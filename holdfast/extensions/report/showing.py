"""The texts and pictures that a run has shown, on its page: for each name, only the newest."""

import base64
from collections.abc import Sequence

from holdfast.checkpoint.shown import TEXT, Shown
from holdfast.extensions.report.markup import Markup, element, section

# The maximum number of texts and pictures on a page, and of their bytes together. The numbers are limited,
# because each update of a report writes all texts and pictures again.
MOST, MOST_BYTES = 24, 1_500_000


def make_shown(shown: Sequence[Shown]) -> Markup:
    """Return the section with a run's shown texts and pictures; empty if there are none.

    An SVG is an image like a PNG: a script in it doesn't run.
    """
    if not shown:
        return Markup()
    figures, left = [], MOST_BYTES
    for each in shown[:MOST]:
        left -= len(each.data)
        if left >= 0:
            figures.append(_make_figure(each))
    left_out = len(shown) - len(figures)
    note = f"{left_out} further texts and pictures don't fit on the page: holdfast show has them."
    last = element("p", note, class_="note") if left_out else ""
    return section("Shown", "shown", element("div", *figures, class_="grid"), last)


def _make_figure(each: Shown) -> Markup:
    title = f"{each.name}, step {each.step:,}"
    if each.media_type == TEXT:
        text = each.data.decode("utf-8", "replace")
        body = element("pre", element("code", text), tabindex=0, role="region", aria_label=title)
    else:
        data = base64.b64encode(each.data).decode()
        body = element("img", src=f"data:{each.media_type};base64,{data}", alt=title)
    return element("figure", element("figcaption", title), body)
