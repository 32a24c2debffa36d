"""A Ray cluster on this machine, with real nodes that are added and killed.

It listens on the loopback address alone, and sends no usage data. A process of its own holds it, so that every part of
it ends with that process's standard input: also if the tests are killed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).parents[2]  # tests.conftest has it, too, but takes seconds to import
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # The only setting with which Ray takes 127.0.0.1 for an address, and not for a name of this machine.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_gcs_server_port_wait_time_s": "300",
}
# Ray gives a node 30 s to start, with no setting for it. A busy machine takes longer now and then.
TRIES = 5
# Ray's minimum memory for objects, of which no run has any.
NODE = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 80_000_000}


@dataclass(frozen=True)
class RayCluster:
    """A cluster of nodes with two CPUs each, and a head with none. Nodes have numbers from 1, in order of their start.

    Attributes:
        address: the host and port of its GCS.
    """

    address: str
    requests: IO[str]
    answers: IO[str]

    def add(self, nodes: int = 1) -> None:
        """Add this number of nodes, and wait until they are there."""
        self._ask(f"add {nodes}")

    def kill(self, node: int) -> None:
        """Kill a node with all that runs on it, as if its machine had lost its power."""
        self._ask(f"kill {node}")

    def _ask(self, request: str) -> str:
        print(request, file=self.requests, flush=True)
        answer = self.answers.readline().strip()
        assert answer, f"the cluster has ended at {request!r}"
        return answer


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Run a cluster without nodes for the block; no process of it is left after the block."""
    command = [sys.executable, "-m", __spec__.name]
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, cwd=ROOT,
        env=os.environ | ENVIRONMENT,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            said.seek(0)
            assert address, said.read()
            yield RayCluster(address, process.stdin, process.stdout)
        finally:
            process.stdin.close()
            process.wait()


class Server:
    """The cluster in its own process."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "temp_dir": folder, **NODE}
        self._cluster = retry(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address = self._cluster.address
        self._nodes: list[Any] = []

    def add(self, count: int) -> int:
        for _ in range(count):
            self._nodes.append(retry(lambda: self._cluster.add_node(num_cpus=2, **NODE)))
        return len(self._nodes)

    def kill(self, number: int) -> int:
        raylet = psutil.Process(self._nodes[number - 1].all_processes["raylet"][0].process.pid)
        doomed = [*raylet.children(recursive=True), raylet]
        for signalled in (signal.SIGSTOP, signal.SIGKILL):  # all at one time
            for each in doomed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(signalled)
        return number

    def end(self) -> None:
        """End every process of the cluster."""
        children = psutil.Process().children(recursive=True)
        self._cluster.shutdown()
        kill(children)


def retry(start: Callable[[], Any]) -> Any:
    """Start a part of the cluster; begin again if Ray gives up."""
    for _ in range(TRIES - 1):
        before = psutil.Process().children()
        try:
            return start()
        except Exception:
            traceback.print_exc()
            new = [each for each in psutil.Process().children() if each not in before]
            kill([child for each in new for child in (*each.children(recursive=True), each)])
    return start()


def kill(processes: Iterable[psutil.Process]) -> None:
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def main() -> None:
    """Obey requests from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    folder = tempfile.mkdtemp(prefix="hf-")  # a short path: Ray puts sockets there
    # Ray notes the address of the newest cluster below this folder, which has to be there.
    os.environ["RAY_TMPDIR"] = folder
    (temp_dir := Path(folder, "ray")).mkdir()
    server = None
    try:
        server = Server(str(temp_dir))
        print(server.address, file=answers, flush=True)
        for line in sys.stdin:
            verb, number = line.split()
            print(getattr(server, verb)(int(number)), file=answers, flush=True)
    finally:
        if server is not None:
            server.end()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
