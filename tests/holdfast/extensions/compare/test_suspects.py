"""Recorded differences are ordered by how well they explain what differs first."""

from typing import Any

import pytest

from holdfast.attempt.lineage import Past
from holdfast.checkpoint.departure import Difference
from holdfast.extensions.compare.suspects import compare_machines, describe_change, find_evidence, list_changes, rank
from holdfast.provenance.changes import Change, Kind
from tests.support.makers import make_commit

MACHINE: dict[str, Any] = {
    "device": "cuda", "torch": "2.13.0", "threads": 1, "cpu_vector": "avx avx2", "variables": {},
    "gpus": [{"name": "H100", "sm": [9, 0], "sm_count": 132}],
}  # fmt: skip


def change(name: str, saved: Any = 1, current: Any = 2, kind: Kind = "value") -> tuple[str, Change]:
    return "", Change(name=name, kind=kind, saved=saved, current=current)


ALL = [
    change("chunk.steps"),
    change("built.model.3.p", 0.1, 0.2, "built"),
    change("built.optimizer.0.lr", 0.01, 0.02, "built"),
    change("built.batch_size", 4, 8, "built"),
    change("environment.threads"),
    change("packages.numpy", "1", "2", "package"),
    change("sources.model", "a", "b", "source"),
    change("settings.p", 0.1, 0.2),
    change("settings.rate", 0.01, 0.02),
    change("settings.size", 4, 8),
    change("files.data", "a", "b", "file"),
    change("seed"),
    change("skip", "", "3"),
]


@pytest.mark.parametrize(
    ("fields", "step", "values", "best"),
    [
        (("samples",), 1, (None, None), ["seed", "files.data", "settings.size", "built.batch_size"]),
        (("batch content", "loss"), 5, (None, None), ["seed", "files.data", "settings.size", "built.batch_size"]),
        (("lrs", "loss"), 1, (None, None), ["settings.rate", "built.optimizer.0.lr"]),
        (("loss",), 1, (2.0, 3.0), ["seed", "files.data", "settings.p", "packages.numpy", "environment.threads"]),
        (("loss",), 7, (2.0, 3.0), ["settings.p", "settings.rate", "packages.numpy", "environment.threads"]),
        (("loss",), 7, (2.0, 2.000001), ["settings.rate", "packages.numpy", "environment.threads"]),
        (("grad_norm",), 7, (2.0, 2.000001), ["settings.rate", "packages.numpy", "environment.threads"]),
        (("optimizer.exp_avg", "model"), 64, (None, None), ["settings.p", "settings.rate"]),
        (("skipped",), 3, (None, None), ["skip"]),
        (("rng",), 3, (None, None), ["seed", "settings.p", "built.model.3.p"]),
    ],
)
def test_the_best_explanation_comes_first(
    fields: tuple[str, ...], step: int, values: tuple[Any, Any], best: list[str]
) -> None:
    found = rank(ALL, find_evidence(Difference(step, fields), values))
    likely = [each.change.name for each in found if each.tier == "likely"]
    assert likely[: len(best)] == best
    assert len(found) == len(ALL)
    assert found[-1].change.name == "chunk.steps"
    assert [each.change.name for each in found if each.tier == "unlikely"][-1] == "chunk.steps"


def test_a_state_that_differs_alone_is_explained_by_what_computes_it() -> None:
    found = rank(ALL, find_evidence(None))
    assert [each.change.name for each in found if each.tier == "likely"][:2] == ["settings.p", "settings.rate"]


def test_a_built_value_without_a_setting_follows_from_code_data_or_packages() -> None:
    rows = [ALL[2], ALL[5], ALL[6], ALL[9]]
    found = rank(rows, find_evidence(Difference(1, ("lrs",))))
    assert [(each.change.name, each.tier) for each in found] == [
        ("settings.size", "likely"), ("sources.model", "likely"), ("packages.numpy", "likely"),
        ("built.optimizer.0.lr", "likely"),
    ]  # fmt: skip


def test_machines_are_compared_by_the_contract() -> None:
    other = MACHINE | {
        "torch": "2.14.0", "threads": 2, "cpu_vector": "avx avx2 fma", "variables": {"MKL_CBWR": "AVX2"},
        "gpus": [{"name": "L4", "sm": [8, 9], "sm_count": 58}],
    }  # fmt: skip
    found = {each.name: (each.saved, each.current) for each in compare_machines(MACHINE, other)}
    assert found == {
        "environment.torch": ("2.13.0", "2.14.0"), "environment.threads": (1, 2), "environment.cpu_vector": ("", "fma"),
        "environment.gpus": ("H100", "L4"), "environment.variables.MKL_CBWR": ("(absent)", "AVX2"),
    }  # fmt: skip
    assert not list(compare_machines(MACHINE, dict(MACHINE)))
    assert not list(compare_machines(MACHINE, {}))


def test_another_torch_is_named_for_a_loss_that_rounds_otherwise() -> None:
    pasts = [Past(make_commit(1), "f", {}, environment) for environment in (MACHINE, MACHINE | {"torch": "2.14.0"})]
    rows = list_changes(*pasts, ({"run": "a", "chunk": {"steps": 3}}, {"run": "b", "chunk": {"steps": 4}}))
    first, second = rank(rows, find_evidence(Difference(3, ("loss",)), (1.0, 1.0000001)))
    assert (first.cls, first.change.name, first.tier) == ("machine", "environment.torch", "likely")
    assert (second.cls, second.change.name, second.tier) == ("operational", "chunk.steps", "unlikely")


def test_a_difference_is_described_with_both_runs() -> None:
    made = {
        "lr: 0.1 in a, 0.2 in b": Change(name="lr", kind="value", saved=0.1, current=0.2),
        "lr: not in a, 0.2 in b": Change(name="lr", kind="added", current=0.2),
        "lr: 0.1 in a, not in b": Change(name="lr", kind="removed", saved=0.1),
        "lr in a, rate in b: 0.1": Change(name="rate", kind="renamed", saved=0.1, current=0.1, was="lr"),
        "sources.m: another code": Change(name="sources.m", kind="source", saved="a", current="b"),
        "files.x: 'a' in a, not in b": Change(name="files.x", kind="file", saved="a"),
    }
    assert [describe_change(each, "a", "b") for each in made.values()] == list(made)
