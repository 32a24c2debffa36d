"""Changes in the record beside the settings: some stop a run, some are only reported, some are not compared."""

from typing import Any

import pytest

from holdfast.errors import ConfigDrift
from holdfast.machine.contract import judge
from holdfast.provenance.changes import Change, from_lineage, to_lineage
from holdfast.provenance.drift import check_drift, find_refused, is_accepted, is_harmless
from holdfast.provenance.fingerprint import ABSENT
from holdfast.provenance.recorded import compare_records

SAVED: dict[str, Any] = {
    "sources": {"recipe": "a" * 64, "helper": "b" * 64},
    "packages": {"transformers": "4.1", "einops": "0.8"},
    "package_files": {"einops": {"record": "abc"}},
    "holdfast": "0.1.0 (abc)",
    "files": {"data.npy": {"size_bytes": 3, "sha256": "c" * 64}},
    "built": {"clip_norm": 1.0, "model.1.momentum": 0.1},
    "python": "3.11.7",
    "torch": "2.13.0",
}
SETTINGS = "f" * 64


def change(**values: Any) -> list[Change]:
    """Return the changes of a record with these values."""
    return compare_records(SAVED, SAVED | values)


def refuse(changes: list[Change], *accept: str) -> ConfigDrift:
    with pytest.raises(ConfigDrift) as caught:
        check_drift(changes, accept, SETTINGS, SETTINGS)
    return caught.value


def test_an_equal_record_has_no_changes() -> None:
    assert change() == change(python="3.11.9") == []


@pytest.mark.parametrize("kept", [(), ("sources",), ("python", "torch"), ("sources", "packages")])
def test_a_checkpoint_without_these_records_has_nothing_to_compare(kept: tuple[str, ...]) -> None:
    assert compare_records({name: SAVED[name] for name in kept}, SAVED) == []


@pytest.mark.parametrize(
    ("values", "said", "accept"),
    [
        ({"sources": SAVED["sources"] | {"helper": "d" * 64}}, "sources.helper: its code has changed", "helper"),
        ({"sources": {"recipe": "a" * 64}}, "sources.helper: no longer among the sources", "sources"),
        ({"files": {"data.npy": {"size_bytes": 3, "sha256": "d"}}}, "files.data.npy: its content has changed", "files"),
        ({"built": SAVED["built"] | {"clip_norm": 2.0}}, "built.clip_norm: saved 1.0, now 2.0", "clip_norm"),
        ({"built": {"clip_norm": 1.0}}, "built.model.1.momentum: saved 0.1, now '(absent)'", "built"),
    ],
)
def test_a_change_stops_a_run_unless_its_name_is_accepted(values: dict[str, Any], said: str, accept: str) -> None:
    (found,) = changes = change(**values)
    error = refuse(changes)
    assert f"  {said}" in str(error).splitlines()
    assert found.name in error.hint
    assert refuse(changes, "lr", "other").data["fields"].keys() == {found.name}
    assert check_drift(changes, [accept], SETTINGS, SETTINGS) == changes
    assert is_accepted(found, [found.name])
    assert from_lineage(to_lineage(changes)) == changes


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"packages": {"transformers": "4.2", "einops": "0.8"}}, "packages.transformers: saved '4.1', now '4.2'"),
        ({"packages": {"einops": "0.8"}}, f"packages.transformers: saved '4.1', now {ABSENT!r}"),
        (
            {"package_files": {"einops": {"record": "def", "edited": {"einops/e.py": "012"}}}},
            "packages.einops: saved '0.8, installed files abc', "
            "now '0.8, installed files def, edited since: einops/e.py (012)'",
        ),
        ({"holdfast": "0.2.0 (def)"}, "holdfast: saved '0.1.0 (abc)', now '0.2.0 (def)'"),
        ({"sources": SAVED["sources"] | {"lazy": "d" * 64}}, "sources.lazy: new among the sources"),
        ({"files": {}}, "files.data.npy: no longer among the files that are read"),
        ({"files": SAVED["files"] | {"b": {"size_bytes": 1}}}, "files.b: new among the files that are read"),
    ],
)
def test_harmless_changes_are_reported_and_do_not_stop_a_run(values: dict[str, Any], said: str) -> None:
    changes = change(**values)
    assert [str(each) for each in changes] == [said]
    assert all(map(is_harmless, changes))
    assert check_drift(changes, [], SETTINGS, SETTINGS) == changes


def test_a_package_imported_only_now_is_no_change() -> None:
    assert change(packages=SAVED["packages"] | {"debugpy": "1.0"}) == []


def test_files_of_a_package_are_compared_only_if_both_records_have_them() -> None:
    assert change(package_files={}) == []
    assert compare_records({name: SAVED[name] for name in SAVED if name != "package_files"}, SAVED) == []


def test_a_loops_variable_that_only_one_record_has_is_no_change() -> None:
    assert change(built=SAVED["built"] | {"loop.variables.clip": 0.1}) == []
    saved = SAVED | {"built": {"loop.variables.clip": 0.1}}
    (found,) = compare_records(saved, SAVED | {"built": {"loop.variables.clip": 0.2}})
    assert str(found) == "built.loop.variables.clip: saved 0.1, now 0.2"


def test_built_values_are_accepted_with_the_change_beside_them() -> None:
    changes = change(sources={"recipe": "e" * 64, "helper": "b" * 64}, built={"clip_norm": 2.0})
    assert [each.name for each in find_refused(changes, [])] == ["sources.recipe"]
    assert refuse(changes).data["fields"].keys() == {"sources.recipe"}
    assert check_drift(changes, ["sources"], SETTINGS, SETTINGS) == changes
    # An upgrade alone does not allow a built value to change.
    upgraded = change(packages={"transformers": "4.2", "einops": "0.8"}, built=SAVED["built"] | {"clip_norm": 2.0})
    assert refuse(upgraded).data["fields"].keys() == {"built.clip_norm"}


def test_many_built_values_are_cut_in_the_message_and_named_by_their_table() -> None:
    changes = compare_records(SAVED | {"built": {str(n): 0 for n in range(50)}}, SAVED | {"built": {}})
    error = refuse(changes)
    assert len(str(error).splitlines()) < 20
    assert "and 38 more" in str(error)
    assert 'accept_drift=["built"]' in error.hint
    assert len(error.data["fields"]) == 50


def test_another_version_of_a_package_is_not_promised() -> None:
    def reasons(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
        return [line for line in judge(saved, current).reasons if "transformers" in line or "debugpy" in line]

    old, new = {"packages": {"transformers": "4.1"}}, {"packages": {"transformers": "4.2", "debugpy": "1"}}
    assert reasons(old, new) == ["transformers: saved '4.1', here '4.2'"]
    assert reasons(old, {"packages": {}}) == ["transformers: saved '4.1', here 'not installed'"]
    assert reasons(old, old) == reasons({}, new) == reasons(old, {}) == []
