"""Orphans, ranks whose attempt has died: a new attempt waits for them, and each of them ends after a bound."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.config import RunConfig
from holdfast.machine.processes import ATTEMPT_VARIABLE
from holdfast.rank import orphans
from holdfast.rank.process import CONFIG_VARIABLE
from tests.support.waiting import await_equal

HANGS = (
    "import holdfast.rank.orphans as each; each.ENDS_WITHIN_S = 0.3; each.end_if_orphaned(); [0 for _ in iter(int, 1)]"
)


def make_config(folder: Path, **more: object) -> RunConfig:
    known = {"recipe": "tests.support.toy:toy", "run": "run", "store": str(folder), "resume": {"stop_within_s": 0.5}}
    return RunConfig.model_validate(known | more)


@contextmanager
def rank_of(config: RunConfig, attempt: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that has a rank's command line and variables."""
    described = {ATTEMPT_VARIABLE: str(attempt), CONFIG_VARIABLE: json.dumps(config.model_dump(mode="json"))}
    command = [sys.executable, "-c", "input()", "-m", "holdfast.rank"]
    rank = subprocess.Popen(command, env=os.environ | described, stdin=subprocess.PIPE)
    try:
        yield rank
    finally:
        rank.kill()
        rank.communicate()


def find_dead() -> int:
    """Return the id of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_a_new_attempt_waits_for_the_orphans_of_its_run_alone_and_then_kills_them(tmp_path: Path) -> None:
    config, dead = make_config(tmp_path), find_dead()
    other = make_config(tmp_path, run="other")
    with rank_of(config, dead) as orphan, rank_of(config, os.getpid()) as live, rank_of(other, dead) as of_another:
        await_equal(lambda: orphans._find_orphans(config), [orphan.pid])
        began = time.monotonic()
        orphans.end_orphans(config)
        assert 0.5 <= time.monotonic() - began < 10
        assert orphan.wait() == -9
        assert (live.poll(), of_another.poll()) == (None, None)
        orphans.end_orphans(config)  # none is left


def test_an_orphan_that_ends_by_itself_is_not_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path, resume={"stop_within_s": 60.0})
    with rank_of(config, find_dead()) as orphan:
        await_equal(lambda: orphans._find_orphans(config), [orphan.pid])
        assert orphan.stdin is not None
        orphan.stdin.write(b"\n")
        orphan.stdin.flush()
        orphans.end_orphans(config)
    assert orphan.returncode == 0
    assert "killed" not in caplog.text


@pytest.mark.parametrize("is_rank", [True, False])
def test_code_that_hangs_ends_some_time_after_its_attempt(is_rank: bool) -> None:
    """A rank of another launcher has an input of its own, whose end says nothing."""
    variables = os.environ | ({ATTEMPT_VARIABLE: "1"} if is_rank else {})
    rank = subprocess.Popen([sys.executable, "-c", HANGS], env=variables, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        time.sleep(0.5)
        assert rank.poll() is None
        _, said = rank.communicate(timeout=60 if is_rank else 3)
        assert rank.returncode == 1
        assert b"most recent call first" in said
    except subprocess.TimeoutExpired:
        assert not is_rank
    finally:
        rank.kill()
        rank.communicate()
