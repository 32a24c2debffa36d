"""The relay between an attempt and its nodes on a Ray cluster: the cause of a failure, other versions."""

import pytest

import holdfast
from holdfast.errors import ConfigError, HoldfastError, RankDied, RecipeFailed

pytestmark = pytest.mark.extras("ray")

EFFECT = RankDied("rank 0 lost the connection to another rank in step 3", is_effect=True)
DEAD = RankDied("the ranks ended: rank 1: signal 9 (SIGKILL)")
FAILED = RecipeFailed("training failed in step 3 of rank 1")
ORDERED = RankDied("the ranks have ended, because they were told to", is_ordered=True)
LOST = RankDied("node 1 (vm) is lost")


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        ([EFFECT, DEAD], DEAD),
        ([EFFECT, FAILED], FAILED),
        ([DEAD, FAILED], FAILED),
        ([ORDERED, EFFECT], EFFECT),
        ([ORDERED, ORDERED], ORDERED),
        ([FAILED, LOST], LOST),
        ([DEAD, LOST], LOST),
    ],
)
def test_the_cause_is_told_and_not_its_effects(errors: list[HoldfastError], cause: HoldfastError) -> None:
    from holdfast.extensions.ray.relaying import Failure, choose_cause

    assert choose_cause([Failure(error, is_loss=error is LOST) for error in errors]) is cause


def test_a_node_with_another_version_is_named() -> None:
    from holdfast.extensions.ray.carrying import Host
    from holdfast.extensions.ray.relaying import check_versions

    own = Host("a", "10.0.0.1", "id", 29500, holdfast.__version__)
    check_versions([own, own])
    with pytest.raises(ConfigError, match=r"node 1 \(b\) has holdfast 0.0.1, and this machine"):
        check_versions([own, Host("b", "10.0.0.2", "id", 29500, "0.0.1")])
