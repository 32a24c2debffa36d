"""Commands on the nodes of one run: on this machine, or in network namespaces that stand for machines."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, ROOT

# The recipe and settings of a run that is long enough to interrupt it, and trains the same bytes on any nodes.
EPOCHS = 12
LONG = [
    'recipe = "tests.support.failing:failing"',
    f"epochs = {EPOCHS}",
    "chunk.steps = 8",
    "compute.virtual_ranks = 2",
]
LONG_STEPS = 16 * EPOCHS


@dataclass
class Nodes:
    """Starts ``holdfast train`` as the nodes of one run, which is in a folder.

    Attributes:
        settings: the lines of the configuration beside those that every run has.
        prefixes: the words before the command of each node, such as those that choose a namespace.
    """

    folder: Path
    settings: Sequence[str]
    prefixes: Sequence[Sequence[str]] = ((), ())
    started: dict[int, "subprocess.Popen[str]"] = field(default_factory=dict)

    @property
    def journal(self) -> Journal:
        return Journal(open_store(str(self.folder / "runs")), "r")

    def write(self, node: int) -> Path:
        """Write a node's configuration; return its path."""
        lines = [
            'run = "r"', f"store = {json.dumps(str(self.folder / 'runs'))}", 'compute.device = "cpu"',
            f"log.folder = {json.dumps(str(self.folder / 'logs'))}", "log.every = 1", *self.settings,
        ]  # fmt: skip
        path = self.folder / f"node{node}.toml"
        path.write_text("\n".join(lines))
        return path

    def start(self, node: int, *options: str, **environment: str) -> "subprocess.Popen[str]":
        """Start the command on a node. Its output goes to a file, so that nobody has to read it."""
        command = [*self.prefixes[node], sys.executable, "-m", "holdfast.cli", "train", str(self.write(node)), *options]
        with (self.folder / f"node{node}.out").open("a") as out:
            self.started[node] = subprocess.Popen(
                command, stdout=out, stderr=out, text=True, cwd=ROOT,
                env={**os.environ, "HOLDFAST_NODE": str(node), **environment},
            )  # fmt: skip
        return self.started[node]

    def said(self, node: int) -> str:
        """Return what the commands of a node have printed."""
        return (self.folder / f"node{node}.out").read_text()

    def wait(self, node: int) -> int:
        """Wait for the end of a node's command; return its exit code."""
        return self.started[node].wait(COMMAND_WITHIN_S)

    def await_step(self, step: int) -> None:
        """Wait until the run has a commit at this step, or later."""
        self._wait(lambda: self.step() >= step)

    def await_word(self, node: int, word: str) -> None:
        """Wait until a node's command has printed a text."""
        self._wait(lambda: word in self.said(node))

    def step(self) -> int:
        """Return the step of the newest commit; 0 if there is none."""
        newest = self.journal.newest()
        return newest.step if newest else 0

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + COMMAND_WITHIN_S
        while not is_done():
            has_failed = any(process.poll() for process in self.started.values())
            if has_failed or time.monotonic() > deadline:
                raise AssertionError("\n".join(map(self.said, self.started)))
            time.sleep(0.05)

    def kill(self, node: int) -> None:
        """Kill a node: its command and all of its ranks."""
        process = self.started[node]
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(process.pid)
            for each in [own, *own.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait(COMMAND_WITHIN_S)

    def list_commits(self) -> dict[int, str]:
        """Return the content id of each commit, by step."""
        return {commit.step: commit.checkpoint_sha256 for commit in self.journal.candidates()}


@contextlib.contextmanager
def nodes_in(folder: Path, settings: Sequence[str], prefixes: Sequence[Sequence[str]] = ((), ())) -> Iterator[Nodes]:
    """Yield the nodes of a run; kill those that are left after the block."""
    nodes = Nodes(folder, settings, prefixes)
    try:
        yield nodes
    finally:
        for node in nodes.started:
            nodes.kill(node)


@dataclass(frozen=True)
class Namespaces:
    """Two network namespaces with a link between them, which stand for two machines.

    Attributes:
        names: the namespaces.
        addresses: the address of each on the link.
    """

    names: tuple[str, str]
    addresses: tuple[str, str]

    @property
    def prefixes(self) -> list[list[str]]:
        """Return the words before a command in each namespace."""
        return [["ip", "netns", "exec", name] for name in self.names]

    def cut(self) -> None:
        """Cut the link: packets are lost, and no connection ends."""
        run_ip("-n", self.names[1], "link", "set", self.names[1], "down")


@contextlib.contextmanager
def namespaces() -> Iterator[Namespaces]:
    """Yield two network namespaces; remove them after the block."""
    names = (f"hf{os.getpid()}a", f"hf{os.getpid()}b")
    addresses = ("10.231.0.1", "10.231.0.2")
    try:
        for name in names:
            run_ip("netns", "add", name)
        run_ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            run_ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for link in (name, "lo"):
                run_ip("-n", name, "link", "set", link, "up")
        yield Namespaces(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_make_namespaces() -> bool:
    """Return whether this user may make network namespaces here."""
    name = f"hf{os.getpid()}t"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    if made:
        run_ip("netns", "del", name)
    return made
