"""Nodes that would train different things are refused, and what differs is named."""

from typing import Any

import pytest

from holdfast.errors import ConfigDrift
from holdfast.rank.rank_checks import NodeIdentity, compare_nodes

ENVIRONMENT: dict[str, Any] = {
    "torch": "2.13.0", "python": "3.11.2", "cpu": "a", "holdfast": "1", "packages": {"scipy": "1.2"},
    "sources": {"mine": "a" * 64}, "files": {}, "built": {"optimizer.lr": 0.1},
}  # fmt: skip


def make_node(number: int, settings: dict[str, Any] | None = None, **environment: Any) -> NodeIdentity:
    return NodeIdentity(f"node {number} (host{number})", settings or {"seed": 1}, ENVIRONMENT | environment)


def test_nodes_of_another_processor_may_train_together() -> None:
    compare_nodes(make_node(0), make_node(1, cpu="b"))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"torch": "2.14.0"}, "torch is '2.13.0' on the first, '2.14.0' on the second"),
        ({"holdfast": "2"}, "holdfast is '1' on the first, '2' on the second"),
        ({"packages": {"scipy": "1.3"}}, "packages.scipy is '1.2' on the first, '1.3' on the second"),
        ({"sources": {"mine": "b" * 64}}, f"sources.mine is {'a' * 16} on the first, {'b' * 16} on the second"),
        ({"built": {"optimizer.lr": 0.2}}, "built.optimizer.lr is 0.1 on the first, 0.2 on the second"),
        ({"settings": {"seed": 2}}, "seed is 1 on the first, 2 on the second"),
    ],
)
def test_what_differs_between_two_nodes_is_named(other: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigDrift) as refused:
        compare_nodes(make_node(0), make_node(1, **other))
    assert refused.value.message == f"node 0 (host0) and node 1 (host1) would train differently: {named}"


def test_built_values_that_follow_from_other_code_are_left_out() -> None:
    with pytest.raises(ConfigDrift, match=f"sources.mine is {'a' * 16} on the first, {'b' * 16} on the second$"):
        compare_nodes(make_node(0), make_node(1, sources={"mine": "b" * 64}, built={"optimizer.lr": 0.2}))
