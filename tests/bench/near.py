"""What a near folder spares a run whose store is as slow as a bucket: restarts, lost steps, and a notice too short.

Two runs are alike but for the near folder, and their lives end alike: by a kill after a commit, by a kill while a
chunk's save is on its way to the store, and by a notice that is shorter than that way.
"""

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from holdfast.journal import Journal
from holdfast.store.local import LocalStore
from holdfast.store.permission import STORES
from tests.bench.cold import WITHIN_S
from tests.bench.flow import command, list_tree, write_config
from tests.bench.frame import Benchmark, Row, compare, scratch
from tests.bench.recipe import read_steps
from tests.bench.slow import LATENCY_S, RATE_VARIABLE, SCHEME

# The store's bytes a second for each state: so that a save takes 5 or 10 s, as it does for larger ones on a bucket.
RATE = {"100 MB": 20e6, "1 GB": 100e6}
# Steps of a chunk: enough for a save to be durable on the store before the next begins.
CHUNK = 80
CHUNKS = 1000
# Seconds after a chunk's last step until a kill, and from a notice to the kill: too short for the store.
AFTER_S = {"100 MB": 3.0, "1 GB": 6.0}
ROUNDS, FULL_ROUNDS = 1, 5
FIGURES = {
    "restart, to the first new step": "s",
    "part of this restart: from the ranks' start to the first step": "s",
    "steps lost by a kill in a save": "steps",
    "restart after a kill in a save": "s",
    "steps lost by a short notice": "steps",
    "restart after a short notice": "s",
    "a save is durable on the store": "s",
}


def run(full: bool) -> list[Row]:
    """Measure both runs in turn, and hold the near folder against the store alone."""
    return [row for size in ("100 MB", *(["1 GB"] if full else [])) for row in _measure(size, full)]


def _measure(size: str, full: bool) -> list[Row]:
    samples: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(FULL_ROUNDS if full else ROUNDS):
        for is_near, found in samples.items():
            with scratch() as folder, _slowed(RATE[size]):
                found.append(_Lives(Path(folder, "first"), size, is_near=is_near).measure())
    far, near = ([statistics.median(each) for each in zip(*found, strict=True)] for found in samples.values())
    state = f"{size}, store of {RATE[size] / 1e6:.0f} MB/s, {LATENCY_S * 1e3:.0f} ms"
    return [
        compare(state, name, ours, "store alone", other or None, unit=unit)
        for (name, unit), ours, other in zip(FIGURES.items(), near, far, strict=True)
    ]


@contextlib.contextmanager
def _slowed(rate: float) -> Iterator[None]:
    """Let the processes that are started in the block use the slow store."""
    os.environ |= {STORES: f"{SCHEME},/", RATE_VARIABLE: str(rate)}
    try:
        yield
    finally:
        del os.environ[STORES], os.environ[RATE_VARIABLE]


class _Lives:
    """A run on the slow store, whose lives end as they are told to."""

    def __init__(self, folder: Path, size: str, *, is_near: bool) -> None:
        folder.mkdir()
        self._folder, self._after_s = folder, AFTER_S[size]
        self._config = write_config(folder, size, CHUNK, CHUNKS, 1)
        text = self._config.read_text().replace(f'"{folder}/runs"', f'"{SCHEME}{folder}/runs"')
        near = f'[near]\nfolder = "{folder}/near"\n' if is_near else ""
        self._config.write_text(text + near)
        self._journal = Journal(LocalStore(f"{folder}/runs"), "bench")
        self._step = 0  # the last one that was trained

    def measure(self) -> list[float]:
        """Return the figures of `FIGURES`, up to a durable save."""
        self._live(commits=2)
        restart_s, _ = self._live(commits=3)
        own_s = self._journal.read_commit(self._journal.newest_number()).restart_s
        self._live(CHUNK, after_s=self._after_s)
        after_kill_s, lost = self._live(CHUNK // 2, after_s=self._after_s, has_notice=True)
        after_notice_s, lost_by_notice = self._live(1)
        commits = [self._journal.read_commit(number) for number in self._journal.numbers("commits")]
        save_s = statistics.median(commit.save_s for commit in commits if commit.why == "chunk")
        return [restart_s, own_s, lost, after_kill_s, lost_by_notice, after_notice_s, save_s]

    def _live(
        self, steps: int = 1, *, commits: int = 0, after_s: float = 0.0, has_notice: bool = False
    ) -> tuple[float, int]:
        """Start the run; once it has some commits, and some seconds after some new steps, kill all of it.

        Args:
            has_notice: whether SIGTERM comes before these seconds.

        Returns:
            The seconds to the first new step, and the steps before it that were lost.
        """
        began = time.time()
        with command("tests.bench.life", self._config) as process:
            first_s = self._await(process, began, 1)[0] - began
            newest = self._journal.newest()
            start = newest.step if newest else 0
            self._await(process, began, steps)
            while self._journal.newest_number() < commits:
                self._check(process, began)
                time.sleep(0.01)
            found = list_tree(process)
            if has_notice:
                process.terminate()
            time.sleep(after_s)
            for each in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        lost, self._step = self._step - start, start + len(self._list_steps(began))
        return first_s, lost

    def _await(self, process: "subprocess.Popen[bytes]", began: float, steps: int) -> list[float]:
        while len(done := self._list_steps(began)) < steps:
            self._check(process, began)
            time.sleep(0.01)
        return done

    def _check(self, process: "subprocess.Popen[bytes]", began: float) -> None:
        if process.poll() is not None or time.time() - began > WITHIN_S:
            raise RuntimeError((self._folder / "output").read_text()[-2000:])

    def _list_steps(self, began: float) -> list[float]:
        path = self._folder / "steps"
        return [each for each in read_steps(path) if each > began] if path.exists() else []


BENCHMARK = Benchmark(
    name="near",
    about=(
        "A run with a near folder beside the same run without, on a store that is slowed to a bucket's speed, both "
        "ended alike: by SIGKILL of everything after a commit, by SIGKILL while a save is on its way to the store, and "
        "by SIGTERM with SIGKILL before a save is there. A restart is the time from the command to the "
        "first new step."
    ),
    run=run,
)
