"""A near folder: lives go on from its copies, adopt what only it has, and end on the same bytes whatever is in it."""

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import Line
from holdfast.checkpoint import Saved
from holdfast.checkpoint.near import Near
from holdfast.config import NearTier
from holdfast.keeping.verification import verify_run
from holdfast.machine.faults import NEAR_POINTS
from holdfast.store.local import LocalStore
from holdfast.testing.faults import fault
from tests.conftest import IS_SOAK, Engine, Reference, assert_same_bytes
from tests.support.faulty import SLOW, behind_faults, use
from tests.support.makers import make_key, make_line, resume, save, train

COPYING = "copying step"
LONG_S = 99.0  # longer than a save
FROM_COPIES = "restored from near copies"


# ---- adoption, without training


@pytest.fixture
def near(store: LocalStore, line: Line) -> Near:
    """The near folder of the run of `line`."""
    made = Near(NearTier(folder=str(store.root / "near")), line.journal.store, "run")
    made.place.mkdir(parents=True)
    return made


def save_near(near: Near, line: Line, steps: int = 10, **options: Any) -> Saved:
    """Save the next checkpoint of a line into the near folder alone."""
    assert line.head is not None
    return save(
        near.store, line.head.step + steps, line.head.checkpoint_sha256, steps=steps, **{"train_s": LONG_S} | options
    )


def test_a_checkpoint_that_only_the_near_folder_has_is_adopted(store: LocalStore, line: Line, near: Near) -> None:
    saved = save_near(near, line)
    head = make_line(store, near=near).head
    assert head is not None
    assert (head.step, head.why, head.checkpoint_sha256) == (30, "adopted", saved.metadata.checkpoint_sha256)
    assert verify_run(line.journal).ok


def test_without_the_near_folder_it_is_not(store: LocalStore, line: Line, near: Near) -> None:
    save_near(near, line)
    next_line = make_line(store)
    assert next_line.head == line.head


def test_several_near_checkpoints_are_adopted_one_after_the_other(store: LocalStore, line: Line, near: Near) -> None:
    saved = save_near(near, line)
    save(near.store, 40, saved.metadata.checkpoint_sha256, train_s=LONG_S)
    head = make_line(store, near=near).head
    assert head is not None
    assert (head.number, head.step) == (4, 40)
    assert verify_run(line.journal).ok


def test_what_the_store_has_is_not_copied(
    store: LocalStore, line: Line, near: Near, caplog: pytest.LogCaptureFixture
) -> None:
    assert line.head is not None
    save_near(near, line)
    save(line.journal.store, 30, line.head.checkpoint_sha256)
    with caplog.at_level(logging.INFO):
        head = make_line(store, near=near).head
    assert head is not None
    assert head.step == 30
    assert COPYING not in caplog.text


def test_a_node_that_was_away_adopts_nothing(store: LocalStore, line: Line, near: Near) -> None:
    save_near(near, line, steps=5)
    train(line)
    newest = line.head
    assert make_line(store, near=near).head == newest


def test_a_quarantined_state_does_not_come_back(store: LocalStore, line: Line, near: Near) -> None:
    saved = save_near(near, line)
    commit = train(line)
    assert commit.checkpoint_sha256 == saved.metadata.checkpoint_sha256
    line.journal.quarantine(commit.number, "a person saw it diverge", line.attempt)
    head = make_line(store, near=near).head
    assert head is not None
    assert head.number == commit.number - 1


def test_with_trusted_keys_nothing_is_adopted(store: LocalStore, near: Near, tmp_path: Path) -> None:
    signing, trusted = make_key(tmp_path / "key.pem")
    keys: dict[str, Any] = {"signing_key": signing, "trusted_keys": [trusted]}
    signed = make_line(store, "signed", **keys)
    train(signed)
    own = Near(NearTier(folder=str(near.root)), signed.journal.store, "signed")
    own.place.mkdir()
    save_near(own, signed)
    assert make_line(store, "signed", near=own, **keys).head == signed.head


@pytest.mark.parametrize(("train_s", "is_adopted"), [(1.9, False), (2.0, True)])
def test_steps_that_are_trained_sooner_than_saved_are_trained_again(
    store: LocalStore, near: Near, line: Line, train_s: float, is_adopted: bool
) -> None:
    assert line.head is not None
    parent = save(line.journal.store, 30, line.head.checkpoint_sha256).model_copy(update={"save_s": 2.0})
    line.commit(parent, "chunk")
    save_near(near, line, train_s=train_s)
    head = make_line(store, near=near).head
    assert head is not None
    assert (head.step == 40) is is_adopted


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rot(near: Near, saved: Saved) -> None:
    flip(near.place / saved.path / "checkpoint.safetensors")


def lose(near: Near, saved: Saved) -> None:
    near.root.rename(near.root.with_name("gone"))


def replace(near: Near, saved: Saved) -> None:
    lose(near, saved)
    near.root.write_text("")


@pytest.mark.parametrize("harm", [rot, lose, replace])
def test_a_harmed_near_folder_is_passed_over(
    store: LocalStore, line: Line, near: Near, harm: Callable[[Near, Saved], None]
) -> None:
    harm(near, save_near(near, line))
    next_line = make_line(store, near=near)
    assert next_line.head == line.head
    resume(next_line)


# ---- checkpoints of earlier versions


def test_a_save_between_commits_of_an_earlier_version_is_adopted(store: LocalStore, line: Line, near: Near) -> None:
    folder = near.place / save_near(near, line, steps=5).path
    (folder / "between-commits").touch()
    head = make_line(store, near=near).head
    assert head is not None
    assert (head.why, head.path) == ("adopted", folder.name)
    resume(make_line(store, near=near))


# ---- lives


