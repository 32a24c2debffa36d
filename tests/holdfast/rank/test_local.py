"""The process that starts the ranks of one machine kills those that don't end, and leaves those alone that save."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.machine.heartbeats import HEARTBEATS_VARIABLE, Heartbeats
from holdfast.rank.local import make_local_command
from tests.support.waiting import await_equal

KILL_S, SAVES_S = 0.2, 1.5
# A rank that doesn't end at a signal, in a phase. It ends by itself after a while, and leaves a file then.
RANK = """
import os, signal, sys, time
from pathlib import Path
from holdfast.machine import heartbeats
signal.signal(signal.SIGTERM, signal.SIG_IGN)
heartbeats.join()
heartbeats.begin(heartbeats.Phase[sys.argv[1]])
Path(sys.argv[2], "began-" + os.environ["RANK"]).touch()
while not Path(sys.argv[2], "told").exists():
    time.sleep(0.01)
time.sleep(float(sys.argv[3]))
Path(sys.argv[2], "ended-" + os.environ["RANK"]).touch()
"""


@pytest.mark.parametrize(("phase", "is_spared"), [("SAVING", True), ("STEP", False)])
def test_ranks_that_were_told_to_end_are_killed_unless_they_save(tmp_path: Path, phase: str, is_spared: bool) -> None:
    heartbeats = Heartbeats(2)
    takes_s = SAVES_S if is_spared else 600.0
    command = make_local_command(2, KILL_S, [sys.executable, "-c", RANK, phase, str(tmp_path), str(takes_s)])
    with subprocess.Popen(command, env=os.environ | {HEARTBEATS_VARIABLE: str(heartbeats.path)}) as starter:
        await_equal(lambda: len([*tmp_path.glob("began-*")]), 2)
        began = time.monotonic()
        starter.terminate()
        (tmp_path / "told").touch()
        starter.wait()
    heartbeats.close()
    assert time.monotonic() - began > (SAVES_S if is_spared else KILL_S)
    assert len([*tmp_path.glob("ended-*")]) == (2 if is_spared else 0)
