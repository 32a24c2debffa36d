"""Two machines with addresses of their own, one of which vanishes. Network namespaces stand for the machines."""

from pathlib import Path

import pytest

from tests.support.machines import can_make_namespaces, namespaces, nodes_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.pool,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs the right to make network namespaces"),
]

EPOCHS = 30
SETTINGS = [
    'recipe = "tests.support.failing:failing"', f"epochs = {EPOCHS}", "chunk.steps = 16", "compute.virtual_ranks = 4",
    'compute.nodes = "1:2"', "compute.wait_s = 30", "compute.lost_after_s = 12",
    'compute.rendezvous = "10.231.0.1:29500"',
]  # fmt: skip


def test_a_machine_that_vanishes_is_named_and_the_other_trains_on_alone(tmp_path: Path) -> None:
    with namespaces() as machines, nodes_in(tmp_path, SETTINGS, machines.prefixes) as nodes:
        nodes.start(0)
        nodes.start(1)
        nodes.await_word(1, "training; the ranks write to")
        machines.cut()
        assert nodes.wait(0) == 0, nodes.said(0)
        assert "no heartbeat from node 1 (" in nodes.said(0)
        assert max(nodes.list_commits()) == 16 * EPOCHS
