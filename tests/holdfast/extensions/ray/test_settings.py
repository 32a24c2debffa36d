"""The settings of a run whose ranks Ray places, and the commands that Ray has no part in."""

import importlib.util
from typing import Any

import pytest

from holdfast.config import Compute, RunConfig
from holdfast.errors import ConfigError
from holdfast.machine.gpus.checks import gather_nodes
from holdfast.rank.process import find_node
from holdfast.rank.spawn import describe_rank_wait, make_command


def make_config(**compute: Any) -> RunConfig:
    return RunConfig(recipe="tests.support.toy:toy", run="r", compute=Compute(**{"launcher": "ray", **compute}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": "all"}, 'launcher = "ray" needs ranks = a number'),
        ({"rendezvous": "node0:29500"}, 'launcher = "ray" chooses the rendezvous itself'),
        ({"nodes": "1:2"}, 'nodes = "1:2" changes the number of ranks, which needs virtual_ranks'),
        ({"launcher": "torchrun", "nodes": 2}, "nodes = 2 needs a rendezvous"),
    ],
)
def test_settings_that_ray_cannot_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


def test_the_launcher_is_not_in_the_fingerprint() -> None:
    assert make_config(nodes=2, ranks=2).identity == make_config(launcher="torchrun", ranks=4).identity


def test_the_command_is_that_of_the_only_node() -> None:
    """Whatever the number that a batch system has given this machine."""
    assert find_node(make_config(nodes=4).compute, {"SLURM_NODEID": "2"}) == 0


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'compute.launcher = "ray": Ray is not installed') as refused:
        make_command(make_config())
    assert refused.value.hint == "pip install 'holdfast-train[ray]'"


def test_the_attempt_says_for_what_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    compute = make_config(nodes="1:2", ranks=3, virtual_ranks=6, wait_s=40).compute
    assert describe_rank_wait(compute) == (
        "waiting for room on the Ray cluster at head:6379 for 1 to 2 nodes with 3 ranks each, for up to 40 s"
    )


def test_a_proof_takes_the_ranks_of_all_nodes_on_one_machine() -> None:
    for config, ranks in ((make_config(nodes=2, ranks=2), 4), (make_config(ranks=2), 2)):
        gathered = gather_nodes(config)
        assert (gathered.compute.launcher, gathered.compute.nodes, gathered.compute.ranks) == ("torchrun", 1, ranks)
        assert gathered.identity == config.identity
