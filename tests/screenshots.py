"""Pictures of a run in Prefect's UI, for the README: ``make screenshots``.

A real run on a real pool, one of whose attempts is preempted, seen by a headless Chromium.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT
from tests.pools import Pool, PoolRun, pool_up, strike

FOLDER = ROOT / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-device-scale-factor=1",
)  # fmt: skip
PAGE_WITHIN_MS = 15_000


def take(browser: str, url: str, path: Path, size: str) -> None:
    """A picture of a page, once it has loaded."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as profile:
        subprocess.run(
            [browser, *OPTIONS, f"--user-data-dir={profile}", f"--window-size={size}",
             f"--virtual-time-budget={PAGE_WITHIN_MS}", f"--screenshot={path}", url],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
    print(path)


def train_and_preempt(pool: Pool, folder: Path) -> tuple[str, str]:
    """The flow runs of a run, and of its second attempt; the first was told to end in the midst of it."""
    run = PoolRun(pool, folder, "language")
    train = run.start(recipe="holdfast.recipes.language:language", epochs=1, chunk={"steps": 20}, settings={})
    run.await_commits(2)
    strike([run.processes(1)[0]], signal.SIGTERM)
    assert pool.await_end(train, within_s=600)["state"]["name"] == "Completed"
    return train, run.attempts()[-1]["id"]


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("error: there is no Chromium\nhint: apt-get install chromium", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch, pool_up(Path(scratch) / "pool") as pool:
        ui = pool.url.removesuffix("/api")
        deployment = pool.ask("GET", "/deployments/name/train/train")["id"]
        take(browser, f"{ui}/deployments/deployment/{deployment}/run", FOLDER / "form.png", "1280,1900")
        train, attempt = train_and_preempt(pool, Path(scratch))
        take(browser, f"{ui}/runs/flow-run/{train}", FOLDER / "train.png", "1280,900")
        take(browser, f"{ui}/runs/flow-run/{attempt}?tab=Artifacts", FOLDER / "attempt.png", "1280,900")
    return 0


if __name__ == "__main__":
    sys.exit(main())
