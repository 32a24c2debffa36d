"""Several nodes train one run: the same command on each, torchrun's rendezvous between them."""

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.server import free_port
from tests.conftest import IN_SOAK
from tests.support.machines import LONG, LONG_STEPS, Nodes, nodes_in

pytestmark = [pytest.mark.slow, pytest.mark.pool]


FREE_WITHIN_S = 100  # a third of torchrun's own time

MINE = """
from holdfast import Recipe
from tests.support.failing import failing

def build(lr: float = LR) -> Recipe:
    return failing()
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Yield two nodes that meet on this machine, with a rank each."""
    meeting = ["compute.nodes = 2", f'compute.rendezvous = "127.0.0.1:{free_port()}"']
    with nodes_in(tmp_path, [*LONG, *meeting]) as made:
        yield made


def test_nodes_rehearse_together(nodes: Nodes, undisturbed: str) -> None:
    """Their ranks end, and new ones meet again."""
    for node in (0, 1):
        nodes.start(node, "--set", "proof.rehearse=first", HOLDFAST_HOST=f"host-{node}")
    assert nodes.wait(0) == 0, nodes.said(0)
    assert nodes.wait(1) == 0, nodes.said(1)
    assert "exactly as the running ranks did" in nodes.said(0)
    assert {(*commit.hosts,) for commit in nodes.journal.candidates()} == {("host-0", "host-1")}
    assert nodes.list_commits()[LONG_STEPS] in undisturbed


def test_a_node_that_is_told_to_end_stops_all_and_another_takes_its_place(nodes: Nodes, undisturbed: str) -> None:
    """The ranks of both nodes stop at one step, which is saved; the attempt waits for the node and continues."""
    nodes.start(0)
    nodes.start(1)
    nodes.await_step(16)
    nodes.started[1].send_signal(signal.SIGTERM)
    assert nodes.wait(1) == 143, nodes.said(1)
    nodes.start(1)
    assert nodes.wait(0) == 0, nodes.said(0)
    assert nodes.wait(1) == 0, nodes.said(1)
    assert nodes.said(0).count("waiting at 127.0.0.1:") == 2
    assert "run r is complete" in nodes.said(1)
    assert nodes.list_commits()[LONG_STEPS] in undisturbed, "one rank ends on different bytes"


def test_nodes_with_other_code_or_settings_are_refused_by_name(nodes: Nodes, tmp_path: Path) -> None:
    nodes.settings = ['recipe = "mine:build"', *nodes.settings[1:]]
    for node, code in enumerate(("0.01", "0.02")):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "mine.py").write_text(MINE.replace("LR", code))
        nodes.start(node, "--set", f"epochs={node + 1}", PYTHONPATH=str(tmp_path / str(node)))
    assert nodes.wait(0) == nodes.wait(1) == 1
    for said in map(nodes.said, (0, 1)):
        host = socket.gethostname()
        assert (
            f"error: node 0 ({host}) and node 1 ({host}) would train differently: epochs is 1 on the first, 2 on "
            "the second"
        ) in said
        assert "; sources.mine is " in said
        assert "Traceback" not in said


@IN_SOAK
def test_a_store_that_one_node_cannot_reach_is_named(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(0)
    nodes.start(1, "--set", f"store={tmp_path}/another")
    assert nodes.wait(0) == nodes.wait(1) == 3
    assert f"node 1 ({socket.gethostname()}) does not share the store {tmp_path}/another: attempt 1" in nodes.said(0)


@IN_SOAK
def test_an_error_on_another_node_reaches_the_attempt(nodes: Nodes) -> None:
    """The ranks of node 0 only lose their connections."""
    for node in (0, 1):
        nodes.start(node, "--set", "settings.how=raise", "--set", "settings.rank=1")
    assert nodes.wait(0) == 3
    error = nodes.said(0).partition("error: ")[2]
    assert f"training failed in step 2 of rank 1 on {socket.gethostname()}: " in error
    assert "tests/support/failing.py:" in error
    assert nodes.wait(1) == 3
    assert "error: training failed in step 2 of rank 1" in nodes.said(1)


def test_a_port_that_is_taken_is_named(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        nodes.start(0, "--set", f"compute.rendezvous=127.0.0.1:{port}")
        assert nodes.wait(0) == 3
    assert f"error: compute.rendezvous = 127.0.0.1:{port}: port {port} is taken on" in nodes.said(0)
    assert "Traceback" not in nodes.said(0)


def test_a_killed_command_frees_the_port_for_the_next(nodes: Nodes, undisturbed: str) -> None:
    """torchrun would keep it for 300 s, while it waits for the other node's."""
    host, _, port = nodes.settings[-1].split('"')[1].rpartition(":")
    nodes.start(0)
    nodes.start(1)
    nodes.await_step(16)
    nodes.started[0].kill()
    nodes.wait(0)
    deadline = time.monotonic() + FREE_WITHIN_S
    while is_served(host, int(port)):
        assert time.monotonic() < deadline, "the port is still taken"
        time.sleep(0.2)
    nodes.start(0)
    assert nodes.wait(0) == nodes.wait(1) == 0, nodes.said(0)
    assert nodes.list_commits()[LONG_STEPS] in undisturbed


def is_served(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_node_that_does_not_come_is_waited_for_and_missed(nodes: Nodes) -> None:
    nodes.start(0, "--set", "compute.wait_s=2")
    assert nodes.wait(0) == 3
    assert "for 2 nodes, this one included, for up to 2 s" in nodes.said(0)
    assert "error: compute.nodes = 2: fewer than 2 nodes connected to 127.0.0.1:" in nodes.said(0)


def test_a_node_gives_up_if_no_attempt_comes(nodes: Nodes) -> None:
    nodes.start(1, "--set", "compute.wait_s=2")
    assert nodes.wait(1) == 3
    assert "error: compute.rendezvous = 127.0.0.1:" in nodes.said(1)
    assert "can't be reached from" in nodes.said(1)
