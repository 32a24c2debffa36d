"""A disk that fails, and a kill, at every system call of a commit and the prune after it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from tests.conftest import COMMAND_WITHIN_S, IS_SOAK, ROOT
from tests.support import writer
from tests.support.lives import Lives
from tests.support.writer import WaitingWriter

COMMITS = 4
FAULTS = {
    "fsync": ("error=EIO", "signal=SIGKILL"),
    "write": ("error=ENOSPC", "error=EIO", "signal=SIGKILL"),
    "linkat": ("error=EIO", "signal=SIGKILL"),
    "renameat": ("error=EIO", "signal=SIGKILL"),
    "unlinkat": ("error=EIO", "signal=SIGKILL"),
    "mkdirat": ("error=ENOSPC", "signal=SIGKILL"),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("strace"), reason="strace makes system calls fail"),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run that lacks its last commit."""
    folder = tmp_path_factory.mktemp("begun")
    assert writer.main(str(folder), COMMITS - 1) == 0
    return folder


@pytest.fixture(scope="module")
def content_id(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the run ends on when nothing fails."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    shutil.copytree(begun, folder)
    return end_of(folder)


def end_of(store: Path) -> str:
    assert writer.main(str(store), COMMITS) == 0
    newest = journal_of(store).newest()
    assert newest
    return newest.checkpoint_sha256


def journal_of(store: Path) -> Journal:
    return Journal(LocalStore(str(store)), "run")


ALL = [(call, fault) for call, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(("call", "fault"), ALL if IS_SOAK else ALL[::2])
def test_every_system_call_may_fail(
    nursery: Lives, begun: Path, content_id: str, tmp_path: Path, call: str, fault: str
) -> None:
    nth = 1
    while strike(nursery, begun, tmp_path / str(nth), call, fault, nth):
        store = tmp_path / str(nth) / "store"
        assert end_of(store) == content_id
        report = verify_run(journal_of(store))
        assert report.problems == report.notes == []
        shutil.rmtree(tmp_path / str(nth))
        nth += 1
    assert nth > 1


def strike(nursery: Lives, begun: Path, folder: Path, call: str, fault: str, nth: int) -> bool:
    """Let a writer make the last commit; return whether it got as far as the nth call, which then failed.

    strace follows a writer that was forked: starting Python under strace would take ten times as long.
    """
    shutil.copytree(begun, folder / "store")
    trace = folder / "trace"
    writer = WaitingWriter(nursery, str(folder / "store"), COMMITS)
    inject = ["--trace", call, "--inject", f"{call}:{fault}:when={nth}"]
    with subprocess.Popen(
        ["strace", "--follow-forks", "--output", trace, *inject, "--attach", str(writer.process.pid)],
        stderr=subprocess.PIPE, text=True,
    ) as strace:  # fmt: skip
        assert strace.stderr is not None
        assert "attached" in strace.stderr.readline()
        writer.begin()
        code, err = writer.finish(COMMAND_WITHIN_S)
    struck = "(INJECTED)" in trace.read_text() or "killed by SIGKILL" in trace.read_text()
    assert "Traceback" not in err
    if not struck:
        assert code == 0, err
    elif "error" in fault:
        # A failed deletion, and what is mere output, doesn't stop a run.
        assert code in (0, 3), err
    return struck


def test_what_gets_a_name_is_durable_before_and_the_name_after(begun: Path, tmp_path: Path) -> None:
    """A power cut is not a kill: what was not synced may be gone, or there without its content."""
    shutil.copytree(begun, tmp_path / "store")
    traces = tmp_path / "traces"
    traces.mkdir()
    subprocess.run(
        [
            # A file for each thread: in one for all, a call that another thread's comes between is on two lines.
            "strace", "--follow-forks", "--output-separately", "--output", traces / "thread",
            "--decode-fds=path", "--trace", "fsync,linkat,renameat",
            sys.executable, "-m", "tests.support.writer", str(tmp_path / "store"), str(COMMITS),
        ],
        cwd=ROOT, check=True, timeout=COMMAND_WITHIN_S,
    )  # fmt: skip
    named = 0
    for trace in traces.iterdir():
        calls = [line for line in trace.read_text().splitlines() if "EEXIST" not in line]
        for index, call in enumerate(calls):
            found = re.match(r'(?:linkat|renameat)\(\d+<(.+?)>, "(.+?)"', call)
            if found:
                named += 1
                before, after = calls[index - 1], calls[index + 1]
                assert before.startswith("fsync"), call
                assert f"<{found[1]}/{found[2]}>" in before, call
                assert after.startswith("fsync"), call
                assert f"<{found[1]}>" in after, call
    assert named >= 8
