"""Every difference is named once, with its kind. Only accepted and harmless changes are allowed."""

import copy
import json
import math
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import RunConfig, Section, load_config, parse_config
from holdfast.errors import ConfigDrift, from_json, to_json
from holdfast.provenance.changes import (
    FIELD_CLASSES,
    Change,
    classify,
    compare_identities,
    find_defaults,
    format_value,
    from_lineage,
    to_lineage,
)
from holdfast.provenance.drift import check_drift, is_accepted, is_harmless
from holdfast.provenance.fingerprint import ABSENT, fingerprint
from holdfast.provenance.recorded import compare_sources

SAVED = {
    "recipe": "m:f",
    "seed": 1234,
    "determinism": {"mode": "strict", "threads": 1},
    "settings": {"lr": 0.05, "hidden": 64, "dropout": 0.1},
}
DEFAULTS = {"determinism.mode": "strict", "determinism.threads": 1, "settings.label_smoothing": 0.0}
OLD, NEW = "a" * 64, "b" * 64


def changed(**settings: Any) -> dict[str, Any]:
    """Return the saved identity with different settings; a setting that is None is removed."""
    fields = {**SAVED["settings"], **settings}  # type: ignore[dict-item]
    return {**SAVED, "settings": {name: value for name, value in fields.items() if value is not None}}


