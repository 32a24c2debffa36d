"""The versions of libraries that the tests have seen: what `holdfast doctor` says of those that are here."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from holdfast.extensions.doctor.examination import judge_libraries
from holdfast.machine.libraries import TESTED, find_installed
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("here", "is_good"),
    [
        ("2.9.0", True), ("2.9", True), ("2.10.1", True), ("2.13.0+cpu", True), ("2.8.1", None), ("2.15.0", None),
        ("3.0.0rc1", None), ("unknown", None),
    ],
)  # fmt: skip
def test_a_version_that_no_test_has_seen_is_said_and_is_no_fault(
    here: str, is_good: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TESTED, "torch", ("2.9.0", "2.13.0"))
    (finding,) = judge_libraries({"torch": here})
    assert (finding.what, finding.is_good) == ("torch", is_good)
    assert finding.seen == f"{here}, tested with 2.9.0 to 2.13.0" + ("" if is_good else ": no test has seen it")


def test_one_tested_version_is_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "prefect", ("3.9.1", "3.9.1"))
    (finding,) = judge_libraries({"prefect": "3.9.1"})
    assert finding.seen == "3.9.1, tested with 3.9.1"


def test_a_library_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "no-such-library", ("1", "2"))
    assert "no-such-library" not in find_installed()
    assert "torch" in find_installed()


@pytest.mark.parametrize("name", TESTED)
def test_the_table_begins_with_the_oldest_version_that_a_package_allows(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    oldest = {
        bound.version
        for each in map(Requirement, texts)
        if each.name == name
        for bound in each.specifier
        if bound.operator == ">="
    }
    assert {Version(each) for each in oldest} == {Version(TESTED[name][0])}


@pytest.mark.parametrize("name", TESTED)
def test_the_suite_runs_with_a_version_of_the_table(name: str) -> None:
    (pinned,) = re.findall(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    oldest, newest = map(Version, TESTED[name])
    assert oldest <= Version(pinned) <= newest


@pytest.mark.parametrize("name", TESTED)
def test_the_page_of_versions_has_the_table(name: str) -> None:
    page = (ROOT / "docs" / "versions.md").read_text("utf-8")
    (row,) = [line.split("|") for line in page.splitlines() if line.startswith(f"| {name} |")]
    (pinned,) = re.findall(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert [cell.strip() for cell in row[2:5]] == [*TESTED[name], pinned]
