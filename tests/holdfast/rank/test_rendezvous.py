"""The settings of several nodes, this node's number, and the messages if nodes can't meet."""

import socket
import sys
from typing import Any

import pytest

from holdfast.config import Compute, Determinism, RunConfig
from holdfast.config.slurm import find_job
from holdfast.errors import ConfigError, NodesMissing
from holdfast.machine.determinism import COLLECTIVES, SPINS, WAITS
from holdfast.machine.gpus.checks import gather_nodes
from holdfast.rank.process import find_node
from holdfast.rank.rendezvous import INTERFACE_VARIABLES, find_address, find_interface
from holdfast.rank.spawn import make_command, make_environment

AT = "127.0.0.1:29500"


def make_config(**compute: Any) -> RunConfig:
    return RunConfig(recipe="tests.support.toy:toy", run="r", compute=Compute(**{"rendezvous": AT, **compute}))


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({"HOLDFAST_NODE": "3"}, 3),
        ({"SLURM_NODEID": "2", "SLURM_LOCALID": "0"}, 2),
        ({"JOB_COMPLETION_INDEX": "1"}, 1),
        ({"HOLDFAST_NODE": "0", "SLURM_NODEID": "2"}, 0),  # what a person says counts first
    ],
)
def test_a_node_gets_its_number_from_its_launcher(variables: dict[str, str], number: int) -> None:
    assert find_node(make_config(nodes=4).compute, variables) == number


def test_the_only_node_needs_no_number() -> None:
    assert find_node(make_config().compute, {"SLURM_NODEID": "2"}) == 0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "this node's number is not known"),
        ({"HOLDFAST_NODE": "first"}, "HOLDFAST_NODE = 'first': expected the number"),
    ],
)
def test_a_node_without_a_number_of_its_own_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_node(make_config(nodes=2).compute, variables)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "expected a number from 1 to 1024, a range"),
        ({"nodes": "2:1"}, "expected a number from 1 to 1024, a range"),
        ({"nodes": "all"}, "expected a number from 1 to 1024, a range"),
        ({"nodes": 2, "rendezvous": None}, "nodes = 2 needs a rendezvous"),
        ({"nodes": "1:2"}, 'nodes = "1:2" changes the number of ranks, which needs virtual_ranks'),
        ({"nodes": 2, "rendezvous": "node0"}, "expected host:port"),
        ({"nodes": 2, "rendezvous": "node0:70000"}, "expected host:port"),
    ],
)
def test_settings_that_nodes_cannot_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


def test_the_fingerprint_has_the_ranks_of_all_nodes() -> None:
    assert make_config(nodes=2, ranks=2).identity == make_config(ranks=4).identity
    with_virtual = make_config(nodes="1:2", ranks=2, virtual_ranks=8)
    assert with_virtual.identity == make_config(virtual_ranks=8).identity


def test_a_proof_takes_the_ranks_of_all_nodes_on_one_machine() -> None:
    gathered = gather_nodes(make_config(nodes=2, ranks=2))
    assert (gathered.compute.nodes, gathered.compute.ranks) == (1, 4)
    assert gathered.identity == make_config(nodes=2, ranks=2).identity


def test_node_0_serves_the_rendezvous_at_an_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    config = make_config(nodes="1:3", ranks=2, virtual_ranks=8, wait_s=7)
    served = {}
    for node in ("0", "1"):
        monkeypatch.setenv("HOLDFAST_NODE", node)
        served[node] = make_command(config)
    expected = {
        "--nnodes=1:3", f"--rdzv-endpoint={AT}", "--rdzv-id=r", "--local-addr=127.0.0.1", "--nproc-per-node=2",
        "--shutdown-timeout=30",
    }  # fmt: skip
    assert expected <= {*served["0"]}
    assert {*served["0"]} - {*served["1"]} == {
        "--rdzv-conf=is_host=true,join_timeout=7,last_call_timeout=3,read_timeout=7"
    }
    assert make_environment(config, 0)["HOLDFAST_NODE"] == "1"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, ("lo", "=lo")),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, ("eth7", "=eth7")),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, ("lo", "^docker")),
        ({"GLOO_SOCKET_IFNAME": "a,b", "NCCL_SOCKET_IFNAME": "ib"}, ("a,b", "ib")),
    ],
)
def test_gloo_and_nccl_take_the_same_interface_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], expected: tuple[str, str]
) -> None:
    monkeypatch.setenv("HOLDFAST_NODE", "1")
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    environment = make_environment(make_config(nodes=2), 0)
    assert tuple(environment[name] for name in INTERFACE_VARIABLES) == expected


@pytest.mark.parametrize(("stop_within_s", "kill_s"), [(25.0, 30), (600.5, 601)])
def test_no_starter_of_ranks_kills_them_while_a_stop_has_time(
    monkeypatch: pytest.MonkeyPatch, stop_within_s: float, kill_s: int
) -> None:
    monkeypatch.setenv("HOLDFAST_NODE", "0")
    nodes, local = (
        each.model_copy(update={"resume": each.resume.model_copy(update={"stop_within_s": stop_within_s})})
        for each in (make_config(nodes=2), make_config(ranks=2))
    )
    assert f"--shutdown-timeout={kill_s}" in make_command(nodes)
    assert make_command(local)[-6:-3] == ["2", str(kill_s), sys.executable]


def test_in_strict_mode_nccl_adds_in_rings_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(ranks=4)
    environment = make_environment(config, 0)
    assert COLLECTIVES.items() <= environment.items()
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert make_environment(config, 0)["NCCL_ALGO"] == "Tree"
    fast = config.model_copy(update={"determinism": Determinism(mode="fast")})
    assert "NCCL_PROTO" not in make_environment(fast, 0)


def test_the_address_of_another_name_is_refused() -> None:
    with pytest.raises(NodesMissing, match=r"compute.rendezvous = no.such.invalid:1: no.such.invalid can't be reached"):
        find_address(make_config(nodes=2, rendezvous="no.such.invalid:1").compute)


def test_an_interface_is_found_by_its_address() -> None:
    assert find_interface("127.0.0.1") == next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert find_interface("192.0.2.1") is None


def test_waiting_threads_sleep_soon_unless_the_user_has_chosen_how_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITS:
        monkeypatch.delenv(name, raising=False)
    assert SPINS.items() <= make_environment(make_config(), 0).items()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert not SPINS.keys() & make_environment(make_config(), 0).keys()


def test_a_name_that_slurm_gives_and_nobody_resolves_leads_to_masters_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job the setting is made from the job's list of nodes, so nobody can give another address there."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "no.such.invalid", "SLURM_NNODES": "2"}.items():
        monkeypatch.setenv(name, value)
    job = find_job()
    assert job is not None
    with pytest.raises(NodesMissing) as caught:
        find_address(make_config(nodes=2, rendezvous=job.address).compute)
    assert "set MASTER_ADDR" in caught.value.hint
    with pytest.raises(NodesMissing) as caught:
        find_address(make_config(nodes=2, rendezvous="no.such.invalid:1").compute)
    assert caught.value.hint == "give an address of node 0 that all nodes can reach"
