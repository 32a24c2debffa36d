"""A network that fails: a proxy in front of a real server, which loses, refuses, cuts or delays some of the requests.

::

    with faulty_s3(rate=0.12, seed=1) as s3:
        ...  # a run in the environment `s3.environment`, whose AWS_ENDPOINT_URL is the proxy
    assert s3.faults["lost"]

The proxy is a thread pool of the process that makes it; other processes reach it by its URL.
"""

import collections
import contextlib
import http.client
import random
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support import servers

# What may happen to a request, and how the client sees it.
LOST = "lost"  # it is done, and the connection is reset before the answer
REFUSED = "refused"  # it is not done: 500 or 503
CUT = "cut"  # it is not done: the connection is reset
SLOW = "slow"  # it is done, SLOW_S later
KINDS = (LOST, REFUSED, CUT, SLOW)
SLOW_S = 0.3
WITHIN_S = 60
# Headers that are about a connection, and not about what goes through it.
OF_CONNECTION = {"connection", "keep-alive", "proxy-connection", "expect", "transfer-encoding", "content-length"}

# Chooses what happens to a request; "" for nothing. Arguments: method, path with query, headers.
Choose = Callable[[str, str, Any], str]


class Faulty:
    """A faulty way to a server.

    Attributes:
        url: where clients find the proxy.
        environment: the environment in which a program uses the server through the proxy.
        direct: the environment in which it uses the server without the proxy.
        faults: how many requests each kind of fault has struck.
        requests: how many requests there were.
    """

    def __init__(self, direct: dict[str, str], variable: str, choose: Choose) -> None:
        self.direct = direct
        self.choose = choose
        self.faults: collections.Counter[str] = collections.Counter()
        self.requests = 0
        self.lock = threading.Lock()
        upstream = urlsplit(re.search("http://[^/;]+", direct[variable])[0])  # type: ignore[index]
        self.upstream = (upstream.hostname or "", upstream.port or 80)
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = direct | {variable: direct[variable].replace(upstream.geturl(), self.url)}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def strike(self, method: str, path: str, headers: Any) -> str:
        """Choose the fault of a request, and count it."""
        with self.lock:
            self.requests += 1
            kind = self.choose(method, path, headers)
            self.faults.update([kind] if kind else [])
            return kind

    def close(self) -> None:
        """Stop the proxy."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def at_random(rate: float, seed: int, kinds: tuple[str, ...] = KINDS) -> Choose:
    """Strike a share of all requests, each with a kind of fault drawn by a generator of its own."""
    chance = random.Random(seed)
    return lambda method, path, headers: chance.choice(kinds) if chance.random() < rate else ""


def lose_each_write_once() -> Choose:
    """Lose the answer to the first try of every write."""
    seen: set[tuple[str, ...]] = set()

    def choose(method: str, path: str, headers: Any) -> str:
        request = (method, path, headers.get("Content-Range", ""))  # GCS sends all parts to one path
        if method not in ("PUT", "POST") or request in seen:
            return ""
        seen.add(request)
        return LOST

    return choose


@contextlib.contextmanager
def faulty_s3(
    rate: float = 0.12, seed: int = 0, kinds: tuple[str, ...] = KINDS, choose: Choose | None = None
) -> Iterator[Faulty]:
    """Start an S3 server behind a faulty network, for the block.

    Args:
        rate: the share of requests that a fault strikes.
        seed: of the generator that chooses them.
        kinds: what may happen to them.
        choose: chooses the faults instead.
    """
    with (
        servers.s3_server() as direct,
        behind_faults(direct, "AWS_ENDPOINT_URL", choose or at_random(rate, seed, kinds)) as proxy,
    ):
        yield proxy


@contextlib.contextmanager
def behind_faults(direct: dict[str, str], variable: str, choose: Choose) -> Iterator[Faulty]:
    """Start a faulty way to a server, for the block.

    Args:
        direct: the environment in which a program uses the server.
        variable: which of it holds the server's URL.
    """
    proxy = Faulty(direct, variable, choose)
    _forget_endpoints()
    try:
        yield proxy
    finally:
        _forget_endpoints()
        proxy.close()


def _forget_endpoints() -> None:
    """Drop fsspec's file systems, each of which keeps the endpoint that it was made with."""
    for module, cls in (("s3fs", "S3FileSystem"), ("gcsfs", "GCSFileSystem"), ("adlfs", "AzureBlobFileSystem")):
        if module in sys.modules:  # gcsfs reads its settings as it is imported, and holdfast.store.gcs makes them
            getattr(sys.modules[module], cls).clear_instance_cache()


def use(proxy: Faulty, monkeypatch: pytest.MonkeyPatch, make_bucket: Callable[[], str] = servers.make_s3_bucket) -> str:
    """Make this process use the proxy; return the URL of an empty bucket, which is made without faults."""
    for name, value in proxy.direct.items():
        monkeypatch.setenv(name, value)
    bucket = make_bucket()
    for name, value in proxy.environment.items():
        monkeypatch.setenv(name, value)
    return bucket


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that has gone


class _Handler(BaseHTTPRequestHandler):
    """Forwards the requests of one connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    proxy: Faulty

    def handle_request(self) -> None:
        body = self._read_body()
        kind = self.proxy.strike(self.command, self.path, self.headers)
        if kind == CUT:
            return self._reset()
        if kind == REFUSED:
            return self._answer(503 if self.proxy.requests % 2 else 500, [], b"")
        if kind == SLOW:
            time.sleep(SLOW_S)
        answer = self._forward(body)
        if kind == LOST:
            return self._reset()
        return self._answer(*answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request  # noqa: N815

    def handle_expect_100(self) -> bool:
        going_on = super().handle_expect_100()
        self.wfile.flush()  # the client sends nothing before it has this
        return going_on

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # what comes after the last chunk
        return body

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.proxy.upstream, timeout=WITHIN_S)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in OF_CONNECTION}
            headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in OF_CONNECTION]
            if self.command == "HEAD":
                kept.append(("Content-Length", answer.headers.get("Content-Length", "0")))
            return answer.status, kept, content

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        elif not any(name == "Content-Length" for name, _ in headers):
            self.send_header("Content-Length", "0")
        self.end_headers()
        self.wfile.write(content)

    def _reset(self) -> None:
        """Reset the connection, as a network does that fails."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass
