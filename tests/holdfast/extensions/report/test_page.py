"""Tests of the page: it needs nothing else, nothing hostile in a run becomes markup, and its commands are right."""

import base64
import hashlib
import json
import math
import re
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import holdfast.extensions.report
from holdfast.checkpoint.shown import PNG, SVG, TEXT, Shown
from holdfast.config import parse_config
from holdfast.extensions.report.commands import write_toml
from holdfast.extensions.report.comparing import make_comparison
from holdfast.extensions.report.curves import make_curves
from holdfast.extensions.report.gathering import Gatherer, History
from holdfast.extensions.report.index import make_index, read_rows
from holdfast.extensions.report.markup import element
from holdfast.extensions.report.page import make_page
from holdfast.extensions.report.sketch import Sketch
from holdfast.journal import Commit, Journal, metrics_name, record_name
from holdfast.journal.endings import Ending
from holdfast.journal.runs import choose_runs
from holdfast.machine.slow_ranks import SlowRank
from holdfast.store import open_store
from tests.support.long_run import LongRun
from tests.support.makers import IDENTITY, SETTINGS, claim, make_line, save_next, train

EVIL = "</script><script>planted()</script><img src=x onerror=planted()>\"'`\u2028{{"
VENDORED = {
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


class Reader(HTMLParser):
    """Collects a page's elements, what they load or run, and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.policy = ""
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.loads += [value or "" for name, value in attributes if name in ("src", "href", "data", "action")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        if dict(attributes).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attributes)["content"] or ""

    def handle_data(self, data: str) -> None:
        if self.names and self.names[-1] in self.texts and self.cdata_elem:
            self.texts[self.names[-1]].append(data)


def read_data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def plant(folder: Path) -> Journal:
    """Make a run that has a script in every field that can hold a text."""
    journal = Journal(open_store(str(folder)), "evil <script>planted()</script>")
    journal.begin(EVIL)
    lineage = {
        "drift": EVIL, "ancestor": {EVIL: EVIL}, "environment": {"promise": EVIL, "reasons": [EVIL]},
        "continues": {"commit": EVIL, "checkpoint_sha256": EVIL},
    }  # fmt: skip
    environment = {"device": "cpu", EVIL: EVIL, "packages": {EVIL: EVIL}}
    journal.claim_attempt(1, EVIL, EVIL, 1, environment, lineage)
    journal.end_attempt(1, Ending(EVIL, EVIL, 3))
    journal.record_config(
        SETTINGS, IDENTITY, {"recipe": EVIL, "epochs": EVIL, "settings": {EVIL: EVIL, "list": [EVIL]}}
    )
    commit = Commit(
        number=1, parent=0, attempt=1, step=3, epoch=0, path="epoch-0001", files=[], metrics={EVIL: 1.0},
        checkpoint_sha256="0" * 64, previous_checkpoint_sha256="", previous_record_sha256="",
        config_fingerprint=SETTINGS, why=EVIL, created_at="2026-01-01T00:00:00+00:00",
        slow_rank=SlowRank(1, EVIL, 0.5, 0, 3),
    )  # fmt: skip
    journal.store.create(record_name("commits", 1), commit.to_bytes())
    lines = [{"step": step, "loss": 1.0, "logged": {EVIL: 1, "text": EVIL}, EVIL: EVIL} for step in (1, 2)]
    lines += [{"step": 3, "loss": "NaN", "logged": {EVIL: 1}}, {"step": EVIL}, {"step": 10**30}]
    journal.store.replace(metrics_name(1), "\n".join(map(json.dumps, lines)).encode())
    (folder / journal.run / "quarantine").mkdir()
    (folder / journal.run / "commits" / f"{EVIL.replace('/', '')}.json").write_text("{}", "utf-8")
    journal.quarantine(1, EVIL, 1)
    return journal


def test_the_page_is_one_file_under_a_policy_that_allows_its_own_script_alone(history: History) -> None:
    read = Reader(make_page(history))
    assert (read.loads, read.handlers) == ([], [])
    assert "default-src 'none'" in read.policy
    code = read.texts["script"][-1]
    for name, text in (("script-src", code), ("style-src", read.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in read.policy


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    history = Gatherer(plant(tmp_path)).gather()
    store = open_store(str(tmp_path))
    for page in (
        make_page(history),
        make_comparison([history, history]),
        make_index(store, read_rows(choose_runs(store, None)), ".."),
    ):
        read = Reader(page)
        assert read.names.count("script") == 2
        assert "img" not in read.names
        assert read.handlers == []
        assert len(read.texts["script"]) == 2
    assert EVIL in read_data(make_page(history))["commits"]["rows"][0]


def test_what_a_run_has_shown_is_text_and_images_on_the_page(history: History) -> None:
    svg = f"<svg xmlns='http://www.w3.org/2000/svg'>{EVIL}</svg>".encode()
    shown = [Shown(3, 1, "sample", TEXT, EVIL.encode()), Shown(3, 1, "plot", SVG, svg)]
    shown.append(Shown(3, 1, "large", PNG, bytes(2_000_000)))
    page = make_page(replace(history, shown=shown))
    read = Reader(page)
    assert read.loads == [f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"]
    assert (read.names.count("figure"), read.names.count("script")) == (2, 2)
    assert "1 further texts and pictures don&#x27;t fit" in page


def test_texts_are_escaped_and_markup_is_not() -> None:
    inner = element("b", "<&>", title='"')
    assert element("p", inner, EVIL[:9]) == '<p><b title="&quot;">&lt;&amp;&gt;</b>&lt;/script&gt;</p>'


def test_the_library_is_the_published_one() -> None:
    folder = Path(holdfast.extensions.report.__file__).parent / "vendor"
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == VENDORED


def test_losses_that_are_not_finite_are_named(tmp_path: Path) -> None:
    run = LongRun(tmp_path, commits=2)
    lines = [json.loads(line) for line in (run.folder / metrics_name(2)).read_text("utf-8").splitlines()]
    lines[3]["loss"], lines[4]["loss"] = "NaN", "Infinity"
    (run.folder / metrics_name(2)).write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    (loss,) = read_data(make_page(Gatherer(run.journal).gather()))["curves"]["train/loss"]
    assert loss["odd"] == [[14, "nan"], [15, "inf"]]
    assert loss["y"][13:15] == [None, None]
    assert math.isfinite(loss["y"][12])


def test_the_slowest_rank_of_an_attempt_is_named(tmp_path: Path) -> None:
    line = make_line(open_store(str(tmp_path)))
    train(line)
    assert "slow rank" not in make_page(Gatherer(line.journal).gather())
    for rank, share in ((2, 0.3), (1, 0.46), (3, 0.25)):
        slow = SlowRank(rank, "node-3", share, 1000, 1200)
        line.commit(save_next(line).model_copy(update={"slow_rank": slow}), "chunk")
    page = make_page(Gatherer(line.journal).gather())
    assert re.findall(r"rank \d on node-3[^<]*", page) == ["rank 1 on node-3: 46% of steps 1,000-1,200"]


@pytest.mark.parametrize("commits", [0, 1])
def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path, commits: int) -> None:
    line = make_line(open_store(str(tmp_path)))
    for _ in range(commits):
        train(line)
    page = make_page(Gatherer(line.journal).gather())
    assert len(read_data(page)["commits"]["rows"]) == commits
    assert "being trained by attempt 1" in page


def test_a_run_that_was_only_begun_has_a_page(tmp_path: Path) -> None:
    journal = Journal(open_store(str(tmp_path)), "run")
    journal.begin("m:f")
    assert "not started" in make_page(Gatherer(journal).gather())


def test_the_settings_can_be_trained_again() -> None:
    given = {
        "recipe": "m:f", "run": "r", "epochs": 3, "chunk": {"steps": 5}, "retention": {"keep_best": {"metric": "a"}},
        "settings": {"lr": 1e-3, "text": 'a "b" \\ \n', "list": [1, 2.5, True], "table": {"a.b": "x"}, "data": None},
    }  # fmt: skip
    config = parse_config(given)
    written = write_toml(config.model_dump(mode="json"))
    again = parse_config(tomllib.loads(written))
    assert again.model_dump(exclude={"settings"}) == config.model_dump(exclude={"settings"})
    assert again.settings == {name: value for name, value in config.settings.items() if value is not None}
    assert "determinism" not in written  # a default


def test_a_run_of_many_commits_stays_small(tmp_path: Path) -> None:
    run = LongRun(tmp_path, commits=60, steps=100, metrics=50)
    page = make_page(Gatherer(run.journal).gather())
    assert len(page) < 5_000_000
    assert len(read_data(page)["curves"]) == 55


def test_a_curve_says_of_how_many_values_it_shows_the_extremes(tmp_path: Path) -> None:
    run = LongRun(tmp_path, commits=60, steps=100, rolled_back=2)
    history = Gatherer(run.journal).gather()
    thinned = Sketch(most=500)
    for name in history.sketch.names:
        curve = history.sketch.read(name)
        for commit in history.commits:
            part = curve.of({commit})
            thinned.add(commit, name, part.steps.tolist(), part.values.tolist())
            thinned.settle()
    (loss,) = make_curves([replace(history, sketch=thinned)])["curves"]["train/loss"]
    assert len(loss["x"]) < 1000
    assert loss["of"] == 5800


def test_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    runs = [LongRun(tmp_path, name, commits=count) for name, count in (("a", 4), ("b", 6))]
    page = make_comparison([Gatherer(run.journal).gather() for run in runs])
    data = read_data(page)
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert [(each["run"], len(each["x"])) for each in data["curves"]["train/loss"]] == [(0, 40), (1, 60)]
    assert data["axes"][0]["name"] == "epochs"
    assert data["axes"][0]["values"] == [4, 6]


def test_an_index_shows_each_run_and_hides_none_behind_a_damaged_one(tmp_path: Path) -> None:
    LongRun(tmp_path, "long", commits=30)
    claim(make_line(open_store(str(tmp_path)), "young").journal, 2)
    damaged = LongRun(tmp_path, "damaged", commits=2)
    (damaged.folder / "run.json").write_text("{}", "utf-8")
    (tmp_path / "long" / "report.html").write_text("", "utf-8")
    rows = {row.run: row for row in read_rows(choose_runs(open_store(str(tmp_path)), None))}
    assert list(rows) == ["damaged", "long", "young"]
    assert rows["damaged"].problem.startswith("run.json")
    assert len(rows["long"].losses) == 30
    page = make_index(open_store(str(tmp_path)), list(rows.values()), "runs")
    read = Reader(page)
    assert read.loads == ["runs/long/report.html"]
    assert read.names.count("polyline") == 1
    assert "damaged: run.json" in page
