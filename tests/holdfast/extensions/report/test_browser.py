"""Tests of the page in a real browser: no errors, accessible, by keyboard, on a telephone, on paper, and safe."""

import json
from collections.abc import Iterator

import pytest

from holdfast.extensions.report.comparing import make_comparison
from holdfast.extensions.report.gathering import Gatherer
from holdfast.extensions.report.index import make_index, read_rows
from holdfast.extensions.report.page import make_page
from holdfast.journal import Journal, metrics_name
from holdfast.journal.runs import choose_runs
from holdfast.store import open_store
from tests.holdfast.extensions.report.test_page import plant
from tests.support.chromium import AXE, Page, find_violations
from tests.support.long_run import LongRun

DRAWN = "[...document.querySelectorAll('.curve')].filter(each => each.querySelector('canvas')).length"
SAID = "document.querySelector('.curve .said').textContent"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return URLs of pages by name: a run with a rollback and NaN, one commit, nothing yet, many, several, hostile."""
    folder = tmp_path_factory.mktemp("pages")
    store = folder / "runs"
    rolled = LongRun(store, "rolled", rolled_back=3)
    trail = rolled.folder / metrics_name(15)
    lines = [json.loads(line) for line in trail.read_text("utf-8").splitlines()]
    lines[3]["loss"] = "NaN"
    trail.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    begun = Journal(open_store(str(store)), "begun")
    begun.begin("m:f")
    runs = {"rolled": rolled.journal, "begun": begun}
    runs["one"] = LongRun(store, "one", commits=1, attempts=1).journal
    runs["crowded"] = LongRun(store, "crowded", commits=60, steps=2, attempts=60).journal
    runs["many"] = LongRun(store, "many", metrics=50).journal
    histories = {name: Gatherer(journal).gather() for name, journal in runs.items()}
    hostile = Gatherer(plant(folder / "hostile")).gather()
    made = {name: make_page(history) for name, history in {**histories, "hostile": hostile}.items()}
    made["several"] = make_comparison([histories["rolled"], histories["one"], hostile])
    made["index"] = make_index(open_store(str(store)), read_rows(choose_runs(open_store(str(store)), None)), "runs")
    for name, page in made.items():
        (folder / f"{name}.html").write_text(page, "utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.fixture
def page(chromium: str) -> Iterator[Page]:
    with Page(chromium) as page:
        yield page


@pytest.mark.parametrize("name", ["rolled", "begun", "one", "many", "several", "index", "hostile"])
def test_a_page_opens_alone_and_without_errors_on_every_width(page: Page, pages: dict[str, str], name: str) -> None:
    for width, theme in ((1280, "dark"), (360, "light")):
        page.open(pages[name], width, theme=theme)
        assert page.ask("document.documentElement.scrollWidth") == width
        assert page.ask("document.documentElement.dataset.theme") == theme
    assert page.errors == []
    assert set(page.requests) == {pages[name]}
    assert page.ask("typeof planted") == "undefined"


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: make test installs it with npm")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["rolled", "begun", "several", "index", "hostile"])
def test_a_page_is_accessible(page: Page, pages: dict[str, str], name: str, theme: str) -> None:
    page.open(pages[name], theme=theme)
    assert find_violations(page) == []


def test_a_curve_is_read_and_zoomed_with_the_keyboard(page: Page, pages: dict[str, str]) -> None:
    page.open(pages["rolled"])
    page.ask("document.querySelector('.curve').focus()")
    page.press("Home")
    assert page.ask(SAID).startswith("step 1: ")
    page.press("ArrowRight")
    assert page.ask(SAID).startswith("step 2: ")
    page.press("End")
    assert page.ask(SAID).startswith("step 170: ")
    page.press("+")
    page.press("Home")
    first = page.ask(SAID)
    assert not first.startswith("step 1: ")  # only the zoomed part
    assert page.ask("document.activeElement.className") == "curve first"
    page.press("0")
    page.press("Home")
    assert page.ask(SAID).startswith("step 1: ")


def test_a_double_click_on_any_curve_shows_every_step_again(page: Page, pages: dict[str, str]) -> None:
    page.open(pages["rolled"])
    page.ask("document.querySelector('.curve').focus()")
    page.press("End")
    page.press("+")
    page.press("Home")
    assert not page.ask(SAID).startswith("step 1: ")
    over = "document.querySelector('[data-name=\"run/save_s\"] .u-over')"  # its own first value is at step 10
    page.ask(f"{over}.dispatchEvent(new MouseEvent('dblclick', {{bubbles: true}}))")
    page.press("Home")
    assert page.ask(SAID).startswith("step 1: ")


def test_the_line_of_a_run_is_read_by_keyboard_and_the_best_one_is_marked(page: Page, pages: dict[str, str]) -> None:
    page.open(pages["several"])
    said = "document.querySelector('#parallel-plot .note').textContent"
    assert page.ask("document.querySelectorAll('.way.best').length") == 1
    page.ask("document.querySelector('.way.best').focus()")
    page.settle()
    assert page.ask(said).startswith("rolled: recipe m:f, epochs 20, ")
    assert page.ask("document.querySelector('main').innerText").count("has the least loss: rolled") == 1


def test_a_long_table_scrolls_in_itself_and_is_printed_whole(page: Page, pages: dict[str, str]) -> None:
    page.open(pages["crowded"])
    box = "document.querySelector('#attempts .long')"
    assert page.ask(f"{box}.clientHeight") < 700
    page.do("Emulation.setEmulatedMedia", media="print")
    assert page.ask(f"{box}.clientHeight") > 700
    page.do("Emulation.setEmulatedMedia", media="")


def test_scales_and_rolled_back_steps_are_drawn_on_demand(page: Page, pages: dict[str, str]) -> None:
    page.open(pages["rolled"])
    picture = "document.querySelector('.curve canvas').toDataURL()"
    seen = {page.ask(picture)}
    for box in (0, 1):
        page.ask(f"document.querySelectorAll('.tools input')[{box}].click()")
        page.settle()
        seen.add(page.ask(picture))
    assert len(seen) == 3
    assert "not finite in 1 step," in page.ask(SAID)
    assert page.errors == []


def test_commits_are_found_page_by_page(page: Page, pages: dict[str, str]) -> None:
    page.open(pages["rolled"])
    rows = "[...document.querySelectorAll('#commit-table tbody tr th')].map(each => each.textContent)"
    assert page.ask(rows) == [str(number) for number in range(20, 0, -1)]
    page.ask(
        "(s => { s.value = 'quarantined'; s.dispatchEvent(new Event('change')); })(document.querySelector('select'))"
    )
    assert page.ask(rows) == ["12", "11", "10"]


def test_a_table_is_sorted_by_numbers(page: Page, pages: dict[str, str]) -> None:
    page.open(pages["index"])
    steps = "[...document.querySelectorAll('tbody tr')].map(each => Number(each.cells[3].dataset.value))"
    page.ask("document.querySelectorAll('th button')[3].click()")
    assert page.ask(steps) == sorted(page.ask(steps))
    page.ask("document.querySelectorAll('th button')[3].click()")
    assert page.ask(steps) == sorted(page.ask(steps), reverse=True)


def test_every_curve_is_printed(page: Page, pages: dict[str, str]) -> None:
    page.open(pages["many"], height=600)
    assert page.ask(DRAWN) < 50
    assert page.print().startswith(b"%PDF")
    assert page.ask(DRAWN) == 55
    assert page.errors == []


def test_a_page_without_scripts_still_says_what_the_run_is(page: Page, pages: dict[str, str]) -> None:
    page.do("Emulation.setScriptExecutionDisabled", value=True)
    page.load(pages["rolled"])
    text = page.ask("document.body.innerText")
    assert "attempt 4 ended: completed" in text
    assert "The curves need JavaScript." in text