def lines(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    return [str(change) for change in compare_identities(saved, current, DEFAULTS)]


# ---- classes


def list_fields(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield every field of the configuration by dotted name."""
    for name, field in section.model_fields.items():
        tables = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = [kind for kind in tables if issubclass(kind, Section)]
        yield from list_fields(inner[0], f"{prefix}{name}.") if inner else [prefix + name]


def test_every_field_has_a_class() -> None:
    fields = set(list_fields(RunConfig))
    classed = {name for name in fields for table in FIELD_CLASSES if f"{name}.".startswith(f"{table}.")}
    assert fields == classed, "a new field needs a class in its annotation"
    for table in FIELD_CLASSES:
        assert any(f"{name}.".startswith(f"{table}.") for name in fields), f"{table} is no field"


def test_the_identity_is_made_of_the_identity_fields() -> None:
    fields = {"recipe": "m:f", "run": "a", "settings": {"lr": 1}, "init_from": {"run": "b"}, "skip": "3"}
    cases = {
        "compute.ranks": {},
        "compute.virtual_ranks": {"virtual_ranks": 8},
        "compute.parallel": {"parallel": "fsdp"},
        "compute.mesh": {"parallel": "fsdp", "ranks": 2, "mesh": {"shard": 2}},
    }
    made = {name: parse_config({**fields, "compute": compute}).identity for name, compute in cases.items()}
    found = {name: {each.name for each in compare_identities({}, made[name], find_defaults())} for name in cases}
    assert set().union(*found.values()) == {name for name in list_fields(RunConfig) if classify(name) == "identity"}
    usual = found["compute.ranks"]
    assert usual - found["compute.virtual_ranks"] == {"compute.ranks"}
    assert found["compute.parallel"] - usual == {"compute.parallel"}


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("compute.ranks", "identity"),
        ("compute.device", "operational"),
        ("settings.optimizer.lr", "identity"),
        ("epochs", "schedule"),
        ("log.folder", "operational"),
        ("not.known", "operational"),
    ],
)
def test_a_field_has_the_class_of_its_table(name: str, cls: str) -> None:
    assert classify(name) == cls


def test_operational_fields_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('recipe = "m:f"\nrun = "a"\n')
    saved = load_config(tmp_path / "a.toml")
    moved = load_config(tmp_path / "a.toml", [f"log.folder={tmp_path}/elsewhere", "store=moved", "epochs=9"])
    assert saved != moved
    changes = compare_identities(saved.identity, moved.identity, find_defaults())
    assert changes == []
    assert check_drift(changes, [], fingerprint(saved.identity), fingerprint(moved.identity)) == []


def test_defaults_are_those_of_the_configuration() -> None:
    defaults = find_defaults()
    config = RunConfig(recipe="m:f", run="a")
    assert {name: defaults[name] for name in ("seed", "determinism.mode", "compute.ranks", "log.every")} == {
        "seed": config.seed, "determinism.mode": config.determinism.mode, "compute.ranks": config.compute.ranks,
        "log.every": config.log.every,
    }  # fmt: skip
    assert (defaults["retention.keep_best"], defaults["retention.keep_best.count"]) == (None, 1)
    assert not {"recipe", "run", "retention.keep_best.metric", "chunk"} & defaults.keys()
    assert [change for change in compare_identities({}, config.identity, defaults) if not is_harmless(change)] == [
        Change(name="recipe", kind="added", current="m:f")
    ]


# ---- what differs


@pytest.mark.parametrize(
    ("current", "line"),
    [
        (changed(lr=0.1), "settings.lr: saved 0.05, now 0.1"),
        (changed(lr="0.05"), "settings.lr: saved 0.05, now '0.05'"),
        (changed(lr=math.inf), "settings.lr: saved 0.05, now inf"),
        (changed(hidden=2**60), f"settings.hidden: saved 64, now {2**60}"),
        (changed(hidden={"first": 64}), "settings.hidden: saved 64, now {'first': 64}"),
        (changed(hidden=[64]), "settings.hidden: saved 64, now [64]"),
        (changed(lr="c" * 64), f"settings.lr: saved 0.05, now {'c' * 16}"),
        (changed(label_smoothing=0), "settings.label_smoothing: new, with its default 0"),
        (changed(label_smoothing=False), "settings.label_smoothing: new, and set to False"),
        (changed(label_smoothing=0.1), "settings.label_smoothing: new, and set to 0.1"),
        (changed(unknown=0.0), "settings.unknown: new, and set to 0.0"),
        (changed(hidden=None), "settings.hidden: no longer a setting; saved 64"),
        (changed(hidden=None, width=64), "settings.width: was settings.hidden, same value 64"),
        (changed(hidden=None, width=64.0), "settings.width: was settings.hidden, same value 64.0"),
        ({**SAVED, "seed": 2**62}, f"seed: saved 1234, now {2**62}"),
    ],
)
def test_a_change_is_described_in_one_line(current: dict[str, Any], line: str) -> None:
    assert lines(SAVED, current) == [line]


def test_a_changed_source_is_described_in_one_line() -> None:
    saved, current = {"m": OLD, "gone": OLD, "same": OLD}, {"m": NEW, "new": OLD, "same": OLD}
    assert [str(change) for change in compare_sources(saved, current)] == [
        "sources.gone: no longer among the sources",
        "sources.m: its code has changed",
        "sources.new: new among the sources",
    ]
    assert compare_sources(saved, saved) == []


def test_true_differs_from_1_and_1_0_does_not() -> None:
    """The fingerprint does this, and Python's == doesn't."""
    assert lines({"a": 1, "b": [0], "c": {"d": 1}}, {"a": True, "b": [False], "c": {"d": 1.0}}) == [
        "a: saved 1, now True",
        "b: saved [0], now [False]",
    ]


def test_marked_numbers_are_values_and_not_tables() -> None:
    assert lines({"a": 2**60, "b": math.inf}, {"a": 2**61, "b": math.nan}) == [
        f"a: saved {2**60}, now {2**61}",
        "b: saved inf, now nan",
    ]


def test_an_identity_read_back_from_json_has_no_changes() -> None:
    current = {"settings": {"sizes": (1, 2), "path": Path("a/b"), "names": {"b", "a"}, "_private": 1}}
    saved = {"settings": {"sizes": [1, 2], "path": "a/b", "names": ["a", "b"]}}
    assert compare_identities(saved, current, {}) == []


@pytest.mark.parametrize(("saved", "current"), [({}, {"a": 1}), ({"a": 1}, {}), ({}, {"a": {}}), ({"a": {}}, {"a": 1})])
def test_an_empty_table_is_no_setting(saved: dict[str, Any], current: dict[str, Any]) -> None:
    (change,) = compare_identities({"settings": saved}, {"settings": current}, {})
    assert change.name == "settings.a"


def test_a_new_table_is_compared_with_the_defaults_of_its_fields() -> None:
    without = {name: value for name, value in SAVED.items() if name != "determinism"}
    changes = compare_identities(without, {**SAVED, "determinism": {"mode": "fast", "threads": 1}}, DEFAULTS)
    assert [(change.name, is_harmless(change)) for change in changes] == [
        ("determinism.mode", False), ("determinism.threads", True),
    ]  # fmt: skip


def test_a_setting_that_is_a_table_is_compared_with_its_default_as_a_whole() -> None:
    defaults = {"settings.blocks": {"depth": 2, "width": 3}}
    for blocks, is_default in (({"depth": 2, "width": 3.0}, True), ({"depth": 2}, False), ({}, False)):
        (change,) = compare_identities({"settings": {}}, {"settings": {"blocks": blocks}}, defaults)
        assert is_harmless(change) == is_default, blocks
    # The default got a new key, so the setting, which existed before, has a different value.
    saved, current = {"blocks": {"depth": 2}}, {"blocks": {"depth": 2, "width": 3}}
    (change,) = compare_identities({"settings": saved}, {"settings": current}, defaults)
    assert (change.name, is_harmless(change)) == ("settings.blocks.width", False)


# ---- renamed


def test_a_rename_pairs_the_most_similar_names() -> None:
    changes = compare_identities({"s": {"hidden": 0, "drop": 0}}, {"s": {"dropout": 0, "hidden_size": 0}}, {})
    assert [(change.was, change.name) for change in changes] == [("s.drop", "s.dropout"), ("s.hidden", "s.hidden_size")]


def test_fields_without_a_clear_partner_are_not_renames() -> None:
    assert {change.kind for change in compare_identities({"s": {"a": 0, "b": 0}}, {"s": {"xyz": 0}}, {})} == {
        "added",
        "removed",
    }
    assert {change.kind for change in compare_identities({"s": {"a": 0}, "t": {}}, {"s": {}, "t": {"b": 0}}, {})} == {
        "added",
        "removed",
    }
    assert {change.kind for change in compare_identities({"a": 1}, {"b": True}, {})} == {"added", "removed"}


def test_a_renamed_field_with_its_default_is_no_upgrade() -> None:
    (change,) = compare_identities({"s": {"hidden": 64}}, {"s": {"width": 64}}, {"s.width": 64})
    assert (change.kind, is_harmless(change)) == ("renamed", False)


def test_a_whole_table_is_renamed_as_one() -> None:
    (change,) = compare_identities({"s": {"old": {"a": 1, "b": 2}}}, {"s": {"new": {"a": 1, "b": 2}}}, {})
    assert (change.was, change.name) == ("s.old", "s.new")


# ---- every difference, once

leaves = st.none() | st.booleans() | st.integers(-2, 2) | st.just(2**60) | st.floats() | st.text("ab", max_size=2)
keys = st.text("xyz", min_size=1, max_size=2)
trees = st.dictionaries(
    keys, st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=5), max_size=3
)


def list_leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_table = isinstance(value, dict) and value
        flat |= list_leaves(value, f"{prefix}{key}.") if is_table else {prefix + key: value}
    return flat


def is_equal(a: Any, b: Any) -> bool:
    return fingerprint({"value": a}) == fingerprint({"value": b})


@given(trees)
def test_an_identity_does_not_differ_from_itself(tree: dict[str, Any]) -> None:
    assert compare_identities(tree, copy.deepcopy(tree), {}) == []


@given(trees, trees)
def test_every_different_leaf_is_named_exactly_once(a: dict[str, Any], b: dict[str, Any]) -> None:
    changes = compare_identities(a, b, {})
    assert bool(changes) == (fingerprint(a) != fingerprint(b))
    old, new = list_leaves(a), list_leaves(b)
    names = [name for change in changes for name in (change.name, change.was) if name]
    for name in names:
        assert any(f"{leaf}.".startswith(f"{name}.") for leaf in old.keys() | new.keys()), name
    for leaf in old.keys() | new.keys():
        is_same = leaf in old and leaf in new and is_equal(old[leaf], new[leaf])
        if is_table_in_both(a, b, leaf):  # it is empty in one of them, and only the other's fields are named
            continue
        assert sum(f"{leaf}.".startswith(f"{name}.") for name in names) == (0 if is_same else 1), leaf


def is_table_in_both(a: Any, b: Any, name: str) -> bool:
    for key in name.split("."):
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return False
        a, b = a.get(key), b.get(key)
    return isinstance(a, dict) and isinstance(b, dict)


@given(trees, trees)
def test_the_lineage_keeps_every_change(a: dict[str, Any], b: dict[str, Any]) -> None:
    changes = compare_identities(a, b, {name: value for name, value in b.items() if len(name) == 1})
    assert from_lineage(json.loads(json.dumps(to_lineage(changes)))) == changes


# ---- accepted and refused changes


@pytest.mark.parametrize(
    ("name", "accept", "is_let_through"),
    [
        ("settings.lr", "settings.lr", True),
        ("settings.lr", "settings", True),
        ("settings.lr", "lr", True),
        ("settings.optimizer.lr", "lr", True),
        ("settings.optimizer.lr", "settings.optimizer", True),
        ("settings.lr", "l", False),
        ("settings.lr", "settings.l", False),
        ("settings.lr", "sett", False),
        ("settings.lr", "", False),
        ("settings.optimizer.lr", "optimizer", False),
        ("seed", "seed", True),
        ("recipe", "recipe.x", False),
    ],
)
def test_accepted_by_name_table_or_last_part(name: str, accept: str, is_let_through: bool) -> None:
    assert is_accepted(Change(name=name, kind="value", saved=1, current=2), ["other", accept]) == is_let_through


def test_a_renamed_field_is_accepted_by_either_name() -> None:
    (change,) = compare_identities(SAVED, changed(hidden=None, width=64), {})
    for accept in ("settings.hidden", "hidden", "settings.width", "width", "settings"):
        assert is_accepted(change, [accept])
    assert not is_accepted(change, ["lr"])


def test_a_module_is_accepted_by_its_whole_name_only() -> None:
    (change,) = compare_sources({"pack.lr": OLD}, {"pack.lr": NEW})
    for accept in ("sources", "sources.pack.lr", "sources.pack", "pack.lr"):
        assert is_accepted(change, [accept])
    for accept in ("lr", "pack", "settings.lr"):
        assert not is_accepted(change, [accept])


@pytest.mark.parametrize("kind", ["value", "removed", "renamed", "source"])
def test_only_additions_can_be_harmless(kind: Any) -> None:
    assert not is_harmless(Change(name="a", kind=kind, saved=1, current=1, is_default=True))


def test_another_number_of_ranks_is_let_through_and_virtual_ranks_are_not() -> None:
    two, three, virtual = ({**SAVED, "compute": each} for each in ({"ranks": 2}, {"ranks": 3}, {"virtual_ranks": 2}))
    changes = compare_identities(two, three, DEFAULTS)
    assert check_drift(changes, [], fingerprint(two), fingerprint(three)) == changes != []
    with pytest.raises(ConfigDrift, match=r"compute\.virtual_ranks: was compute\.ranks"):
        check_drift(compare_identities(two, virtual, DEFAULTS), [], fingerprint(two), fingerprint(virtual))


def refuse(current: Mapping[str, Any], *accept: str, sources: Mapping[str, str] | None = None) -> ConfigDrift:
    changes = compare_identities(SAVED, current, DEFAULTS) + compare_sources({"m": OLD}, sources or {"m": OLD})
    with pytest.raises(ConfigDrift) as caught:
        check_drift(changes, accept, fingerprint(SAVED), fingerprint(current))
    return caught.value


def test_drift_names_exactly_the_refused_changes() -> None:
    current = {**changed(lr=0.1, dropout=None, label_smoothing=0.0, hidden=None, width=64, depth=2), "seed": 7}
    error = refuse(current, "seed", sources={"m": NEW})
    assert str(error).splitlines() == [
        f"settings differ: saved {fingerprint(SAVED)[:16]}, now {fingerprint(current)[:16]}",
        "changed values:",
        "  settings.lr: saved 0.05, now 0.1",
        "changed schema:",
        "  settings.depth: new, and set to 2",
        "  settings.dropout: no longer a setting; saved 0.1",
        "  settings.width: was settings.hidden, same value 64",
        "changed code:",
        "  sources.m: its code has changed",
    ]
    assert error.data == {
        "saved": fingerprint(SAVED),
        "current": fingerprint(current),
        "fields": {
            "settings.lr": [0.05, 0.1],
            "settings.depth": [ABSENT, 2],
            "settings.dropout": [0.1, ABSENT],
            "settings.width": [64, 64],
            "sources.m": [OLD, NEW],
        },
    }
    assert from_json(json.loads(json.dumps(to_json(error)))).data == error.data


def accept_as_told(hint: str) -> list[str]:
    """Return the names in the hint's option, parsed as a shell and TOML parse it."""
    words = shlex.split(hint)
    option = words[words.index("--set") + 1]
    return tomllib.loads(option.removesuffix(",").removeprefix("resume."))["accept_drift"]  # type: ignore[no-any-return]


def test_the_option_in_the_hint_accepts_exactly_these_changes() -> None:
    current, sources = {**changed(lr=0.1, hidden=None, width=64, label_smoothing=0.0), "seed": 7}, {"m": NEW}
    error = refuse(current, "lr", sources=sources)
    assert "put the saved values and code back" in error.hint
    assert "run of another name" in error.hint
    # The names that the file accepts are in it too, since the option replaces the file's list.
    told = accept_as_told(error.hint)
    assert told == ["seed", "settings.lr", "settings.width", "sources.m"]
    changes = compare_identities(SAVED, current, DEFAULTS) + compare_sources({"m": OLD}, sources)
    assert check_drift(changes, told, fingerprint(SAVED), fingerprint(current)) == changes
    for name in told:
        assert name in refuse(current, *(set(told) - {name}), sources=sources).data["fields"]


@pytest.mark.parametrize(
    ("current", "sources", "first"),
    [
        (changed(lr=1), {"m": OLD}, "put the saved values back, "),
        (changed(hidden=None), {"m": OLD}, "put the saved code back, "),
        (SAVED, {"m": NEW}, "put the saved code back, "),
    ],
)
def test_the_hint_says_what_to_put_back(current: dict[str, Any], sources: dict[str, str], first: str) -> None:
    assert refuse(current, sources=sources).hint.startswith(first)


def test_code_alone_is_not_called_settings() -> None:
    error = refuse(SAVED, sources={"m": NEW})
    assert "settings differ" not in str(error)
    assert str(error).splitlines()[1:] == ["changed code:", "  sources.m: its code has changed"]


def test_accepted_changes_are_returned_for_the_lineage() -> None:
    current = changed(lr=0.1, label_smoothing=0.0)
    changes = compare_identities(SAVED, current, DEFAULTS)
    found = check_drift(changes, ["lr", "names", "nothing"], fingerprint(SAVED), fingerprint(current))
    assert to_lineage(found) == {
        "settings.label_smoothing": {"kind": "added", "saved": ABSENT, "now": 0.0, "was": "", "default": True},
        "settings.lr": {"kind": "value", "saved": 0.05, "now": 0.1, "was": "", "default": False},
    }


def test_an_unexplained_difference_of_fingerprints_is_refused() -> None:
    sources = compare_sources({"m": OLD}, {"m": NEW})
    for changes, accept in (([], []), ([], ["settings"]), (sources, ["sources"])):
        with pytest.raises(ConfigDrift, match=r"settings differ: saved a{16}, now b{16}; .* not on record") as caught:
            check_drift(changes, accept, OLD, NEW)
        assert "accept_drift" not in caught.value.hint
    assert check_drift([], [], "", NEW) == []


def test_equal_fingerprints_mean_equal_settings_even_if_the_record_lost_a_value() -> None:
    """JSON has no infinity, so a record of it may read as null."""
    current = {"settings": {"clip_norm": math.inf}}
    changes = compare_identities({"settings": {"clip_norm": None}}, current, {})
    assert changes
    assert check_drift(changes, [], fingerprint(current), fingerprint(current)) == []


def test_values_are_shown_as_a_person_reads_them() -> None:
    values = ("a", None, {"a": 1}, {"$float": "-inf"}, {"$int": "-9007199254740993"})
    assert [format_value(value) for value in values] == [
        "'a'", "None", "{'a': 1}", "-inf", "-9007199254740993",
    ]  # fmt: skip
