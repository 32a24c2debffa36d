"""The goodput ledger on a page: one stacked bar, and tables of the same seconds."""

from collections.abc import Iterator, Sequence

from holdfast.extensions.report.markup import Markup, element, join_html, section, table
from holdfast.extensions.report.numbers import show_seconds
from holdfast.ledger.goodput import BUCKETS, AttemptLedger, Ledger
from holdfast.terminal import counted

MEANINGS = {
    "productive": "steps that the newest commit contains",
    "lost": "steps that died with their attempt or were taken back",
    "stall": "training paused for a save",
    "restart": "from the start of the ranks until their first step began",
    "rehearsal": "training waited for a rehearsal, in which new ranks trained the next steps, too",
    "save": "ranks waited for a save or a commit",
    "drain": "from the last step until the end of an attempt that was told to end",
    "waiting": "between two attempts",
}
MOST_ATTEMPTS = 100


def make_goodput(ledger: Ledger | None, missing: Sequence[str]) -> Markup:
    """Return the section that shows where the time of a run went.

    Args:
        missing: a line for each missing record.
    """
    if ledger is None:
        return section("Goodput", "goodput", element("p", "No attempt has begun yet.", class_="empty"))
    notes = [element("p", each, class_="note") for each in missing[:MOST_ATTEMPTS]]
    return section("Goodput", "goodput", _make_summary(ledger), _make_bar(ledger), *_make_tables(ledger), *notes)


def _make_summary(ledger: Ledger) -> Markup:
    available_s = ledger.wall_s - ledger.buckets["waiting"]
    text = (
        f"Of {show_seconds(available_s)} on a machine, {ledger.goodput:.1%} was training whose steps the newest "
        f"commit contains: "
    )
    limit = f"{ledger.efficiency:.1%} of the limit {ledger.limit:.1%}, which holds if only restarts cost time"
    each = " each" if ledger.preemptions > 1 else ""
    cost = f". {counted(ledger.preemptions, 'preemption')} cost {show_seconds(ledger.cost_per_preemption_s)}{each}"
    return element("p", text, limit, cost if ledger.preemptions else "", ".")


def _make_bar(ledger: Ledger) -> Markup:
    parts, left = [], 0.0
    for name in BUCKETS:
        share = 100 * ledger.buckets[name] / (ledger.wall_s or 1.0)
        if share:
            title = element("title", f"{name}: {show_seconds(ledger.buckets[name])}, {share:.1f} %")
            place = {"x": f"{left:.3f}%", "width": f"{share:.3f}%", "y": 0, "height": 34}
            parts.append(element("rect", title, class_=f"share-{name}", **place))
        left += share
    return element(
        "svg", *parts, class_="stack", role="img", aria_label="Shares of the time; the table has the numbers"
    )


def _make_tables(ledger: Ledger) -> Iterator[Markup]:
    spent = ledger.buckets.items()
    rows: list[list[object]] = [
        [_make_key(name), _show(each), _share(each, ledger), MEANINGS[name]] for name, each in spent
    ]
    rows.append(["in all", show_seconds(ledger.wall_s), "", ""])
    yield table(("bucket", "time", "share", "meaning"), rows, "Where the time went", "rows")
    heads = ("attempt", "ended", "steps lost", *BUCKETS)
    attempts = [_make_row(each) for each in ledger.attempts[-MOST_ATTEMPTS:][::-1]]
    yield table(heads, attempts, "Where the time of each attempt went, the newest first", "numbers long")
    if (left_out := len(ledger.attempts) - len(attempts)) > 0:
        yield element("p", f"{left_out:,} older attempts are not listed.", class_="note")
    if any(each.mark for each in ledger.attempts):
        text = "~ The death is not on record: the attempt counts as training for at most one more chunk."
        yield element("p", text, class_="note")


def _make_key(name: str) -> Markup:
    return join_html(element("span", class_=f"swatch share-{name}"), name)


def _make_row(each: AttemptLedger) -> list[object]:
    lost = f"{each.mark}{each.lost_steps:,}" if each.lost_steps else ""
    return [each.number, each.end, lost, *map(_show, each.buckets.values())]


def _show(seconds: float) -> str:
    return show_seconds(seconds) if seconds >= 0.005 else ""


def _share(seconds: float, ledger: Ledger) -> str:
    return f"{seconds / ledger.wall_s:.1%}" if ledger.wall_s else ""
