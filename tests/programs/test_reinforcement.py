"""The programs of docs/reinforcement-learning.md, as they are on the page: killed and continued, the same bytes.

``sac.py`` is one of the gallery's scripts, whose tests kill it.
"""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.programs.trials import COMMAND, list_warnings
from tests.support.lives import Lives
from tests.support.rehearsed import REHEARSED, Program, find_straight
from tests.support.stopped import STOP

pytestmark = [pytest.mark.slow, pytest.mark.extras("gymnasium", "stable_baselines3", "tensorboard")]
PAGE = (ROOT / "docs" / "reinforcement-learning.md").read_text("utf-8")
PROGRAMS = dict(re.findall(r"^This is `(\w+\.py)`.*?^```python\n(.*?)^```$", PAGE, re.M | re.S))
# Small enough for a second each: the steps of an epoch stay as the page has them.
SETTINGS = {
    "ppo.py": {"settings.num_steps": 16, "settings.hidden": 8},
    "sb3.py": {"settings.n_steps": 64},
}
CHUNKS = {"ppo.py": 8, "sb3.py": 4}


def write(folder: Path, file: str, code: str) -> str:
    (folder / file).write_text(code)
    return f"{folder / file}:train"


@pytest.mark.parametrize("file", CHUNKS)
def test_killed_inside_a_chunk_it_ends_on_the_same_bytes(nursery: Lives, tmp_path: Path, file: str) -> None:
    recipe, chunk = write(tmp_path, file, PROGRAMS[file]), CHUNKS[file]
    program = Program(nursery, tmp_path / "killed", recipe, SETTINGS[file], 1, f"steps = {chunk}", COMMAND)
    straight = find_straight(nursery, tmp_path / "straight", program)
    first = program.train("proof.rehearse=off", **{STOP: f"SIGKILL:{chunk + 3}:{tmp_path}/struck"})
    assert first.returncode == -9, first.stderr
    assert program.find_step() == chunk
    done = program.train(*REHEARSED)
    assert done.returncode == 0, done.stderr
    assert list_warnings([first.stderr, done.stderr]) == []
    assert program.find_content() == straight


def test_a_forgotten_replay_buffer_is_named_before_a_writer(nursery: Lives, tmp_path: Path) -> None:
    code = PROGRAMS["sac.py"].replace("env=env, rb=rb, state=state", "env=env, state=state")
    code = code.replace("    for step in", "    writer = SummaryWriter(tempfile.mkdtemp())\n    for step in", 1)
    code = code.replace(
        "        step.log(loss=q_loss,", "        writer.add_scalar('a', 1.0)\n        step.log(loss=q_loss,"
    )
    code = f"import tempfile\nfrom torch.utils.tensorboard import SummaryWriter\n{code}"
    recipe = write(tmp_path, "forgetful.py", code)
    settings = {"settings.learning_starts": 20, "settings.hidden": 8}
    program = Program(nursery, tmp_path / "run", recipe, settings, 1, "steps = 40", COMMAND)
    done = program.train(*REHEARSED)
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(
        r"would not continue exactly: .*?; \S+forgetful.py:\d+: rb\.\w+ .*?: run\.keep\(rb=vars\(rb\)\)", error
    )
    assert "writer" not in error.partition("rb.")[0]
