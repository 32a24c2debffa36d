"""Tests that a run ends on the same bytes, however it is chunked, extended or started."""

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from holdfast.cli import app, run_app
from holdfast.data import Order, combine, digest_indices
from tests.conftest import COMMAND_WITHIN_S, ROOT, Driver, Engine, Reference, assert_same_bytes, await_ended
from tests.support.lives import Lives, ranks_of
from tests.support.toy import SAMPLES

pytestmark = pytest.mark.slow


@pytest.mark.gpus(1)
@pytest.mark.parametrize("length", ["chunk.steps=1", "chunk.steps=7", "chunk.epochs=3", "chunk=auto"])
def test_chunks_of_any_length_give_the_same_bytes(engine: Engine, reference: Reference, length: str) -> None:
    if "epochs" in length:
        engine.config.write_text(engine.config.read_text().replace("[chunk]\nsteps = 4\n", ""))
    engine.finish(length)
    assert_same_bytes(engine, reference)


@pytest.mark.gpus(1)
def test_more_epochs_continue_a_run(engine: Engine, reference: Reference) -> None:
    assert engine.finish("epochs=1").step == 10
    assert engine.finish("epochs=3").step == 30
    assert engine.journal().read_attempt(2).why == "extended"
    assert_same_bytes(engine, reference)


def test_complete_run_trains_nothing(engine: Engine, driver: Driver) -> None:
    before = engine.finish()
    done = driver.run()
    assert done.returncode == 0
    assert "is complete" in done.stdout
    assert driver.standing() == before


def test_the_flow_takes_over_the_ranks_that_the_command_has_started(
    driver: Driver, prefect_api: dict[str, str]
) -> None:
    driver.run("epochs=1")
    url, (user, password) = prefect_api["PREFECT_API_URL"], prefect_api["PREFECT_API_AUTH_STRING"].split(":")
    newest = {"sort": "START_TIME_DESC", "limit": 1, "flows": {"name": {"any_": ["train"]}}}
    answer = httpx.post(f"{url}/flow_runs/filter", json=newest, auth=(user, password), trust_env=False)
    (flow_run,) = answer.raise_for_status().json()
    began_at = driver.journal().read_attempt(1).began_at
    assert datetime.fromisoformat(began_at) < datetime.fromisoformat(flow_run["start_time"])


def test_samples_come_in_the_promised_order(engine: Engine, reference: Reference) -> None:
    notes = engine.folder / "samples"
    engine.run("chunk.steps=3", TOY_SAMPLES=str(notes))
    order = Order(SAMPLES, 4, 2, 1234)
    promised = [order.step_indices(step) for step in range(30)]
    probe = promised[0][0].tolist()  # the probe reads this micro-batch whenever a checkpoint is saved
    saved_after = {stop for epoch in (0, 10, 20) for stop in (epoch + 3, epoch + 6, epoch + 9, epoch + 10)}
    expected = []
    for step, indices in enumerate(promised, 1):
        expected += indices.flatten().tolist() + (probe if step in saved_after else [])
    assert [int(line) for line in notes.read_text().split()] == expected
    names = [combine([digest_indices(micro_batch) for micro_batch in indices]) for indices in promised]
    assert [str(line["samples"]).partition("-")[0] for line in reference.metrics] == names


@pytest.mark.gpus(2)
def test_two_ranks_survive_a_kill(driver: Driver, engine: Engine) -> None:
    other = Engine(_folder(driver, "other"), {}, nursery=engine.nursery)
    uninterrupted = other.finish("compute.ranks=2")
    process = driver.start("compute.ranks=2", TOY_DELAY_S="0.05")
    driver.await_commits(2)
    process.kill()
    process.communicate()
    engine.finish("compute.ranks=2")
    assert driver.standing().checkpoint_sha256 == uninterrupted.checkpoint_sha256
    assert driver.metrics() == other.metrics()


def test_train_is_called_in_a_running_event_loop(driver: Driver, reference: Reference) -> None:
    program = f"""
import asyncio
from holdfast import load_config
from flows.train import train

async def cell():
    return train(load_config({str(driver.config)!r}, ["epochs=2"]))

result = asyncio.run(cell())
assert (result.run, result.complete, result.steps, result.epochs, result.commit) == ("toy", True, 20, 2, 6), result
assert result.resumed_from_epoch is None
result = train(load_config({str(driver.config)!r}))
assert result.resumed_from_epoch == 2 and result.steps == 30, result
assert [entry["commit"] for entry in result.retention["kept"]] == [9, 8, 7], result.retention
print(result.model_dump_json())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | driver.environment, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_WITHIN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert reference.standing.checkpoint_sha256 in done.stdout
    assert reference.standing.previous_checkpoint_sha256 in done.stdout
    assert_same_bytes(driver, reference)


def _folder(driver: Driver, name: str) -> "os.PathLike[str]":
    folder = driver.folder / name
    folder.mkdir()
    return folder


@pytest.mark.gpus(1)
def test_a_killed_run_on_an_object_store_continues(
    tmp_path: Path,
    prefect_api: dict[str, str],
    nursery: Lives,
    s3_server: dict[str, str],
    bucket: str,
    reference: Reference,
) -> None:
    driver = Driver(tmp_path, prefect_api, f"{bucket}/team/runs", nursery)
    process = driver.start(TOY_DELAY_S="0.1")
    driver.await_commits(2)
    ranks = ranks_of(process.pid)
    process.kill()
    process.communicate()
    await_ended(ranks)
    Engine(tmp_path, s3_server, driver.store, nursery).finish()
    assert driver.standing().attempts == 2
    assert_same_bytes(driver, reference)
    assert run_app(app, ["verify", f"{bucket}/team/runs/toy"]) == 0
    kept = 3  # the number of commits depends on the moment of the kill
    given_up = range(1, driver.standing().commit - kept + 1)
    assert driver.journal().store.list("pruned") == [f"{number:08d}.json" for number in given_up]
