"""`make bench` runs, and what it counts doesn't grow where it was said not to."""

import platform

import pytest

from holdfast.store.local import LocalStore
from tests.bench.frame import Row, describe_machine, make_table
from tests.bench.journal import BENCHMARK, measure

SIZES = (10, 100)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return measure("folder", LocalStore(str(tmp_path_factory.mktemp("bench"))), SIZES)


def test_rows_have_the_promised_columns(rows: list[Row]) -> None:
    columns = [
        "store", "operation", "case", "commits", "requests", "ratio", "HTTP", "HTTP ratio", "names", "KiB read", "ms",
    ]  # fmt: skip
    assert all(list(row) == columns for row in rows)
    assert [row["commits"] for row in rows] == [*SIZES] * (len(rows) // 2)
    assert make_table(BENCHMARK, rows).row_count == len(rows) // 2


def test_no_case_costs_more_requests_when_the_run_is_longer(rows: list[Row]) -> None:
    assert {row["operation"] for row in rows} == {"resume", "prune one"}
    assert {(row["operation"], row["case"]): row["ratio"] for row in rows if row["ratio"] != 1.0} == {}


def test_listings_are_bounded_as_usual(rows: list[Row]) -> None:
    names = {str(row["operation"]): set[object]() for row in rows}
    for row in rows:
        if str(row["case"]).startswith("as usual"):
            names[str(row["operation"])].add(row["names"])
    assert [len(each) for each in names.values()] == [1, 1]


def test_the_machine_is_described_without_its_name() -> None:
    machine = describe_machine()
    assert machine["cpu"]
    assert machine["cores"]
    assert platform.node() not in map(str, machine.values())
