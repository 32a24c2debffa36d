"""One run through deaths, a rollback and a change of machine: every sink shows each step once, as never interrupted."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.checkpoint import PAYLOAD
from holdfast.keeping.verification import verify_run
from holdfast.looking.sinks import find_id
from tests.conftest import Engine, Reference
from tests.support.curves import Curves, find_run, read_mlflow, read_tensorboard, read_trackio, read_wandb
from tests.support.lives import Lives
from tests.support.processes import command_of, variables_of
from tests.support.stopped import STOP
from tests.support.waiting import await_equal

pytestmark = [pytest.mark.slow, pytest.mark.extras("tensorboard", "trackio", "wandb")]

STEPS = list(range(1, 31))
PAGE = "tests.support.page_sinks"
FLOAT32 = 1e-6  # TensorBoard keeps single precision


@dataclass(frozen=True)
class Lived:
    """The run after its last life.

    Attributes:
        first: the folder of the machine of the first three lives.
        second: the folder of the machine of the last life.
        url: of MLflow's server; empty if there is none.
    """

    engine: Engine
    first: Path
    second: Path
    url: str


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, nursery: Lives, mlflow_url: str) -> Lived:
    """Train a run in four lives.

    The first life is killed with its sinks after a commit that they have not drawn. The second is preempted, and its
    newest checkpoint damaged, which the sinks have drawn. The third falls back to an earlier one, trains again and is
    killed. The fourth is another machine's.
    """
    folder = tmp_path_factory.mktemp("lived")
    engine, first, second = Engine(folder, {}, nursery=nursery), folder / "one", folder / "two"
    sinks = ["tensorboard", "wandb", f"{PAGE}:Trackio", *([f"{PAGE}:MLflow"] if mlflow_url else [])]

    def live(machine: Path, stop: str = "", **variables: str) -> int:
        variables |= {"TRACKIO_DIR": f"{machine}/trackio", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": mlflow_url}
        variables |= {STOP: stop}
        options = ["--set", f"log.sinks={json.dumps(sinks)}", "--set", f'log.folder="{machine}"']
        options += ["--observer", "tests.support.stopped:StopAttempt"]
        code = engine.call("main", "train", str(engine.config), *options, **variables).returncode
        await_end_of_sinks(machine)
        return code

    assert live(first, HOLDFAST_FAULT=f"commit-recorded:2:both:{folder}/struck") == -signal.SIGKILL
    assert live(first, "SIGTERM:14") == 128 + signal.SIGTERM
    newest = engine.journal().newest()
    assert newest is not None
    assert steps_of(read_tensorboard(first))[-1] == newest.step, "the sinks have not drawn the commit to be damaged"
    payload = engine.run_folder / newest.path / PAYLOAD
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    assert live(first, "SIGKILL:22") == -signal.SIGKILL
    assert engine.journal().is_quarantined(newest.number)
    assert live(second) == 0
    return Lived(engine, first, second, mlflow_url)


def await_end_of_sinks(machine: Path) -> None:
    """Wait until the sinks that wrote to a machine's folder have ended, as they do soon after their attempt."""
    await_equal(lambda: list(find_sinks(machine)), [])


def find_sinks(machine: Path) -> Iterator[int]:
    for process in psutil.process_iter():
        is_sink = "holdfast.extensions.sinks" in command_of(process)
        folder = variables_of(process).get("TRACKIO_DIR", "") if is_sink else ""
        if folder.startswith(str(machine)):
            yield process.pid


def steps_of(curves: Curves) -> list[int]:
    return [step for step, _ in curves["train/loss"]]


def expect(reference: Reference) -> Curves:
    """Return the curves of the run that was never interrupted."""
    lines: list[dict[str, Any]] = reference.metrics
    assert [line["step"] for line in lines] == STEPS
    return {
        "train/loss": [(line["step"], line["loss"]) for line in lines],
        "train/grad_norm": [(line["step"], line["grad_norm"]) for line in lines],
        "train/lr/0": [(line["step"], line["lrs"][0]) for line in lines],
        "train/lr/1": [(line["step"], line["lrs"][1]) for line in lines],
        "eval/weight": [(line["step"], line["metrics"]["weight"]) for line in lines if "metrics" in line],
    }


def assert_same(curves: Curves, expected: Curves, relative: float = 0.0) -> None:
    """Assert that these are the expected curves, and beside them only the number of the attempt."""
    assert curves.keys() == {*expected, "run/attempt"}
    for name, points in expected.items():
        assert [step for step, _ in curves[name]] == [step for step, _ in points], name
        values = [value for _, value in points]
        assert [value for _, value in curves[name]] == pytest.approx(values, rel=relative, abs=0), name


def test_sinks_change_no_byte_of_the_run(lived: Lived, reference: Reference) -> None:
    assert lived.engine.standing().checkpoint_sha256 == reference.standing.checkpoint_sha256
    report = verify_run(lived.engine.journal())
    assert report.problems == []


def test_tensorboard_shows_each_step_once(lived: Lived, reference: Reference) -> None:
    assert_same(read_tensorboard(lived.second), expect(reference), FLOAT32)


def test_tensorboard_forgets_the_commit_that_was_rolled_back(lived: Lived) -> None:
    steps = steps_of(read_tensorboard(lived.first))
    assert steps == STEPS[: len(steps)]
    assert len(steps) >= 14
    names = {path.name.split(".")[3] for path in (lived.first / "tensorboard" / "toy").iterdir()}
    assert not {f"{number:010d}" for number in lived.engine.journal().numbers("quarantine")} & names


def test_trackio_shows_each_step_once(lived: Lived, reference: Reference) -> None:
    assert_same(read_trackio(lived.second), expect(reference))
    steps = steps_of(read_trackio(lived.first))
    assert steps == STEPS[: len(steps)]


def test_the_offline_folders_of_wandb_have_each_step_once(lived: Lived, reference: Reference) -> None:
    assert_same(read_wandb(lived.first, lived.second), expect(reference))
    assert steps_of(read_wandb(lived.second)), "the second machine has continued the curve"


def test_mlflow_shows_each_step_once(lived: Lived, reference: Reference) -> None:
    if not lived.url:
        pytest.skip("MLflow is installed by make test-extras, where pip can")
    run_id = find_id(lived.engine.journal())
    assert_same(read_mlflow(lived.url, run_id), expect(reference))
    run = find_run(lived.url, run_id)
    assert (run["info"]["run_name"], run["info"]["status"]) == ("toy", "FINISHED")
