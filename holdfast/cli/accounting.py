"""The command ``goodput``: where the time of a run went."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from holdfast.journal.finding import open_journal
from holdfast.ledger.goodput import BUCKETS, AttemptLedger, Ledger, make_ledger
from holdfast.terminal import counted
from holdfast.terminal.columns import align, tabulate
from holdfast.terminal.options import Json, print_json


def goodput(run: str, /, *, json: Json = False) -> int:
    """Show where the time of a run went: training that counts, and each kind of loss.

    The exit code is 2 if records are lost.

    Args:
        run: <store>/<run>, or the name of a run in the default store.
        json: Print JSON.
    """
    ledger = make_ledger(open_journal(run))
    if json:
        print_json(_to_plain(ledger))
    else:
        print("\n".join(_describe(ledger)))
        for line in ledger.missing:
            print(f"missing: {line}", file=sys.stderr)
    return 2 if ledger.missing else 0


def _to_plain(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger as plain values for JSON, with its times in ISO 8601 and UTC."""
    attempts = [asdict(each) | _times(each) for each in ledger.attempts]
    return asdict(ledger) | _times(ledger) | {"attempts": attempts}


def _times(of: Ledger | AttemptLedger) -> dict[str, str]:
    return {name: getattr(of, name).isoformat(timespec="milliseconds") for name in ("began", "ended")}


def _describe(ledger: Ledger) -> Iterator[str]:
    available_s = ledger.wall_s - ledger.buckets["waiting"]
    rows = {
        "run": ledger.run,
        "from": f"{ledger.began:%Y-%m-%d %H:%M:%S} to {ledger.ended:%Y-%m-%d %H:%M:%S} UTC, "
        f"{counted(len(ledger.attempts), 'attempt')}",
        "goodput": f"{ledger.goodput:.2%} of {available_s:,.1f} s on a machine",
        "limit": f"{ledger.limit:.2%}, if nothing but restarts cost time",
        "efficiency": f"{ledger.efficiency:.2%} of the limit",
    }
    if ledger.preemptions:
        rows["preemptions"] = f"{ledger.preemptions}, each cost {ledger.cost_per_preemption_s:,.1f} s"
    yield from align(rows)
    yield ""
    total = [("all", f"{ledger.wall_s:,.1f} s", "100.00%")]
    shares = [(name, f"{spent_s:,.1f} s", _share(spent_s, ledger.wall_s)) for name, spent_s in ledger.buckets.items()]
    yield from tabulate([("bucket", "time", "share"), *shares, *total])
    yield ""
    columns = zip(("attempt", "ended", "steps lost", *BUCKETS), *map(_row, ledger.attempts), strict=True)
    yield from tabulate([*zip(*(column for column in columns if any(column[1:])), strict=True)])
    if any(each.mark for each in ledger.attempts):
        yield "~ no ending is on record for this attempt: at most one more chunk of its time counts as training"


def _share(part_s: float, wall_s: float) -> str:
    return f"{part_s / wall_s:.2%}" if wall_s else ""


def _row(each: AttemptLedger) -> tuple[str, ...]:
    lost = f"{each.mark}{each.lost_steps}" if each.lost_steps else ""
    times = [f"{seconds:,.1f}" if seconds else "" for seconds in each.buckets.values()]
    return (str(each.number), each.end, lost, *times)
