"""The table of metrics, and what names its rows: the dashboard, the alerts, the page."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from holdfast.extensions.metrics.table import METRICS, Metric
from holdfast.ledger.goodput import BUCKETS
from tests.conftest import ROOT

METRICS_ROOM = ROOT / "infra" / "metrics"
DASHBOARD = json.loads((METRICS_ROOM / "dashboard.json").read_text("utf-8"))
RULES = yaml.safe_load((METRICS_ROOM / "rules.yaml").read_text("utf-8"))["groups"][0]["rules"]
EXPOSED = {metric.exposed: metric for metric in METRICS.values()}
# The labels that every series has: of ours, and of Prometheus's.
COMMON = {"run", "instance", "job"}

QUERIES = [
    *(
        pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ),
    *(pytest.param(rule["expr"], id=rule["alert"]) for rule in RULES),
]


def find_metrics(query: str) -> set[str]:
    """Return the names of metrics in a query of Prometheus: those that begin as ours do."""
    return set(re.findall(r"\bholdfast_\w+", query))


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_metrics_and_labels_that_there_are(query: str) -> None:
    names = find_metrics(query)
    assert names
    assert names <= EXPOSED.keys()
    known = COMMON | {label for name in names for label in EXPOSED[name].labels}
    for listed in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query):
        assert set(re.findall(r"\w+", listed)) <= known, listed
    for name, matched in re.findall(r"\b(holdfast_\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)\s*[!=]", matched)) <= {*COMMON, *EXPOSED[name].labels}
    for name in re.findall(r"\b(?:rate|increase)\((holdfast_\w+)", query):
        assert EXPOSED[name].kind == "counter", name


def test_the_dashboard_shows_every_metric_that_no_other_one_implies() -> None:
    shown = {
        name for panel in DASHBOARD["panels"] for target in panel["targets"] for name in find_metrics(target["expr"])
    }
    shown |= {name for rule in RULES for name in find_metrics(rule["expr"])}
    assert EXPOSED.keys() - shown == {"holdfast_train_seconds_total", "holdfast_rank_step"}


def test_legends_name_labels_that_there_are() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            known = COMMON | {label for name in find_metrics(target["expr"]) for label in EXPOSED[name].labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_legends_and_selections_have_the_keys_that_grafanas_types_require() -> None:
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "timeseries":
            legend = panel["options"]["legend"]
            assert {"calcs", "displayMode", "placement", "showLegend"} <= legend.keys(), panel["title"]
    for variable in DASHBOARD["templating"]["list"]:
        assert {"text", "value"} <= variable.get("current", {"text": "", "value": ""}).keys(), variable["name"]


def test_a_panel_that_hides_zeros_says_what_no_data_means() -> None:
    for panel in DASHBOARD["panels"]:
        if all(target["expr"].endswith("> 0") for target in panel["targets"]):
            assert "noValue" in panel["fieldConfig"]["defaults"], panel["title"]


def test_titles_fit_their_panels() -> None:
    """On a page of 1280 pixels Grafana cut "Refused or damaged", 18 characters, in a panel of four columns."""
    for panel in DASHBOARD["panels"]:
        assert len(panel["title"]) <= 4 * panel["gridPos"]["w"], panel["title"]


def test_each_bucket_has_its_color_of_the_report() -> None:
    (panel,) = [each for each in DASHBOARD["panels"] if each["title"] == "Where the time went"]
    colors = {
        rule["matcher"]["options"]: rule["properties"][0]["value"]["fixedColor"]
        for rule in panel["fieldConfig"]["overrides"]
    }
    css = (ROOT / "holdfast" / "extensions" / "report" / "page.css").read_text("utf-8")
    assert colors == dict(re.findall(r"\.share-(\w+) \{ fill: (#\w+);", css))
    assert colors.keys() == set(BUCKETS)


def test_the_page_has_the_table() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `holdfast_")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows == [
        [f"`{metric.exposed}`", ", ".join(f"`{label}`" for label in metric.labels), spell(metric)]
        for metric in METRICS.values()
    ]


def spell(metric: Metric) -> str:
    """Return a metric's meaning as the page has it, without the full stop of the last sentence."""
    return metric.meaning.rstrip(".")


@pytest.mark.parametrize(
    ("metric", "exposed"),
    [
        (Metric("a.b", "counter", "s", ""), "a_b_seconds_total"),
        (Metric("a", "gauge", "1", ""), "a_ratio"),
        (Metric("a", "counter", "By", ""), "a_bytes_total"),
        (Metric("a", "counter", "{commit}", ""), "a_total"),
        (Metric("a", "gauge", "{unit}/s", ""), "a_per_second"),
        (Metric("a", "gauge", "", ""), "a"),
    ],
)
def test_a_metric_has_the_name_that_a_collector_gives_it(metric: Metric, exposed: str) -> None:
    assert metric.exposed == exposed


# ---- Prometheus's own tool


def promtool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool, which the package prometheus has")
    return subprocess.run([found, *arguments], capture_output=True, text=True)


