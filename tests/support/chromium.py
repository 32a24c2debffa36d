"""A headless Chromium for tests and pictures: pages, what they log, and what they look like."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from websockets.sync.client import connect

from holdfast.errors import ConfigError
from tasks.server import free_port
from tests.conftest import ROOT, kill_tree
from tests.support.servers import await_port

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-device-scale-factor=1",
)  # fmt: skip
ANSWERS_WITHIN_S = 120.0
# `make test` installs it with npm.
AXE = ROOT / ".venv" / "node_modules" / "axe-core" / "axe.min.js"
VIOLATIONS = """axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map(
    each => `${each.id}: ${each.nodes.map(node => node.html).slice(0, 3).join(' ')}`))"""


def find_browser() -> str | None:
    """Return the path of an installed Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def browser() -> Iterator[str]:
    """Run a headless browser; yield the address of its debugging interface.

    Raises:
        ConfigError: no Chromium is installed.
    """
    program = find_browser()
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


class Page:
    """A page of a browser.

    Attributes:
        errors: what its scripts have thrown or logged as an error, and what its policy has refused.
        requests: the URLs that it has asked for.
    """

    def __init__(self, browser: str) -> None:
        self._browser = browser
        self._target = httpx.put(f"{browser}/json/new?about:blank", trust_env=False).json()
        self._socket = connect(self._target["webSocketDebuggerUrl"], max_size=None, proxy=None)
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")
        self.do("Emulation.setFocusEmulationEnabled", enabled=True)  # else a page in the background sees no focus

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()
        httpx.get(f"{self._browser}/json/close/{self._target['id']}", trust_env=False)

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Carry out a command of the debugging interface, and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (answer := json.loads(self._socket.recv(timeout=ANSWERS_WITHIN_S))).get("id") != number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _note(self, event: dict[str, Any]) -> None:
        kind, said = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif kind == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        elif kind == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(str(said["args"]))
        elif kind == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def open(self, url: str, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        """Open a URL, and return when it is loaded and drawn.

        Args:
            theme: ``light`` or ``dark``, as the user of the browser prefers.
        """
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.load(url)
        self.settle()

    def load(self, url: str) -> None:
        """Navigate to a URL, and return when it is loaded."""
        self.do("Page.navigate", url=url)
        self.await_true("location.href !== 'about:blank' && document.readyState === 'complete'")

    def await_true(self, expression: str) -> None:
        """Return when an expression of JavaScript is true."""
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"not true on this page: {expression}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Return when the page has drawn what it has to draw by now."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0))))")

    def ask(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript, or what its promise gives.

        Raises:
            RuntimeError: it throws.
        """
        answer = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if details := answer.get("exceptionDetails"):
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, such as ``Tab`` or ``ArrowLeft``."""
        codes = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            self.do(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes.get(key, 0),
                text=text if kind == "keyDown" else "",
            )  # fmt: skip
        self.settle()

    def take(self, path: Path) -> None:
        """Write a picture of what the page shows."""
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"]))

    def print(self) -> bytes:
        """Return the page as it is printed on A4, as a PDF."""
        paper = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": True, "preferCSSPageSize": True}
        return base64.b64decode(self.do("Page.printToPDF", **paper)["data"])


def find_violations(page: Page) -> list[str]:
    """Return the violations of accessibility that axe finds on an open page."""
    page.ask(f"{AXE.read_text('utf-8')}; 0")
    return list(page.ask(VIOLATIONS))
