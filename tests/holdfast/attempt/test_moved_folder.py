"""A run's folder is moved or deleted while it is trained: training stops, and nothing is in the way of its return."""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import RunGone
from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.keeping.retention import prune_run
from holdfast.store import Store, open_store
from holdfast.store.local import LocalStore
from tests.conftest import Engine
from tests.support.makers import claim, make_line, save_next, train

TAKERS: dict[str, Callable[[Path], object]] = {
    "moved": lambda folder: folder.rename(folder.parent.parent / "away"),
    "deleted": shutil.rmtree,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", TAKERS)
def test_a_run_stops_when_its_folder_is_gone(engine: Engine, tmp_path: Path, how: str) -> None:
    straight = f"{tmp_path}/straight"
    assert engine.run(f"store={straight}").returncode == 0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.run, TOY_DELAY_S="0.05")
        engine.await_commits(2)
        for _ in range(100):  # rm -rf, too, says that a folder is not empty while somebody writes there
            try:
                TAKERS[how](engine.run_folder)
            except OSError:
                continue
            break
        done = running.result()
    assert done.returncode == 3, done.stderr
    assert f"error: the run's folder {engine.run_folder} is gone: it was moved or deleted" in done.stderr
    assert "hint: put the folder back; the same command then continues the run" in done.stderr
    assert "Traceback" not in done.stderr.partition("error: ")[2]
    assert not engine.run_folder.exists()
    if how == "moved":
        (tmp_path / "away").rename(engine.run_folder)
    again = engine.run()
    assert again.returncode == 0, again.stderr
    there = Journal(open_store(straight), "toy").newest()
    found = engine.journal().newest()
    assert there
    assert found
    assert found.checkpoint_sha256 == there.checkpoint_sha256
    assert (found.attempt == 2) == (how == "moved")


def test_no_write_of_a_run_that_is_gone_makes_its_folder(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path / "store")))
    train(line)
    saved = save_next(line)
    journal = line.journal
    (tmp_path / "store" / "run").rename(tmp_path / "away")
    writes: list[Callable[[], object]] = [
        lambda: line.commit(saved, "chunk"),
        lambda: save_next(line),
        lambda: claim(journal, 2),
        lambda: journal.end_attempt(1, Ending("completed", step=10)),
        lambda: journal.quarantine(1, "x", 1),
        lambda: journal.publish_copy("metrics/00000001.jsonl", b""),
        lambda: journal.store.copy("epoch-0001/metrics.jsonl", "epoch-0002/metrics.jsonl"),
        lambda: journal.record_config("f" * 64, {}, {}),
    ]
    for write in writes:
        with pytest.raises(RunGone, match="is gone: it was moved or deleted"):
            write()
    assert not (tmp_path / "store" / "run").exists()
    (tmp_path / "away").rename(tmp_path / "store" / "run")
    assert line.commit(saved, "chunk").number == 2
    assert prune_run(journal) is not None


def test_a_write_in_a_folder_that_is_being_deleted_says_so(tmp_path: Path) -> None:
    """The files go first: for a moment the folder is there, and a write's own file is not."""
    folder = tmp_path / "run"
    store = LocalStore(str(folder))
    store.replace("latest.json", b"{}")

    def write_and_delete() -> None:
        with store.existing().creating("more") as writer:
            writer.write(b"bytes")
            for path in folder.iterdir():
                path.unlink()
            threading.Timer(0.3, folder.rmdir).start()

    with pytest.raises(RunGone, match="is gone: it was moved or deleted"):
        write_and_delete()


@pytest.fixture(params=["memory", "s3"])
def bucket_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A storage without folders."""
    return open_store(f"memory://{tmp_path}" if request.param == "memory" else request.getfixturevalue("bucket"))


def test_the_fence_sees_that_a_run_is_gone_from_a_bucket(bucket_store: Store) -> None:
    line = make_line(bucket_store)
    train(line)
    saved = save_next(line)
    bucket_store.delete_folder("run")
    with pytest.raises(RunGone):
        line.commit(saved, "chunk")
    assert bucket_store.list("run") == []


def test_a_run_whose_attempts_record_alone_is_lost_goes_on(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    (tmp_path / "run/attempts/00000001.json").unlink()
    assert train(line).number == 1