def test_the_rules_and_the_configuration_are_prometheuss() -> None:
    done = promtool("check", "config", METRICS_ROOM / "prometheus.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


# Each minute's values of the series; "_" is a minute without one.
LIVES = {"holdfast_run_complete{run='a',instance='x'}": "0x60"}
ALERTS = [
    (
        "a run that commits",
        LIVES | {
            "holdfast_commit_age_seconds{run='a',instance='x'}": "60x60",
            "holdfast_commit_interval_seconds{run='a',instance='x'}": "60x60",
            "holdfast_attempt_age_seconds{run='a',instance='x'}": "600x60",
        },
        {"HoldfastNoCommit": False, "HoldfastRunLost": False},
    ),
    (
        "a run that commits no more",
        LIVES | {
            "holdfast_commit_age_seconds{run='a',instance='x'}": "0+60x60",
            "holdfast_commit_interval_seconds{run='a',instance='x'}": "60x60",
            "holdfast_attempt_age_seconds{run='a',instance='x'}": "0+60x60",
        },
        {"HoldfastNoCommit": True, "HoldfastRunLost": False},
    ),
    (
        "a run that was away for long and has just begun again",
        LIVES | {
            "holdfast_commit_age_seconds{run='a',instance='x'}": "90000+60x60",
            "holdfast_commit_interval_seconds{run='a',instance='x'}": "3600x60",
            "holdfast_attempt_age_seconds{run='a',instance='x'}": "0+60x60",
        },
        {"HoldfastNoCommit": False},
    ),
    ("a run that vanished", {"holdfast_run_complete{run='a',instance='x'}": "0x5 stale"}, {"HoldfastRunLost": True}),
    (
        "a run that goes on elsewhere",
        {
            "holdfast_run_complete{run='a',instance='x'}": "0x5 stale",
            "holdfast_run_complete{run='a',instance='y'}": "_x8 0x60",
        },
        {"HoldfastRunLost": False},
    ),
    (
        "a run that was completed elsewhere",
        {
            "holdfast_run_complete{run='a',instance='x'}": "0x5 stale",
            "holdfast_run_complete{run='a',instance='y'}": "_x8 0x2 1 stale",
        },
        {"HoldfastRunLost": False},
    ),
    (
        "machines that die alike",
        {f"holdfast_host_failures_total{{run='a',host='{host}',instance='x'}}": "3x60" for host in "pq"},
        {"HoldfastMachineGuilty": False},
    ),
    (
        "one machine alone",
        {"holdfast_host_failures_total{run='a',host='p',instance='x'}": "9x60"},
        {"HoldfastMachineGuilty": False},
    ),
    (
        "a machine that dies more often than the others",
        {
            "holdfast_host_failures_total{run='a',host='p',instance='x'}": "3x60",
            "holdfast_host_failures_total{run='a',host='q',instance='x'}": "1x60",
        },
        {"HoldfastMachineGuilty": True},
    ),
    (
        "a gate that refuses",
        {"holdfast_verdicts_total{run='a',judge='gate',result='refused',instance='x'}": "0x20 1x40"},
        {"HoldfastRefused": True},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("series", "alerts"), [pytest.param(*each[1:], id=each[0]) for each in ALERTS])
def test_alerts_fire_when_they_should(tmp_path: Path, series: dict[str, str], alerts: dict[str, bool]) -> None:
    """Evaluate the rules after 25 minutes."""
    firing = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name, fires in alerts.items() if fires]
    names = "|".join(alerts)
    query = f"count by (alertname) (ALERTS{{alertstate='firing', alertname=~'{names}'}})"
    asked = [{"expr": query, "eval_time": "25m", "exp_samples": firing}]
    test = {"interval": "1m", "input_series": [{"series": k, "values": v} for k, v in series.items()]}
    file = tmp_path / "test.yaml"
    rules = str(METRICS_ROOM / "rules.yaml")
    file.write_text(yaml.safe_dump({"rule_files": [rules], "tests": [test | {"promql_expr_test": asked}]}), "utf-8")
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def find_expressions(title: str) -> list[str]:
    """Return the expressions of a panel of the dashboard, as Grafana would send them for all runs."""
    (panel,) = [each for each in DASHBOARD["panels"] if each["title"] == title]
    asked = [each["expr"] for each in panel["targets"]]
    return [each.replace("$run", ".+").replace("$__rate_interval", "4m") for each in asked]


def ask_prometheus(folder: Path, series: dict[str, str], asked: list[tuple[str, str, float | None]]) -> None:
    """Assert the value of expressions at times; None for no series. Values of series are a minute apart."""
    expected = [
        {
            "expr": f"sum({expr})",
            "eval_time": at,
            "exp_samples": [] if number is None else [{"labels": "{}", "value": number}],
        }
        for expr, at, number in asked
    ]
    test = {"interval": "1m", "input_series": [{"series": k, "values": v} for k, v in series.items()]}
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [test | {"promql_expr_test": expected}]}), "utf-8")
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("title", ["Commit age", "Commit age and interval"])
def test_the_age_of_a_commit_goes_on_while_no_attempt_lives(tmp_path: Path, title: str) -> None:
    """A commit in minute 0, a kill after minute 5, another attempt's commit in minute 12, the end after minute 15."""
    age, series = find_expressions(title)[0], {
        "holdfast_commit_age_seconds{run='a',instance='x'}": "0+60x5 stale _x5 0+60x3 stale",
        "holdfast_run_complete{run='a',instance='x'}": "0x5 stale _x5 0x2 1 stale",
    }  # fmt: skip
    ages = [("4m", 240), ("9m", 540), ("13m", 60), ("20m", None)]
    ask_prometheus(tmp_path, series, [(age, at, seconds) for at, seconds in ages])
    known = {name: values.partition(" stale")[0] + " stale" for name, values in series.items()}
    ask_prometheus(tmp_path, known, [(age, "50m", 3000), (age, "70m", None)])


def test_the_seconds_of_a_commit_are_left_out_while_none_is_made(tmp_path: Path) -> None:
    stall = find_expressions("Seconds of a commit")[0]
    series = {
        "holdfast_stall_seconds_total{run='a',instance='x'}": "0x3 4x20",
        "holdfast_commits_total{run='a',instance='x',reason='chunk'}": "0x3 2x20",
    }
    ask_prometheus(tmp_path, series, [(stall, "5m", 2), (stall, "12m", None)])
