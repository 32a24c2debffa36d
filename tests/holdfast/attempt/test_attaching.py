"""Tests of runs whose ranks another launcher has started, as real processes that die and start again."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import attach
from holdfast.attempt.attaching import settle_slot
from holdfast.config import Compute, RunConfig
from holdfast.errors import ConfigError
from holdfast.machine.processes import MARK_VARIABLE
from holdfast.rank.launchers import Slot
from tests.conftest import IN_SOAK
from tests.support.launchers import ACCELERATE, EPOCHS, STEPS_PER_EPOCH, TORCHRUN, Launched
from tests.support.waiting import WITHIN_S

HOLDFAST = (TORCHRUN[0], "-m", "holdfast.cli")
TWO = Slot("torchrun", 0, 2, 0, 2, 0, "127.0.0.1:29500")
END = EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the content id of the run as ``holdfast train`` trains it with two ranks of its own."""
    own = Launched(tmp_path_factory.mktemp("own"))
    assert own.run(*HOLDFAST, "train", "me.toml", "--set", "compute.ranks=2") == 0, own.said()
    return own.content_id()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    """Yield a run in a folder; kill what is left of it."""
    run = Launched(tmp_path)
    yield run
    run.kill_all()


def check_complete(launched: Launched, content_id: str) -> None:
    """Check that the run is complete and whole, ends on this content id, and has no process any more."""
    assert launched.step() == END, launched.said()
    assert launched.content_id() == content_id
    assert launched.endings()[-1] == "completed"
    assert launched.run(*HOLDFAST, "verify", "r") == 0, launched.said()
    assert launched.find() == {}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_the_ranks_of_a_launcher_train_the_bytes_of_the_command(
    launched: Launched, launcher: tuple[str, ...], reference: str
) -> None:
    assert launched.run(*launcher, "train_me.py") == 0, launched.said()
    assert f"run r is complete: step {END}" in launched.said()
    check_complete(launched, reference)
    newest = launched.journal.newest()
    assert newest is not None
    assert newest.not_rehearsed == "a launcher has started the ranks, so holdfast can't start new ranks to compare with"
    assert launched.run(*launcher, "train_me.py") == 0, launched.said()  # nothing is left to train
    assert launched.endings() == ["completed"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "attempt", pytest.param("1", marks=IN_SOAK)])
def test_a_killed_process_ends_the_launcher_and_the_next_one_goes_on(
    launched: Launched, victim: str, reference: str
) -> None:
    agent = launched.start(*TORCHRUN, "train_me.py")
    launched.await_step(32)
    launched.find()[victim].kill()
    assert agent.wait(WITHIN_S) != 0
    launched.await_end()
    if victim == "1":
        assert "the ranks ended: rank 1 died" in launched.said()
    if victim != "attempt":
        assert launched.endings() == ["rank_crashed"]
    assert launched.run(*TORCHRUN, "train_me.py") == 0, launched.said()
    check_complete(launched, reference)
    assert launched.journal.attempts() == 2


@pytest.mark.slow
def test_torchrun_starts_a_dead_rank_again_by_itself(launched: Launched, reference: str) -> None:
    agent = launched.start(*TORCHRUN, "--max-restarts=2", "train_me.py")
    launched.await_step(32)
    launched.find()["1"].kill()
    assert agent.wait(WITHIN_S) == 0, launched.said()
    launched.await_end()
    assert "the ranks ended: rank 1 died" in launched.said()
    check_complete(launched, reference)
    assert launched.endings() == ["rank_crashed", "completed"]


@pytest.mark.slow
def test_a_killed_launcher_ends_the_attempt_with_the_last_step_committed(launched: Launched, reference: str) -> None:
    agent = launched.start(*TORCHRUN, "train_me.py")
    launched.await_step(32)
    os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
    launched.await_end()
    assert launched.endings() == ["preempted"], launched.said()
    assert "the launcher of the ranks has ended" in launched.said()
    assert launched.run(*TORCHRUN, "train_me.py") == 0, launched.said()
    check_complete(launched, reference)


