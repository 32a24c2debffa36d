"""A simulated faulty network: a proxy in front of a real server that loses, refuses, cuts or delays some requests.

::

    with faulty_s3(rate=0.12, seed=1) as s3:
        ...  # a run in the environment `s3.environment`, whose AWS_ENDPOINT_URL is the proxy
    assert s3.faults["lost"]

The proxy runs in threads of the process that starts it; other processes reach it by its URL.
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

# The kinds of faults.
LOST = "lost"  # the server carries out the request; the connection is reset before the response
REFUSED = "refused"  # the server doesn't get the request; the response is 500 or 503
CUT = "cut"  # the server doesn't get the request; the connection is reset
SLOW = "slow"  # the server gets the request SLOW_S later
DENIED = "denied"  # the server doesn't get the request; the response is 403, as each cloud says it
TORN = "torn"  # the server carries out the request; the connection is closed in the middle of the response's body
SILENT = "silent"  # the server doesn't get the request; no response comes before the client asks again
SHORT = "short"  # the server carries out the request; the response has only the first half of its body
KINDS = (LOST, REFUSED, CUT, SLOW)
SLOW_S = 0.3
WITHIN_S = 300
# Headers of one connection, which a proxy must not forward.
OF_CONNECTION = {"connection", "keep-alive", "proxy-connection", "expect", "transfer-encoding", "content-length"}

# What each cloud says if a right is missing: headers and body.
S3_DENIES = (
    [("Content-Type", "application/xml")],
    b"<Error><Code>AccessDenied</Code><Message>User: arn:aws:iam::1:user/me is not authorized</Message></Error>",
)
GCS_DENIES = (
    [("Content-Type", "application/json")],
    (b'{"error": {"code": 403, "message": "me@team.iam does not have access to the object"}}'),
)
AZURE_DENIES = (
    [("Content-Type", "application/xml"), ("x-ms-error-code", "AuthorizationPermissionMismatch")],
    (b"<Error><Code>AuthorizationPermissionMismatch</Code><Message>This request is not authorized</Message></Error>"),
)

# Codes with which S3 refuses a request, and the status of each. A code is a kind of fault, too.
S3_REFUSES = {"BadDigest": 400, "ExpiredToken": 400, "IncompleteBody": 400, "RequestTimeTooSkewed": 403}

# Returns the kind of fault for a request, or "" for none. Arguments: method, path with query, headers.
Choose = Callable[[str, str, Any], str]


class Faulty:
    """A proxy that puts faults between clients and a server.

    Attributes:
        url: the proxy's URL.
        environment: the environment variables with which a program uses the server through the proxy.
        direct: the environment variables with which it uses the server without the proxy.
        faults: the number of faults of each kind so far.
        requests: the number of requests so far.
        asked_again: the number of requests that came while an earlier one got no response.
    """

    def __init__(self, direct: dict[str, str], variable: str, choose: Choose) -> None:
        self.direct = direct
        self.choose = choose
        self.faults: collections.Counter[str] = collections.Counter()
        self.requests = 0
        self.asked_again = self._silent = 0
        self.lock = threading.Lock()
        upstream = urlsplit(re.search("http://[^/;]+", direct[variable])[0])  # type: ignore[index]
        self.upstream = (upstream.hostname or "", upstream.port or 80)
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = direct | {variable: direct[variable].replace(upstream.geturl(), self.url)}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def strike(self, method: str, path: str, headers: Any) -> str:
        """Choose the fault for a request, and count it."""
        with self.lock:
            self.requests += 1
            self.asked_again += self._silent
            kind = self.choose(method, path, headers)
            self._silent = int(kind == SILENT)
            self.faults.update([kind] if kind else [])
            return kind

    def await_next(self) -> None:
        """Wait for the next request, at most `WITHIN_S` seconds."""
        deadline = time.monotonic() + WITHIN_S
        while self._silent and time.monotonic() < deadline:
            time.sleep(0.01)
        self._silent = 0

    def close(self) -> None:
        """Stop the proxy."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def at_random(rate: float, seed: int, kinds: tuple[str, ...] = KINDS) -> Choose:
    """Return a choice that strikes a share ``rate`` of all requests with random kinds of faults."""
    chance = random.Random(seed)
    return lambda method, path, headers: chance.choice(kinds) if chance.random() < rate else ""


