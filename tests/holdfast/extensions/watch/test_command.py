"""``holdfast watch`` as a person uses it: in a real terminal, without one, on S3, and while the run trains."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli import app, run_app
from holdfast.errors import RunGone
from holdfast.extensions.watch.lines import follow
from holdfast.extensions.watch.reading import TURNS, RunReader
from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, ROOT, Engine
from tests.support.faulty import DENIED, Faulty, behind_faults
from tests.support.terminals import Terminal
from tests.support.watched import add_commit, make_long_run

WATCH = (sys.executable, "-m", "holdfast.cli", "watch")


def run(store: Path) -> Journal:
    return make_long_run(str(store), "long", 12, epochs=24, is_ended=False)


# ---- without a terminal


def test_a_finished_run_is_printed_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_long_run(str(tmp_path), "long", 12)
    assert run_app(app, ["watch", f"{tmp_path}/long"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "attempt 1: fresh on host"
    assert lines[1] == "commit 1: steps 0-10  avg_loss 2.0000  5 steps/s  epoch-0001"
    assert lines[4] == "attempt 1 ended at step 30: preempted: as it was told"
    assert lines[-3:] == [
        "commit 12: steps 110-120  avg_loss 0.3077  5 steps/s  epoch-0012",
        "attempt 4 ended at step 120: completed",
        "long is complete",
    ]


def test_new_commits_are_printed_as_they_come(tmp_path: Path) -> None:
    journal = run(tmp_path)
    polls = 0

    def sleep(seconds: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 7:
            add_commit(journal)

    reader = RunReader(Journal(open_store(str(tmp_path)), "long"))
    reader.begin()
    lines = follow(reader, 2.0, sleep)
    while not (line := next(lines)).startswith("commit 13: "):
        pass
    assert line == "commit 13: steps 120-130  avg_loss 0.2857  5 steps/s  epoch-0013"
    assert polls <= 7 + len(TURNS)


def test_lost_records_end_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = make_long_run(str(tmp_path), "long", 12)
    Path(journal.store.url, "commits/00000007.json").write_text("\x1b[2J")
    assert run_app(app, ["watch", f"{tmp_path}/long"]) == 2
    out = capsys.readouterr().out
    assert "note: commits/00000007.json can't be read" in out
    assert out.endswith("long is complete\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none"], "'none' is neither a run nor a store"),
        (["runs/long", "--every", "0"], "--every 0: expected at least 0.2 seconds"),
        (["runs/long", "--every", "nan"], "--every nan: expected at least 0.2 seconds"),
        (["runs/later"], "run 'later' is stored in format 9; this version of Holdfast reads formats up to 1"),
    ],
)
def test_wrong_use_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    error: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "runs")
    later = make_long_run("runs", "later", 1)
    later.store.replace("run.json", later.read_run().model_copy(update={"format": 9}).to_bytes())
    assert run_app(app, ["watch", *arguments]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {error}")


# ---- on S3


@pytest.fixture
def denies() -> threading.Event:
    """While this is set, S3 denies every request."""
    return threading.Event()


@pytest.fixture
def proxy(
    s3_server: dict[str, str], bucket: str, denies: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Faulty]:
    """Put a proxy in front of S3, which counts requests."""
    with behind_faults(s3_server, "AWS_ENDPOINT_URL", lambda *request: DENIED if denies.is_set() else "") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.environment["AWS_ENDPOINT_URL"])
        yield proxy


@pytest.mark.slow
def test_on_s3_an_idle_poll_is_one_request_and_a_lost_store_is_asked_again(
    tmp_path: Path, bucket: str, proxy: Faulty, denies: threading.Event
) -> None:
    local = run(tmp_path)
    store = open_store(bucket)
    for path in sorted(Path(local.store.url).rglob("*.json")):
        store.replace(f"long/{path.relative_to(local.store.url)}", path.read_bytes())
    reader = RunReader(Journal(open_store(bucket), "long"))
    reader.begin()
    before = proxy.requests
    news = [reader.poll() for _ in TURNS]
    assert not any(news)
    assert proxy.requests - before == len(TURNS) + 2  # s3fs looks twice at an empty folder: the quarantine, the audits
    changes: list[Callable[[], None]] = [denies.set, lambda: None, denies.clear]
    lines = follow(reader, 2.0, lambda seconds: changes.pop(0)() if changes else None)
    while not (line := next(lines)).startswith("the store doesn't answer; trying again every 2 s: "):
        pass
    assert "long" in line
    assert next(lines) == "the store answers again"
    reader.journal.store.delete_folder("commits")
    reader.journal.store.delete("run.json")
    with pytest.raises(RunGone):
        next(lines)


# ---- in a terminal


@pytest.mark.slow
def test_q_leaves_and_restores_the_terminal(tmp_path: Path) -> None:
    run(tmp_path)
    terminal = Terminal(*WATCH, f"{tmp_path}/long", COLUMNS="60", LINES="24", NO_COLOR="1", TERM="xterm")
    terminal.await_true(lambda: "q leaves" in terminal.screen)
    assert "\x1b[?1049h" in terminal.screen
    assert "\x1b[3" not in terminal.screen  # no colour
    assert not terminal.echoes
    terminal.press(b"xq")
    assert terminal.finish() == 0
    assert terminal.echoes
    assert "\x1b[?1049l" in terminal.screen
    assert terminal.screen.rindex("\x1b[?25h") > terminal.screen.index("\x1b[?25l")


@pytest.mark.slow
def test_ctrl_c_leaves(tmp_path: Path) -> None:
    run(tmp_path)
    terminal = Terminal(*WATCH, str(tmp_path), TERM="xterm")
    terminal.await_true(lambda: "q leaves" in terminal.screen)
    assert "12" in terminal.screen
    terminal.press(b"\x03")
    assert terminal.finish() == 130
    assert "\x1b[?1049l" in terminal.screen
    assert "Traceback" not in terminal.screen


@pytest.mark.slow
def test_a_run_is_watched_while_it_trains_to_its_end(engine: Engine) -> None:
    with Path(engine.folder, "printed").open("w") as printed, contextlib.ExitStack() as ending:
        engine.run("epochs=1")
        Path(engine.run_folder, "endings/00000001.json").unlink()  # a run that trains has no ending
        screen = Terminal(*WATCH, f"{engine.store}/toy", "--every", "0.2", COLUMNS="100", LINES="40", TERM="xterm")
        screen.await_true(lambda: "step 10 of 10" in screen.screen)
        held = engine.folder / "held"
        held.touch()
        command = [*WATCH, f"{engine.store}/toy", "--every", "0.2"]
        training = threading.Thread(target=engine.run, args=("epochs=3",), kwargs={"TOY_HELD": str(held)})
        training.start()
        ending.callback(training.join)
        ending.callback(held.unlink, missing_ok=True)
        screen.await_true(lambda: "attempt 2" in screen.screen)
        plain = subprocess.Popen(command, cwd=ROOT, stdout=printed)
        ending.callback(plain.kill)
        held.unlink()
        screen.await_true(lambda: "step 30 of 30" in screen.screen)
        assert plain.wait(COMMAND_WITHIN_S) == 0
        screen.press(b"q")
        assert screen.finish() == 0
    lines = Path(engine.folder, "printed").read_text().splitlines()
    assert lines[-1] == "toy is complete"
    assert [line.split()[3] for line in lines if line.startswith("commit ")][-3:] == ["20-24", "24-28", "28-30"]
