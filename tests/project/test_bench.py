"""Tests of `make bench`: it runs, and its request counts don't grow with the length of a run."""

import logging
import math
import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.local import LocalStore
from tests.bench import __main__ as bench
from tests.bench import flow, growth, lost, page
from tests.bench.frame import Row, ask, compare, describe_machine, make_table
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
    names: dict[tuple[str, str], set[object]] = {}
    for row in rows:
        if (case := str(row["case"])).startswith("as usual"):
            names.setdefault((str(row["operation"]), case), set()).add(row["names"])
    assert [len(each) for each in names.values()] == [1, 1, 1]


def test_the_machine_is_described_without_its_name() -> None:
    machine = describe_machine()
    assert machine["cpu"]
    assert machine["cores"]
    assert platform.node() not in map(str, machine.values())


def test_the_cost_of_a_boundary_is_measured() -> None:
    """Steps take 0.1 s, in chunks of 10; the first step of each chunk takes 0.05 s longer."""
    done = [0.1 * step + 0.05 * ((step - 1) // 10) for step in range(1, 51)]
    assert flow._lost(done, 10) == pytest.approx(0.05)


def test_a_ratio_says_whether_it_is_met() -> None:
    assert [compare("", "", 1.2, "", 1.0, 1.3)[key] for key in ("ratio", "reach", "met")] == [1.2, "<= 1.3", "yes"]
    assert compare("", "", 0.9, "", 1.0, 0.985, least=True)["met"] == "NO"
    assert compare("", "", 0.9)["met"] is None


@pytest.mark.slow
def test_savers_are_measured_beside_training() -> None:
    rows = ask("tests.bench.lost", "tiny", "1", "2", "peers")
    figures = [
        "training lost by a save",
        "standard error of the training lost by a save",
        "training lost by a save, without priority",
        "pause of training for a save",
    ]
    assert [row["figure"] for row in rows][:4] == figures
    assert make_table(lost.BENCHMARK, rows).row_count == len(rows) == 9


def test_the_page_keeps_the_newest_run_of_each_benchmark() -> None:
    def row(ours: float) -> list[str]:
        return ["1 GB", "stall", str(ours), "s", *[""] * 5]

    def run(machine: str, **ours: float) -> tuple[str, page.Rows]:
        rows = [(name, compare("1 GB", "stall", value)) for name, value in ours.items()]
        found = {"machine": {"cpu": machine}, "benchmarks": {name: {"rows": [each]} for name, each in rows}}
        return page.read_run(found)

    tables = page.merge({}, *run("old", saving=1.0, cold=2.0))
    tables = page.merge(page.read_tables(page.write_tables(tables)), *run("new", cold=3.0))
    assert tables == {"cpu new": {"cold": [row(3.0)]}, "cpu old": {"saving": [row(1.0)]}}
    assert [*page.merge(tables, *run("new", saving=4.0))] == ["cpu new"]


def test_the_page_shows_how_costs_grow_in_a_line_for_each_operation(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    rows = [row for size in (5, 50) for row in growth.measure_commits(store.inside(str(size)), size)]
    rows.sort(key=lambda row: str(row["operation"]))
    text = page.replace_table("a\n<!-- growth -->\nold\n<!-- end -->\nz\n", "growth", page.show_growth(rows))
    lines = text.splitlines()
    assert (lines[:2], lines[-2:]) == (["a", "<!-- growth -->"], ["<!-- end -->", "z"])
    requests = {line.split("|")[3].strip(): line.split("|")[5].strip() for line in lines[4:-2]}
    assert len(requests) == 6
    for operation in ("find what a resume continues from", "show", "prune one checkpoint"):
        assert requests[operation].isdigit(), "equally many for a run of any length"
    assert len(requests["verify"].split(", ")) == 2


def test_on_a_machine_with_a_gpu_all_benchmarks_end_in_ten_minutes() -> None:
    usual, no_limit = bench.choose([], None, has_gpu=False)
    names, limit_s = bench.choose([], None, has_gpu=True)
    assert {*names} == {*usual}
    assert (no_limit, limit_s) == (math.inf, 600)
    assert bench.choose(["loop"], None, has_gpu=True) == (["loop"], math.inf)
    assert bench.choose(["loop"], 5.0, has_gpu=False) == (["loop"], 5.0)


@pytest.fixture
def own_signals() -> Iterator[None]:
    numbers, log = (signal.SIGTERM, signal.SIGALRM), logging.getLogger("holdfast")
    handlers, level = [signal.getsignal(each) for each in numbers], log.level
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    log.setLevel(level)


@pytest.mark.usefixtures("own_signals")
def test_a_benchmark_ends_when_the_time_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    output = tmp_path / "bench.json"
    # Over at once: an alarm in this process would end a benchmark that has files open, with warnings of them.
    bench.main(["journal", "strict", "--within", "0", "--output", str(output)])
    assert "left out journal, strict" in capsys.readouterr().out
    assert not output.exists()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "a run trains on the CPU, as what it is compared with"
    with pytest.raises(TimeoutError), bench.ending(time.monotonic() + 0.01):
        time.sleep(60)
