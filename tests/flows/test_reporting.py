"""What a recipe shows, in Prefect's UI: as Markdown that shows texts as they are, and pictures as images."""

import base64
import re
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from holdfast.checkpoint.shown import to_shown
from holdfast.journal import AuditRecord, now
from holdfast.journal.audits import record_audit
from holdfast.journal.endings import Ending
from holdfast.ledger.standing import read_standing
from tasks.reporting import _describe_standing, describe_run, describe_shown, report_audits
from tests.conftest import Driver
from tests.support.long_run import LongRun
from tests.support.showing import PICTURE, png


@pytest.mark.parametrize(("value", "kind"), [(png(), "png"), (PICTURE, "svg+xml")])
def test_a_picture_is_an_image_in_a_data_uri(value: bytes, kind: str) -> None:
    text = describe_shown(to_shown("plot", value, 7, 1))
    assert text == f"plot after step 7\n\n![plot](data:image/{kind};base64,{base64.b64encode(value).decode()})\n"


@pytest.mark.parametrize(("value", "fence"), [("a\n# b", "```"), ("``` and ````", "`````"), ("`", "```")])
def test_text_stays_as_it_is(value: str, fence: str) -> None:
    text = describe_shown(to_shown("text", value, 7, 1))
    assert text == f"text after step 7\n\n{fence}text\n{value}\n{fence}\n"


def test_the_summary_has_a_picture_of_the_loss_and_the_place_of_the_report(tmp_path: Path) -> None:
    run = LongRun(tmp_path, "my run", rolled_back=3)
    (run.folder / "report.html").write_text("", "utf-8")
    text = describe_run(run.journal)
    assert f"\n\nreport: `{run.folder}/report.html`; `holdfast report" in text
    (data,) = re.findall(r"!\[loss by step\]\(data:image/svg\+xml;base64,([^)]+)\)", text)
    picture = ElementTree.fromstring(base64.b64decode(data))
    curve = picture.find(".//{*}polyline")
    assert curve is not None
    assert len(curve.attrib["points"].split()) == 17  # of 20 commits three were taken back
    said = [each.text for each in picture.iterfind(".//{*}text")]
    assert said[:3] == ["loss", "failed or crashed", "preempted or vanished"]
    assert said[-2:] == ["step 10", "170"]


def test_the_summary_names_the_newest_certified_commit(tmp_path: Path) -> None:
    journal = LongRun(tmp_path, commits=3, attempts=1).journal
    assert "certified" not in describe_run(journal)
    commit = journal.read_commit(3)
    record = AuditRecord(
        commit=3, number=1, from_commit=2, checkpoint_sha256=commit.checkpoint_sha256, notes=[], host="another",
        environment={}, created_at=now(),
    )  # fmt: skip
    record_audit(journal, record)
    row = f"| certified | commit 3 (step {commit.step}): another has trained it again to the same bytes |"
    assert row in describe_run(journal)


def test_an_audit_shows_its_verdict_and_renews_the_summary_of_a_run_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, artifacts = LongRun(tmp_path, "r", commits=3, attempts=1).journal, dict[str, str]()
    monkeypatch.setattr(
        "tasks.reporting.create_markdown_artifact", lambda text, key, about: artifacts.update({key: text})
    )
    report_audits("runs", {})
    assert artifacts == {"runs-audits": "# audits of `runs`"}
    artifacts.clear()
    store = str(journal.store_url)
    report_audits(store, {"r": ["commit 2: replayed to the same bytes\n  ``` # <b>"]})
    ((key, text),) = artifacts.items()
    assert key.endswith("-audits")
    assert text.endswith("## `r`\n\n`commit 2: replayed to the same bytes`\n\n`''' # <b>`")
    for host in ("b", "c"):
        record_audit(journal, AuditRecord(
            commit=2, number=1, from_commit=1, checkpoint_sha256="f" * 64, notes=[], host=host, environment={},
            created_at=now(),
        ))  # fmt: skip
    report_audits(store, {"r": ["commit 3: replayed to the same bytes"]})
    for text in (artifacts[key], artifacts["r-summary"]):
        assert re.search(r"^verdict: `commit 2: machine: .* different bytes than b and c; to answer: .*`$", text, re.M)
    for number in (2, 3):
        journal.quarantine(number, "rolled back", 1)
    report_audits(store, {"r": ["commit 1: replayed to the same bytes"]})
    assert not [key for key, text in artifacts.items() if "verdict:" in text], "the rollback has answered it"


def test_a_text_that_a_cell_would_cut_off_stands_below_the_table(tmp_path: Path) -> None:
    journal = LongRun(tmp_path, commits=1, attempts=1).journal
    standing = read_standing(journal)
    for verdict, is_in_table in (("continues exactly", True), ("not rehearsed; " + "unproved commits " * 9, False)):
        text = "\n".join(_describe_standing(journal, standing.model_copy(update={"verdict": verdict})))
        assert (f"| resume | {verdict} |" in text) is is_in_table
        assert (f"\n\nresume: {verdict}" in text) is not is_in_table


def test_a_run_without_two_losses_has_no_picture(tmp_path: Path) -> None:
    assert "data:image" not in describe_run(LongRun(tmp_path, commits=1, attempts=1).journal)


def test_the_reasons_of_the_endings_stand_below_the_table_which_would_cut_them_off(tmp_path: Path) -> None:
    run = LongRun(tmp_path, commits=2, attempts=1)
    reason = "training failed in step 7:\n/home/me/model.py:12: KeyError: 'x' | " + "a long way " * 20
    (run.folder / "endings" / "00000001.json").unlink()
    run.journal.end_attempt(1, Ending("recipe_failed", reason, 20))
    text = describe_run(run.journal)
    (row,) = re.findall(r"^\| 1 \|.*$", text, re.MULTILINE)
    assert row.endswith("| recipe failed | 20 |")
    assert f"\n- attempt 1: {' '.join(reason.split())}" in text


@pytest.mark.slow
def test_each_name_is_an_artifact_with_its_newest(driver: Driver, prefect_api: dict[str, str]) -> None:
    done = driver.run("recipe=tests.support.showing:painted", "run=painted")
    assert done.returncode == 0, done.stderr
    url, auth = prefect_api["PREFECT_API_URL"], prefect_api["PREFECT_API_AUTH_STRING"]
    with httpx.Client(auth=tuple(auth.split(":")), trust_env=False) as client:  # type: ignore[arg-type]
        found = client.post(f"{url}/artifacts/filter", json={"limit": 200}).raise_for_status().json()
    shown = {each["key"]: each["data"] for each in found if (each["key"] or "").startswith("painted-")}
    assert {key for key in shown if "shows" in key} == {
        f"painted-shows-{name}" for name in ("noise", "picture", "plot")
    }
    assert len([each for each in found if each["key"] == "painted-shows-plot"]) == 1
    assert shown["painted-shows-plot"] == describe_shown(to_shown("plot", PICTURE, 6, 3))
    assert describe_shown(to_shown("plot", PICTURE, 6, 3)) in shown["painted-summary"]
