"""The processes of sinks: killed, stopped and failing, while a run trains."""

import contextlib
import fcntl
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config import Log, RunConfig
from holdfast.extensions.sinks.observer import SinkProcess
from holdfast.extensions.sinks.orders import SinkOrder
from holdfast.store import open_store
from tests.conftest import Engine, Reference
from tests.support.makers import make_line, train
from tests.support.waiting import await_equal

MLFLOW = "tests.support.page_sinks:MLflow"


def make_config(folder: Path, sink: str) -> RunConfig:
    log = Log.model_validate({"folder": str(folder / "logs"), "sinks": [sink]})
    return RunConfig(recipe="m:f", run="run", store=str(folder), log=log)


def kill(process: SinkProcess, number: int) -> None:
    assert process._process is not None
    os.kill(process._process.pid, number)


@pytest.mark.extras("tensorboard")
def test_a_sink_whose_process_was_killed_is_started_again_and_has_no_hole(tmp_path: Path) -> None:
    config, line = make_config(tmp_path, "tensorboard"), make_line(open_store(str(tmp_path)))
    process = SinkProcess("tensorboard")
    for number in (1, 2):
        train(line)
        process.start(config, 1)
        process.tell(SinkOrder())
        await_equal(lambda number=number: len(drawn(tmp_path)), number)
    kill(process, signal.SIGKILL)
    process.await_end(60)
    train(line)
    train(line)
    process.start(config, 1)
    process.tell(SinkOrder(is_end=True, is_complete=True, within_s=60))
    process.await_end(60)
    assert drawn(tmp_path) == [1, 2, 3, 4]


def test_a_process_that_reads_nothing_stops_no_attempt(tmp_path: Path) -> None:
    process = SinkProcess(MLFLOW)
    process.start(make_config(tmp_path, MLFLOW), 1)
    kill(process, signal.SIGSTOP)
    for _ in range(5000):  # more than the pipe holds
        process.tell(SinkOrder())
    process.tell(SinkOrder(is_end=True))
    process.await_end(0)
    kill(process, signal.SIGKILL)
    process.await_end(60)


@pytest.mark.extras("tensorboard")
def test_what_a_dead_attempt_has_committed_is_drawn(tmp_path: Path) -> None:
    config, line = make_config(tmp_path, "tensorboard"), make_line(open_store(str(tmp_path)))
    train(line)
    train(line)
    process = SinkProcess("tensorboard")
    process.start(config, 1)
    assert process._process is not None
    process._process.stdin.close()  # as the system does when it dies
    process.await_end(60)
    assert process._process.poll() == 0
    assert drawn(tmp_path) == [1, 2]


@pytest.mark.extras("tensorboard")
def test_a_sink_waits_until_that_of_the_attempt_before_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, line = make_config(tmp_path, "tensorboard"), make_line(open_store(str(tmp_path)))
    train(line)
    lock = tmp_path / "logs" / "run" / "sink-tensorboard.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        send_all(config, within_s=2)
        assert drawn(tmp_path) == []
    assert [record.message for record in caplog.records] == [
        "the sink tensorboard hasn't taken all data in 2 s; the next holdfast train sends the rest"
    ]
    send_all(config, within_s=60)
    assert drawn(tmp_path) == [1]


def send_all(config: RunConfig, within_s: float) -> None:
    process = SinkProcess("tensorboard")
    process.start(config, 1)
    process.tell(SinkOrder(is_end=True, is_complete=True, within_s=within_s))
    process.await_end(60)


def drawn(folder: Path) -> list[int]:
    """Return the numbers of the commits that TensorBoard has files of."""
    return sorted(int(path.name.split(".")[3]) for path in (folder / "logs" / "tensorboard" / "run").glob("events*"))


@pytest.fixture
def silent_server() -> Iterator[tuple[str, threading.Event]]:
    """Yield the URL of a server that answers nothing, and an event that lets it hang up."""
    hang_up, held = threading.Event(), []

    def hold(server: socket.socket) -> None:
        while not hang_up.wait(0.05):
            with_timeout(server, held)
        for each in (server, *held):
            each.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        thread = threading.Thread(target=hold, args=(server,))
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", hang_up
        hang_up.set()
        thread.join()


def with_timeout(server: socket.socket, held: list[socket.socket]) -> None:
    """Accept a connection, if there is one."""
    with contextlib.suppress(TimeoutError):
        held.append(server.accept()[0])


@pytest.mark.slow
def test_a_run_trains_to_its_end_beside_a_server_that_never_answers(
    engine: Engine, reference: Reference, silent_server: tuple[str, threading.Event]
) -> None:
    url, hang_up = silent_server

    def hang_up_at_the_end() -> None:
        engine.await_commits(9)
        hang_up.set()

    waiting = threading.Thread(target=hang_up_at_the_end)
    waiting.start()
    done = engine.run(f'log.sinks=["{MLFLOW}"]', MLFLOW_TRACKING_URI=url)
    waiting.join()
    assert done.returncode == 0, done.stderr
    assert engine.standing().checkpoint_sha256 == reference.standing.checkpoint_sha256
    assert done.stderr.count(f"the sink {MLFLOW} failed") == 1


@pytest.mark.extras("wandb")
@pytest.mark.slow
def test_a_sink_without_a_login_is_one_warning_with_a_hint(engine: Engine, reference: Reference) -> None:
    done = engine.run('log.sinks=["wandb"]', WANDB_MODE="online", WANDB_API_KEY="")
    assert done.returncode == 0, done.stderr
    assert engine.standing().checkpoint_sha256 == reference.standing.checkpoint_sha256
    (line,) = [line for line in done.stderr.splitlines() if "wandb" in line]
    assert line.startswith("warning: the sink wandb failed")
    assert "wandb login" in line
