"""A report's page as one HTML file. Its content security policy allows only its own script. Its data is escaped."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

from holdfast import __version__
from holdfast.extensions.report.commands import make_commands
from holdfast.extensions.report.commits import describe_commits
from holdfast.extensions.report.curves import make_curves
from holdfast.extensions.report.gathering import History
from holdfast.extensions.report.ledger import make_goodput
from holdfast.extensions.report.lives import list_lives, make_report_ledger
from holdfast.extensions.report.markup import Markup, element, join_html, section
from holdfast.extensions.report.sections import (
    make_attempts,
    make_changes,
    make_health,
    make_machine,
    make_overview,
    make_settings,
)
from holdfast.extensions.report.showing import make_shown
from holdfast.extensions.report.timeline import make_timeline

STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "page.js", "curves.js", "tables.js", "parallel.js")
# The characters of JSON that would begin an HTML tag, or end a line in a script.
UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def make_page(history: History, now: float | None = None) -> str:
    """Return the report of one run as HTML.

    Args:
        now: seconds since 1970; the current time if None.
    """
    now = time.time() if now is None else now
    ledger, missing = make_report_ledger(history, now)
    lives = list_lives(history, ledger)
    body = join_html(
        make_overview(history, lives),
        make_curves_section(),
        make_attempts(lives, make_timeline(lives) if lives else Markup()),
        make_goodput(ledger, missing),
        section("Commits", "commits", element("div", id="commit-table")),
        make_changes(history),
        make_shown(history.shown),
        make_health(history),
        make_machine(history),
        make_settings(history),
        make_commands(history),
    )
    marks = [[each.first_step, each.record.number] for each in lives if each.commits]
    data = {
        "runs": [{"name": history.run, "marks": marks}],
        **make_curves([history]),
        "commits": describe_commits(history),
    }
    return wrap(f"run {history.run}", history.url, body, data, now)


def make_curves_section() -> Markup:
    """Return the empty section into which the page's script draws the curves."""
    empty = element("p", "The curves need JavaScript.", class_="empty")
    return section("Curves", "curves", element("div", empty, id="curve-grid"))


def wrap(title: str, place: str, body: Markup, data: dict[str, Any], now: float) -> str:
    """Return a complete HTML page.

    Args:
        place: where the data comes from, as text.
        data: plain values for the page's script.
    """
    style, script = _read(STYLES), _read(SCRIPTS)
    allowed = f"style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    made = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    head = join_html(
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} - Holdfast"),
        Markup(f"<style>{style}</style>"),
    )
    theme = element("button", "theme: auto", type="button", id="theme")
    top = element("header", element("h1", title), element("p", element("code", place)), theme)
    foot = element("footer", element("p", f"Made by Holdfast {__version__} at {made}, from the records of that time."))
    ends = Markup(f'<script type="application/json" id="data">{_embed_json(data)}</script>\n<script>{script}</script>')
    page = element("html", element("head", head), element("body", top, element("main", body), foot, ends), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _embed_json(data: object) -> str:
    """Return plain values as JSON for use inside an HTML element: characters that could end the element are escaped."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(UNSAFE)


@cache
def _read(names: Sequence[str]) -> str:
    folder = files("holdfast.extensions.report")
    return "\n".join(folder.joinpath(name).read_text("utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
