"""Pictures of a run in Prefect's UI, for the README: ``make screenshots``.

A headless Chromium shows a real run on a real pool, with one preempted attempt.
"""

import base64
import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

from holdfast.errors import ConfigError
from tasks.server import free_port
from tests.conftest import ROOT, kill_tree
from tests.support.pools import Pool, PoolRun, pool_up, strike
from tests.support.servers import await_port

FOLDER = ROOT / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-device-scale-factor=1",
)  # fmt: skip
PAGE_WITHIN_S = 8.0


@contextlib.contextmanager
def browser() -> Iterator[str]:
    """Run a headless browser; yield the address of its debugging interface.

    Raises:
        ConfigError: no Chromium is installed.
    """
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise ConfigError("there is no Chromium", hint="apt-get install chromium")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="holdfast-", ignore_cleanup_errors=True) as profile:
        command = [program, *OPTIONS, f"--user-data-dir={profile}", f"--remote-debugging-port={port}", "about:blank"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                await_port(port)
                yield f"http://127.0.0.1:{port}"
            finally:
                kill_tree(process.pid)


def take(browser: str, url: str, auth: str, path: Path, width: int, height: int) -> None:
    """Take a picture of a page after it has loaded and settled.

    Args:
        auth: the server's secret, which the UI keeps in the browser once a person has logged in.
    """
    page = httpx.put(f"{browser}/json/new?about:blank", trust_env=False).json()
    numbers = itertools.count(1)
    with connect(page["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:

        def do(method: str, **parameters: Any) -> dict[str, Any]:
            number = next(numbers)
            socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
            while (answer := json.loads(socket.recv(timeout=60))).get("id") != number:
                pass
            return dict(answer["result"])

        do("Page.enable")
        login = f"localStorage.setItem('prefect-password', btoa({json.dumps(auth)}))"
        do("Page.addScriptToEvaluateOnNewDocument", source=login)
        do("Page.navigate", url=url)
        do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(PAGE_WITHIN_S)
        path.write_bytes(base64.b64decode(do("Page.captureScreenshot", format="png")["data"]))
    httpx.get(f"{browser}/json/close/{page['id']}", trust_env=False)
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
    artifacts = pool.artifacts(run.attempts()[-1]["id"])
    (shown,) = [artifact["id"] for artifact in artifacts if artifact["key"] == "digits-shows-confusion"]
    return str(shown)


def train_and_preempt(pool: Pool, folder: Path) -> tuple[str, str]:
    """Train a run whose first attempt is told to end. Return the flow runs of train and of the second attempt."""
    run = PoolRun(pool, folder, "language")
    train = run.start(**read_recipe("language"), epochs=1, chunk={"steps": 20})
    run.await_commits(2)
    strike([run.processes(1)[0]], signal.SIGTERM)
    assert pool.await_end(train, within_s=600)["state"]["name"] == "Completed"
    return train, run.attempts()[-1]["id"]


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
        train, attempt = train_and_preempt(pool, Path(scratch))
        take(chromium, f"{ui}/runs/flow-run/{train}", auth, FOLDER / "train.png", 1280, 800)
        take(chromium, f"{ui}/runs/flow-run/{attempt}", auth, FOLDER / "attempt.png", 1280, 800)
        confusion = train_digits(pool, Path(scratch))
        take(chromium, f"{ui}/artifacts/artifact/{confusion}", auth, FOLDER / "digits.png", 1280, 620)


if __name__ == "__main__":
    main()