def each_once(kind: str, *methods: str) -> Choose:
    """Return a choice that strikes the first try of every request with one of these methods."""
    seen: set[tuple[str, ...]] = set()

    def choose(method: str, path: str, headers: Any) -> str:
        request = (method, path, headers.get("Content-Range", ""))  # GCS sends all parts to one path
        if method not in methods or request in seen:
            return ""
        seen.add(request)
        return kind

    return choose


@contextlib.contextmanager
def faulty_s3(
    rate: float = 0.12, seed: int = 0, kinds: tuple[str, ...] = KINDS, choose: Choose | None = None
) -> Iterator[Faulty]:
    """Start an S3 server behind a faulty network, for the block.

    Args:
        rate: the share of requests that a fault strikes.
        seed: the seed of the random choice.
        kinds: the kinds of faults to choose from.
        choose: a choice of faults in place of the random one.
    """
    with (
        servers.s3_server() as direct,
        behind_faults(direct, "AWS_ENDPOINT_URL", choose or at_random(rate, seed, kinds)) as proxy,
    ):
        yield proxy


@contextlib.contextmanager
def behind_faults(direct: dict[str, str], variable: str, choose: Choose) -> Iterator[Faulty]:
    """Start a faulty proxy in front of a server, for the block.

    Args:
        direct: the environment variables with which a program uses the server.
        variable: the variable that holds the server's URL.
        choose: the choice of faults.
    """
    proxy = Faulty(direct, variable, choose)
    forget_endpoints()
    try:
        yield proxy
    finally:
        forget_endpoints()
        proxy.close()


def forget_endpoints() -> None:
    """Drop fsspec's cached file systems, because each keeps the endpoint that it was made with."""
    for module, cls in (("s3fs", "S3FileSystem"), ("gcsfs", "GCSFileSystem"), ("adlfs", "AzureBlobFileSystem")):
        if module in sys.modules:  # never import gcsfs here: holdfast.store.gcs must set its variables before
            getattr(sys.modules[module], cls).clear_instance_cache()


def use(proxy: Faulty, monkeypatch: pytest.MonkeyPatch, make_bucket: Callable[[], str] = servers.make_s3_bucket) -> str:
    """Make this process use the proxy; return the URL of an empty bucket, which is created without faults."""
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
        pass  # the client has disconnected


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
        if kind == DENIED:
            is_gcs = re.match("(/upload|/download)?/storage/v1/", self.path)
            denies = AZURE_DENIES if "x-ms-version" in self.headers else GCS_DENIES if is_gcs else S3_DENIES
            return self._answer(403, *denies)
        if kind in S3_REFUSES:
            content = f"<Error><Code>{kind}</Code><Message>{kind} was said</Message></Error>".encode()
            return self._answer(S3_REFUSES[kind], S3_DENIES[0], content)
        if kind == SILENT:
            self.proxy.await_next()
            return self._reset()
        if kind == SLOW:
            time.sleep(SLOW_S)
        status, headers, content = self._forward(body)
        if kind == LOST:
            return self._reset()
        if kind == TORN:
            return self._tear(status, headers, content)
        return self._answer(status, headers, content[: len(content) // 2] if kind == SHORT else content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request  # noqa: N815

    def handle_expect_100(self) -> bool:
        going_on = super().handle_expect_100()
        self.wfile.flush()  # the client waits for this before it sends the body
        return going_on

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # skip the trailer after the last chunk
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
        if self.command != "HEAD":
            self.wfile.write(content)

    def _tear(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        """Announce the whole response, send the first half of its body, and close the connection."""
        self.send_response_only(status)
        for name, value in [*headers, ("Content-Length", str(len(content)))]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        self.close_connection = True

    def _reset(self) -> None:
        """Reset the connection, as a failing network does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass
