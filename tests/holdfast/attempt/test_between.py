"""Saves into the near folder between two commits: a kill costs the steps since the last, and no byte depends on it."""

from pathlib import Path

import pytest

from holdfast.checkpoint.near import MARKER
from holdfast.store.permission import STORES
from holdfast.testing.faults import fault
from tests.bench.slow import RATE_VARIABLE, SCHEME
from tests.conftest import IS_SOAK, Engine, Reference, assert_same_bytes
from tests.holdfast.attempt.test_near import kill_and_flip
from tests.support.makers import make_key

pytestmark = [pytest.mark.slow, pytest.mark.gpus(1)]

EVERY = 2
LONG_CHUNK = "chunk.steps=10"  # an epoch
SLOW_STEPS = {"TOY_DELAY_S": "0.2"}  # a micro-batch, so that a save is written within a few steps


@pytest.fixture
def folder(engine: Engine) -> Path:
    """Let the engine's run save into a near folder after every second step, and return the folder."""
    return add_near(engine, engine.folder / "near")


def add_near(engine: Engine, near: Path) -> Path:
    with engine.config.open("a") as config:
        config.write(f'[near]\nfolder = "{near}"\nevery_steps = {EVERY}\n')
    return near


def list_between(near: Path) -> list[str]:
    """Return the names of the saves between commits that the folder has."""
    return sorted(path.parent.name for path in near.rglob(MARKER))


def first_commit(engine: Engine) -> tuple[int, str]:
    commit = engine.journal().read_commit(1)
    return commit.step, commit.why


def test_an_undisturbed_run_has_the_same_commits(engine: Engine, reference: Reference, folder: Path) -> None:
    engine.finish()
    assert_same_bytes(engine, reference)
    assert engine.journal().newest_number() == reference.commits
    assert list_between(folder) == []
    assert MARKER not in {path.name for path in engine.run_folder.rglob("*")}


def kill(engine: Engine, folder: Path, nth: int, victim: str = "both", point: str = "between-durable") -> int:
    """Kill the run in its first chunk, after an n-th save between commits. Return the newest step that was saved."""
    struck = engine.folder / "struck"
    done = engine.run(LONG_CHUNK, **SLOW_STEPS, **fault(point, nth, victim, struck))
    assert struck.exists(), done.stderr
    return max((int(name.rpartition("-")[2]) for name in list_between(folder)), default=0)


@pytest.mark.parametrize("nth", [1, 3])
def test_a_kill_between_commits_costs_the_steps_since_the_last_save(
    engine: Engine, reference: Reference, folder: Path, nth: int
) -> None:
    step = kill(engine, folder, nth)
    assert engine.journal().newest() is None
    assert step >= nth * EVERY
    engine.finish(LONG_CHUNK)
    assert first_commit(engine) == (step, "adopted")
    assert_same_bytes(engine, reference)


def test_new_ranks_of_the_same_attempt_adopt_what_the_killed_ones_saved(
    engine: Engine, reference: Reference, folder: Path
) -> None:
    kill(engine, folder, 2, "self")
    assert_same_bytes(engine, reference)
    step, why = first_commit(engine)
    assert (step % EVERY, why) == (0, "adopted")


def test_ranks_whose_attempt_is_killed_save_beside_the_near_folder(
    engine: Engine, reference: Reference, folder: Path
) -> None:
    kill(engine, folder, 1, "other")
    engine.finish(LONG_CHUNK)
    step, why = first_commit(engine)
    assert (step >= EVERY, why) == (True, "adopted")
    assert_same_bytes(engine, reference)


def test_a_save_that_is_cut_short_is_not_adopted(engine: Engine, reference: Reference, folder: Path) -> None:
    assert kill(engine, folder, 1, point="payload-written") == 0
    assert [path.name for path in folder.rglob("epoch-*")] == ["epoch-0001-step-00000002"]
    engine.finish(LONG_CHUNK)
    assert first_commit(engine) == (10, "chunk")
    assert_same_bytes(engine, reference)


def test_a_save_after_a_chunk_that_the_store_lacks_is_adopted_after_the_chunk(
    engine: Engine, reference: Reference, folder: Path
) -> None:
    fast = engine.store
    engine.store = f"{SCHEME}{fast}"
    engine.config.write_text(engine.config.read_text().replace(f'"{fast}"', f'"{engine.store}"'))
    engine.environment |= {STORES: f"{SCHEME},/", RATE_VARIABLE: "4e3"}
    struck = engine.folder / "struck"
    done = engine.run(**SLOW_STEPS, **fault("between-durable", 2, "both", struck))
    assert struck.exists(), done.stderr
    engine.environment[RATE_VARIABLE] = "1e9"
    engine.store = fast
    assert engine.journal().newest() is None
    engine.finish()
    commits = [engine.journal().read_commit(number) for number in (1, 2)]
    assert [(commit.step, commit.why) for commit in commits] == [(4, "adopted"), (6, "adopted")]
    assert_same_bytes(engine, reference)


@pytest.mark.parametrize("seed", range(20 if IS_SOAK else 2))
def test_a_run_survives_kills_at_random_moments_and_flipped_bits(
    engine: Engine, reference: Reference, folder: Path, seed: int
) -> None:
    kill_and_flip(engine, folder, seed)
    assert_same_bytes(engine, reference)


def test_a_node_that_comes_back_deletes_its_old_save(engine: Engine, reference: Reference, folder: Path) -> None:
    stale = f"epoch-0001-step-{kill(engine, folder, 1):08d}"
    away = folder.rename(engine.folder / "away")
    engine.run(LONG_CHUNK, **fault("latest-replaced", 1, "both", engine.folder / "elsewhere"))
    assert first_commit(engine) == (10, "chunk")
    folder.rename(engine.folder / "other-node")
    away.rename(folder)
    done = engine.run(LONG_CHUNK)
    assert done.returncode == 0, done.stderr
    assert f"deleting the save {stale} in near.folder" in done.stderr
    assert list_between(folder) == []
    assert_same_bytes(engine, reference)


def test_a_near_folder_that_cannot_be_used_costs_one_line(engine: Engine, reference: Reference, folder: Path) -> None:
    folder.write_text("")
    done = engine.run()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no copy is kept in the near folder") == 1
    assert_same_bytes(engine, reference)


def test_two_runs_share_a_near_folder(engine: Engine, reference: Reference, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Engine(tmp_path / "other", {}, nursery=engine.nursery)
    add_near(other, folder)
    steps = [kill(engine, folder, 1), kill(other, folder, 2)]
    for each in (engine, other):
        each.finish(LONG_CHUNK)
    assert [first_commit(each) for each in (engine, other)] == [(step, "adopted") for step in steps]
    for each in (engine, other):
        assert_same_bytes(each, reference)


@pytest.mark.gpus(2)
def test_two_ranks_adopt_what_the_main_rank_saved(engine: Engine, folder: Path, tmp_path: Path) -> None:
    ranks = ["compute.ranks=2", LONG_CHUNK]
    (tmp_path / "straight").mkdir()
    straight = Engine(tmp_path / "straight", {}, nursery=engine.nursery)
    expected = straight.finish(*ranks).checkpoint_sha256
    struck = engine.folder / "struck"
    engine.run(*ranks, **SLOW_STEPS, **fault("between-durable", 2, "both", struck))
    assert struck.exists()
    assert engine.finish(*ranks).checkpoint_sha256 == expected
    step, why = first_commit(engine)
    assert (step >= 2 * EVERY, why) == (True, "adopted")


def test_signed_runs_are_told_that_nothing_would_be_adopted(engine: Engine, folder: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "key.pem")
    keys = [f'signing_key="{tmp_path}/key.pem"', f'resume.trusted_keys=["{tmp_path}/key.pem.pub"]']
    done = engine.run(*keys)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("near.every_steps = 2 is not used: with resume.trusted_keys") == 1
    assert not any(MARKER in path.name for path in folder.rglob("*"))