@pytest.fixture
def folder(engine: Engine) -> Path:
    """Give the engine's run a near folder, and return it."""
    near = engine.folder / "near"
    with engine.config.open("a") as config:
        config.write(f'[near]\nfolder = "{near}"\n')
    return near


@pytest.mark.slow
@pytest.mark.gpus(1)
@pytest.mark.parametrize("victim", ["self", "other", "both"])
@pytest.mark.parametrize("point", NEAR_POINTS)
def test_a_run_survives_a_kill_at_each_point(
    engine: Engine, reference: Reference, folder: Path, point: str, victim: str
) -> None:
    struck, early = engine.folder / "struck", engine.folder / "early"
    if point == "near-copied":
        engine.run(**fault("near-durable", 1, "both", early))
    done = engine.run(**fault(point, 1, victim, struck))
    assert struck.exists(), done.stderr
    finished = engine.run()
    assert finished.returncode == 0, finished.stderr
    if (point, victim) != ("near-durable", "other"):  # those ranks live on, and save on the store
        assert COPYING in done.stderr + finished.stderr
    assert_same_bytes(engine, reference)
    assert engine.journal().read_commit(1).why == "adopted"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20 if IS_SOAK else 2))
def test_a_run_survives_kills_at_random_moments_and_flipped_bits(
    engine: Engine, reference: Reference, folder: Path, seed: int
) -> None:
    kill_and_flip(engine, folder, seed)
    assert_same_bytes(engine, reference)


def delete_uncommitted(engine: Engine, near: Path) -> None:
    """Delete checkpoints that no commit names: on a busy machine the next chunk may be saved before a kill."""
    committed = {commit.path for commit in engine.journal().candidates()}
    for folder in (engine.run_folder, *near.iterdir()):
        for path in folder.glob("epoch-*"):
            if path.name not in committed:
                shutil.rmtree(path)


def kill_and_flip(engine: Engine, near: Path, seed: int) -> None:
    """Kill a run at four random moments, flip bits in its near copies after each, and let it train to its end."""
    chance = random.Random(seed)
    for _ in range(4):
        engine.call("train_until_killed", str(engine.config), chance.choice(["self", "rank", "both"]), chance.random())
        for path in sorted(near.rglob("*.safetensors")):
            if chance.random() < 0.3:
                flip(path)
    done = engine.run(f"near.most_bytes={chance.choice([1, 20_000, 10**9])}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_flipped_bit_in_the_near_copy_is_warned_of_and_the_store_is_read(
    engine: Engine, reference: Reference, folder: Path
) -> None:
    engine.run(**fault("latest-replaced", 2, "both", engine.folder / "struck"))
    delete_uncommitted(engine, folder)
    for path in folder.rglob("*.safetensors"):
        flip(path)
    done = engine.run()
    assert done.returncode == 0, done.stderr
    assert "near copy: " in done.stderr
    assert "; the checkpoint was read from the store instead" in done.stderr
    assert_same_bytes(engine, reference)


@pytest.mark.slow
def test_a_near_copy_does_not_vouch_for_the_stores_bytes(engine: Engine, reference: Reference, folder: Path) -> None:
    engine.run(**fault("latest-replaced", 2, "both", engine.folder / "struck"))
    delete_uncommitted(engine, folder)
    flip(engine.run_folder / engine.journal().read_commit(2).path / "checkpoint.safetensors")
    done = engine.run()
    assert done.returncode == 0, done.stderr
    assert FROM_COPIES in done.stderr
    assert "commit 2 of run 'toy' is quarantined: read back after its commit" in done.stderr
    assert engine.standing().checkpoint_sha256 == reference.standing.checkpoint_sha256


@pytest.mark.slow
def test_a_near_folder_that_cannot_be_used_costs_one_line(engine: Engine, reference: Reference, folder: Path) -> None:
    folder.write_text("")
    done = engine.run()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no copy is kept in the near folder") == 1
    assert_same_bytes(engine, reference)


@pytest.mark.slow
def test_two_runs_share_a_near_folder(engine: Engine, reference: Reference, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Engine(tmp_path / "other", {}, nursery=engine.nursery)
    other.config.write_text(engine.config.read_text().replace(engine.store, other.store))
    for each in (engine, other):
        each.run(**fault("near-durable", 1, "both", each.folder / "struck"))
    for each in (engine, other):
        each.finish()
        assert_same_bytes(each, reference)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.slow
def test_a_slow_bucket_gets_what_is_adopted_and_is_asked_for_no_part(
    engine: Engine, reference: Reference, folder: Path, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(method: str, path: str, headers: Any) -> str:
        if "safetensors" not in path:
            return ""
        if method == "GET" and not headers.get("Range", "").startswith(("bytes=0-7", "bytes=8-")):
            asked.append(path)  # more than the header, from which adoption reads the sums of losses
        return SLOW

    with behind_faults(s3_server, "AWS_ENDPOINT_URL", note) as proxy:
        bucket = use(proxy, monkeypatch)
        text = engine.config.read_text().replace(f'"{engine.store}"', f'"{bucket}"')
        engine.config.write_text(f"{text}[checkpoint]\nread_back_every = 0\n[retention]\nkeep_last = 99\n")
        engine.store, engine.environment = bucket, proxy.environment
        engine.run(**fault("near-durable", 1, "both", engine.folder / "first"))
        assert engine.journal().newest() is None
        second = engine.run(**fault("latest-replaced", 2, "both", engine.folder / "second"))
        second_path = f"{engine.journal().read_commit(2).path}/"
        asked.clear()
        third = engine.run()
        assert third.returncode == 0, third.stderr
        assert [path for path in asked if second_path in path] == []
        assert COPYING in second.stderr
        assert FROM_COPIES in second.stderr
        assert FROM_COPIES in third.stderr
        assert_same_bytes(engine, reference)
