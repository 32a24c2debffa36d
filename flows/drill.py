"""Disaster drills with your own run on your own work pool: `drill`, started in the UI or from Python."""

import logging
from typing import Any

import tasks.untracked  # noqa: F401

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact

from holdfast.config import Log, RunConfig
from holdfast.errors import ConfigError, Damage, RunStopped
from holdfast.journal import Journal
from holdfast.proof.drill import DrillVerdict, Kill, judge_drill, left_after, to_environment
from holdfast.store import open_store
from tasks.heartbeat import heartbeat
from tasks.reporting import describe_run, key_of
from tasks.supervisor import Supervisor

log = logging.getLogger("holdfast.drill")


@flow(name="drill", flow_run_name="drill {config.run}", retries=0, persist_result=False)
def drill(config: RunConfig, kills: list[Kill], epochs: int = 1, keep: bool = False) -> DrillVerdict:
    """Train a copy of a run twice on its work pool, once undisturbed and once with kills, and compare the bytes.

    Both copies are new runs; yours stays unchanged. The drill doesn't restart a killed worker: your own service has to
    restart it.

    Args:
        config: The configuration of your run; its setting `where` names the work pool.
        kills: The processes to kill, and when.
        epochs: The number of epochs that both copies train.
        keep: Keep both copies on the store afterwards. The copies of a failed drill always stay.

    Raises:
        ConfigError: the run trains without a work pool, or there is nothing to kill.
        Damage: the two copies end on different bytes.
        RunStopped: a person cancelled one of the copies.
    """
    if config.where == "here":
        raise ConfigError('where = "here": a drill needs a work pool', hint="holdfast prove does the same here")
    if not kills:
        raise ConfigError("a drill needs at least one kill", hint='kills = [{"what": "machine", "at_step": 5}]')
    kills = sorted(kills, key=lambda kill: kill.at_step)
    name = f"{config.run}-drill-{str(runtime.flow_run.id)[:8]}"
    with heartbeat():
        straight = _train(config, f"{name}-straight", epochs, [])
        drilled = _train(config, f"{name}-killed", epochs, kills)
    verdict = judge_drill(kills, straight, drilled)
    log.info("%s", verdict)
    text = f"```\n{verdict}\n```\n\n{describe_run(drilled)}"
    create_markdown_artifact(text, f"{key_of(config.run)}-drill", f"drill of {config.run}")
    if not verdict.is_passed:
        raise Damage(str(verdict), hint=f"see holdfast show {config.store}/{name}-killed, and try holdfast prove")
    if not keep:
        for journal in (straight, drilled):
            open_store(config.store).delete_folder(journal.run)
    return verdict


def _train(config: RunConfig, run: str, epochs: int, kills: list[Kill]) -> Journal:
    changes: dict[str, Any] = {
        "run": run,
        "epochs": epochs,
        "log": Log(every=1, folder=config.log.folder),
        "retention": config.retention.model_copy(update={"keep_last": 10**6}),
    }
    config = config.model_copy(update=changes)
    journal = Journal(open_store(config.store), run)

    def choose_environment() -> dict[str, str]:
        return to_environment(left_after(kills, len(journal.endings())))

    ending = Supervisor(config, journal, choose_environment).run()
    if ending.reason != "completed":
        raise RunStopped(f"run {run} was cancelled")
    return journal
