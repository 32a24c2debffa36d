"""Pictures of a run in Prefect's UI, for the README, and of its report: ``make screenshots``.

A headless Chromium shows a real run on a real pool, with one preempted attempt, and the reports of real runs.
"""

import json
import signal
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.support.chromium import Page, browser
from tests.support.pictured import draw_reports
from tests.support.pools import Pool, PoolRun, pool_up, strike

FOLDER = ROOT / "docs"
PAGE_WITHIN_S = 8.0


def take(browser: str, url: str, auth: str, path: Path, width: int, height: int) -> None:
    """Take a picture of a page after it has loaded and settled.

    Args:
        auth: the server's secret, which the UI keeps in the browser once a person has logged in.
    """
    with Page(browser) as page:
        login = f"localStorage.setItem('prefect-password', btoa({json.dumps(auth)}))"
        page.do("Page.addScriptToEvaluateOnNewDocument", source=login)
        page.open(url, width, height)
        time.sleep(PAGE_WITHIN_S)
        page.take(path)
    print(path)


def read_recipe(name: str) -> dict[str, Any]:
    """Return the part of a recipe's configuration that is the same for each of its runs."""
    recipe = tomllib.loads((ROOT / "holdfast" / "recipes" / f"{name}.toml").read_text("utf-8"))
    return {key: recipe[key] for key in ("recipe", "seed", "determinism", "settings")}


def train_digits(pool: Pool, folder: Path) -> str:
    """Train the recipe digits. Return the artifact with its confusion matrix."""
    run = PoolRun(pool, folder, "digits")
    train = run.start(**read_recipe("digits"), epochs=12)
    assert pool.await_end(train, within_s=600)["state"]["name"] == "Completed"
    return find_artifact(pool, run.attempts()[-1]["id"], "digits-shows-confusion")


def train_and_preempt(pool: Pool, folder: Path) -> tuple[str, str]:
    """Train a run whose first attempt is told to end. Return the flow runs of train and of the second attempt."""
    run = PoolRun(pool, folder, "language")
    train = run.start(**read_recipe("language"), epochs=1, chunk={"steps": 20}, proof={"rehearse": "first"})
    run.await_commits(2)
    strike([run.processes(1)[0]], signal.SIGTERM)
    assert pool.await_end(train, within_s=600)["state"]["name"] == "Completed"
    return train, run.attempts()[-1]["id"]


def find_artifact(pool: Pool, flow_run: str, key: str) -> str:
    """Return the id of a flow run's artifact."""
    (found,) = [artifact["id"] for artifact in pool.artifacts(flow_run) if artifact["key"] == key]
    return str(found)


def main() -> None:
    """Take all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-") as scratch,
        browser() as chromium,
        pool_up(Path(scratch) / "pool") as pool,
    ):
        ui, auth = pool.url.removesuffix("/api"), ":".join(pool.auth)
        deployment = pool.ask("GET", "/deployments/name/train/train")["id"]
        take(chromium, f"{ui}/deployments/deployment/{deployment}/run", auth, FOLDER / "form.png", 1280, 1500)
        (reported := Path(scratch) / "reported").mkdir()  # its runs have names of their own
        draw_reports(chromium, reported, FOLDER)
        train, attempt = train_and_preempt(pool, Path(scratch))
        take(chromium, f"{ui}/runs/flow-run/{train}", auth, FOLDER / "train.png", 1280, 800)
        take(chromium, f"{ui}/runs/flow-run/{attempt}", auth, FOLDER / "attempt.png", 1280, 800)
        summary = find_artifact(pool, train, "language-summary")
        take(chromium, f"{ui}/artifacts/artifact/{summary}", auth, FOLDER / "summary.png", 1280, 1036)
        confusion = train_digits(pool, Path(scratch))
        take(chromium, f"{ui}/artifacts/artifact/{confusion}", auth, FOLDER / "digits.png", 1280, 620)


if __name__ == "__main__":
    main()
