"""The API of Kubernetes for one pod, over HTTPS with a certificate of its own, and what a pod finds in its folder."""

import contextlib
import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast.extensions.kubernetes import pod

TOKEN = "a-token"
# The conditions of a pod that the eviction API is about to delete, as `kubectl get pod -o json` shows them.
EVICTED = {
    "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
    "message": "Eviction API: evicting", "lastProbeTime": None, "lastTransitionTime": "2026-01-02T03:04:05Z",
}  # fmt: skip
READY = {"type": "Ready", "status": "True", "lastProbeTime": None, "lastTransitionTime": "2026-01-02T03:04:05Z"}


class PodServer:
    """Answers requests for the pod ``train-0`` in the namespace ``team``.

    Attributes:
        conditions: the pod's conditions.
        status: the status of each answer.
        body: the body of each answer, in place of the pod; None for the pod.
        is_silent: whether requests get no answer.
        asked: the requests, as method, path and token.
    """

    def __init__(self, folder: Path) -> None:
        self.conditions: list[dict[str, Any]] = [READY]
        self.status, self.is_silent = 200, False
        self.body: bytes | None = None
        self.asked: list[tuple[str, str, str]] = []
        self._closed = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append((self.command, self.path, self.headers["Authorization"]))
                if server.is_silent:
                    server._closed.wait(60)
                    return
                body = server.body if server.body is not None else server.describe()
                self.send_response(server.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_make_certificate(folder))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def describe(self) -> bytes:
        """Return the pod, as the API gives it."""
        status = {"phase": "Running", "conditions": self.conditions}
        return json.dumps(
            {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "train-0"}, "status": status}
        ).encode()

    def close(self) -> None:
        """End the server, and the requests that got no answer."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()


def _make_certificate(folder: Path) -> Path:
    """Write ``ca.crt``, a certificate for 127.0.0.1, and a file of the certificate with its key. Return that file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    (folder / "ca.crt").write_bytes(public)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "server.pem"
    path.write_bytes(private + public)
    return path


@contextlib.contextmanager
def within_a_pod(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[PodServer]:
    """Let this process find itself in the pod ``train-0``; yield the cluster's API.

    Args:
        folder: an empty folder, for the certificate and the pod's token.
    """
    server = PodServer(folder)
    (folder / "namespace").write_text("team\n")
    (folder / "token").write_text(f"{TOKEN}\n")
    patch.setattr(pod, "RIGHTS", folder)
    patch.setenv(pod.HOST_VARIABLE, "127.0.0.1")
    patch.setenv(pod.PORT_VARIABLE, str(server.port))
    patch.setenv(pod.POD_VARIABLE, "train-0")
    try:
        yield server
    finally:
        server.close()