@pytest.mark.slow
def test_an_attempt_whose_ranks_die_before_they_come_ends(launched: Launched) -> None:
    launched.start(*TORCHRUN, "train_me.py")
    launched.await_process("attempt")
    attempt = launched.find()["attempt"]
    for process in launched.find().values():
        if process != attempt:
            process.kill()
    attempt.wait(60)
    assert not (launched.folder / "runs" / "r" / "attempts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=IN_SOAK)])
def test_a_signal_to_the_launcher_commits_the_last_step(
    launched: Launched, number: signal.Signals, reference: str
) -> None:
    agent = launched.start(*TORCHRUN, "train_me.py")
    launched.await_step(32)
    agent.send_signal(number)
    assert agent.wait(WITHIN_S) != 0
    launched.await_end()
    assert launched.endings() == ["preempted"], launched.said()
    assert f"stopped after step {launched.step()}, which is saved and committed" in launched.said()
    assert launched.run(*TORCHRUN, "train_me.py") == 0, launched.said()
    check_complete(launched, reference)


@IN_SOAK
@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_of_them(launched: Launched, reference: str) -> None:
    agent = launched.start(*TORCHRUN, "train_me.py")
    launched.await_step(32)
    launched.find()["1"].terminate()
    assert agent.wait(WITHIN_S) != 0
    launched.await_end()
    assert launched.endings() == ["preempted"], launched.said()
    assert launched.run(*TORCHRUN, "train_me.py") == 0, launched.said()
    check_complete(launched, reference)


@IN_SOAK
@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_its_launcher_starts_again(tmp_path: Path) -> None:
    hanging = [
        'recipe = "tests.support.failing:hanging"', f"settings = {{how = 'lock', rank = 1, struck = '{tmp_path}/s'}}",
        "extensions.hangs.hung_after_s = 3",
    ]  # fmt: skip
    launched = Launched(tmp_path, hanging)
    try:
        assert launched.run(*TORCHRUN, "--max-restarts=1", "train_me.py") == 0, launched.said()
        assert "rank 1 (process " in launched.said()
        assert re.search(r"hangs in step 5 at .+/failing.py:\d+: no progress", launched.said())
        assert launched.endings() == ["rank_hung", "completed"]
    finally:
        launched.kill_all()


@IN_SOAK
@pytest.mark.slow
def test_of_two_launchers_at_once_the_later_one_owns_the_run(tmp_path: Path) -> None:
    launched = Launched(tmp_path, epochs=10 * EPOCHS)
    try:
        first = launched.start(*TORCHRUN, "train_me.py")
        launched.await_step(16)
        second = launched.start(*TORCHRUN, "train_me.py")
        assert first.wait(WITHIN_S) != 0
        assert "attempt 1 of run 'r' is superseded by attempt 2" in launched.said(0)
        launched.await_step(launched.step() + 16)
        second.terminate()
        assert second.wait(WITHIN_S) != 0
        launched.await_end()
        assert launched.endings() == ["superseded", "preempted"], launched.said()
        assert launched.run(*HOLDFAST, "verify", "r") == 0, launched.said()
    finally:
        launched.kill_all()


@pytest.mark.slow
def test_a_process_without_a_launcher_is_the_only_rank(launched: Launched) -> None:
    assert launched.run(TORCHRUN[0], "train_me.py") == 0, launched.said()
    alone = launched.content_id()
    shutil.rmtree(launched.folder / "runs")
    assert launched.run(*HOLDFAST, "train", "me.toml") == 0, launched.said()
    assert launched.content_id() == alone


@pytest.mark.slow
def test_an_error_of_the_run_ends_all_ranks_with_its_exit_code(tmp_path: Path) -> None:
    launched = Launched(tmp_path, ['recipe = "tests.support.failing:nothing"'])
    try:
        assert launched.run(*TORCHRUN, "train_me.py") == 1
        assert launched.said().count("error: recipe") == 1, launched.said()
        assert launched.said().count("exitcode  : 1 ") == 2
    finally:
        launched.kill_all()


@pytest.mark.slow
def test_an_attempt_that_ends_before_its_ranks_come_tells_them_its_exit_code(tmp_path: Path) -> None:
    launched = Launched(tmp_path, ['recipe = "tests.support.failing:failing"', 'signing_key = "missing.pem"'])
    try:
        assert launched.run(*TORCHRUN, "train_me.py") == 1
        assert launched.said().count("missing.pem") == 1, launched.said()
    finally:
        launched.kill_all()


@pytest.mark.slow
def test_the_command_is_refused_under_torchrun(launched: Launched) -> None:
    assert launched.run(*TORCHRUN, "-m", "holdfast.cli", "train", "me.toml") == 1
    assert "error: torchrun has started 2 processes of this command" in launched.said()
    assert not (launched.folder / "runs").exists()


@pytest.mark.slow
def test_a_script_that_attaches_as_a_rank_imports_it_is_refused(tmp_path: Path) -> None:
    loop = 'import holdfast\nholdfast.attach("me.toml")\n\ndef train(run: holdfast.Run) -> None: ...\n'
    launched = Launched(tmp_path, ['recipe = "train_me:train"'], loop)
    try:
        assert launched.run(*TORCHRUN, "train_me.py") == 1, launched.said()
        assert "holdfast.attach was called in a training process" in launched.said()
    finally:
        launched.kill_all()


@pytest.mark.slow
@pytest.mark.skipif(
    "SLURM_CONF" not in os.environ or not shutil.which("srun"), reason="needs a Slurm cluster: srun and SLURM_CONF"
)
def test_srun_starts_ranks_and_passes_its_end_on(launched: Launched, reference: str) -> None:
    job = f"hf{os.getpid()}"
    srun = (
        "srun", f"--job-name={job}", "--nodes=1", "--ntasks=2", "--overcommit", "--kill-on-bad-exit=1", TORCHRUN[0],
        "train_me.py",
    )  # fmt: skip
    agent = launched.start(*srun)
    launched.await_step(32)
    subprocess.run(["scancel", "--signal=TERM", f"--name={job}"], check=True)
    assert agent.wait(WITHIN_S) == 3, launched.said()
    launched.await_end()
    assert launched.endings() == ["preempted"], launched.said()
    assert launched.run(*srun) == 0, launched.said()
    check_complete(launched, reference)


@pytest.mark.parametrize(
    ("compute", "slot", "problem"),
    [
        ({"ranks": 4}, TWO, "compute.ranks = 4: torchrun has started 2 ranks on this machine"),
        ({"ranks": 2}, Slot(), "compute.ranks = 2: this process was started without a launcher, as 1 rank"),
        ({"nodes": 2, "rendezvous": "a:1"}, TWO, "compute.nodes = 2: torchrun has started ranks on 1 machine"),
        (
            {"nodes": "2:3", "rendezvous": "a:1", "virtual_ranks": 8}, TWO,
            "compute.nodes = 2:3: torchrun has started ranks on 1 machine",
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_asks_for_other_ranks_than_the_launchers_is_refused(
    compute: dict[str, object], slot: Slot, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        settle_slot(RunConfig(recipe="m:f", run="r", compute=Compute.model_validate(compute)), slot)


@pytest.mark.parametrize("compute", [{}, {"ranks": "all"}, {"ranks": 2, "nodes": 1}])
def test_a_run_has_the_ranks_of_its_launcher(compute: dict[str, object]) -> None:
    config = RunConfig(recipe="m:f", run="r", compute=Compute.model_validate(compute))
    settled = settle_slot(config, TWO)
    assert (settled.compute.ranks, settled.compute.nodes, settled.compute.launcher) == (2, 1, "attached")
    assert settled.identity == config.with_ranks(2).identity
    wide = settle_slot(RunConfig(recipe="m:f", run="r"), Slot("srun", 3, 6, 1, 2, 1, "n0:1"))
    assert wide.identity == config.with_ranks(6).identity


def test_a_rank_does_not_attach_again(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(MARK_VARIABLE, "m")
    with pytest.raises(SystemExit) as ended:
        attach("me.toml")
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert said.startswith(
        "error: holdfast.attach was called in a training process that holdfast has started (a rank)\nhint: "
    )
