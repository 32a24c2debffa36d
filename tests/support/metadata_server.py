"""A stub of three clouds' metadata servers, over HTTP: their preemption notices, and the headers that they require."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from holdfast.machine import preemption

TOKEN = "a-token-of-this-session"
MACHINE = "trainer_7"


@dataclass
class MetadataStub:
    """The notices that the stub gives; none by default."""

    url: str = ""
    paths: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def interrupt_on_aws(self, within_s: float) -> None:
        at = datetime.now(UTC) + timedelta(seconds=within_s)
        action = {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.paths["/latest/meta-data/spot/instance-action"] = json.dumps(action)

    def recommend_rebalance_on_aws(self) -> None:
        notice = {"noticeTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.paths["/latest/meta-data/events/recommendations/rebalance"] = json.dumps(notice)

    def preempt_on_gcp(self) -> None:
        self.paths["/computeMetadata/v1/instance/preempted"] = "TRUE"

    def schedule_on_azure(self, kind: str, within_s: float, machine: str = MACHINE) -> None:
        not_before = format_datetime(datetime.now(UTC) + timedelta(seconds=within_s), usegmt=True)
        event = {
            "EventId": "602d9444-d2cd-49c7-8624-8643e7171297", "EventType": kind, "ResourceType": "VirtualMachine",
            "Resources": ["another_1", machine], "EventStatus": "Scheduled", "NotBefore": not_before,
        }  # fmt: skip
        events = {"DocumentIncarnation": 2, "Events": [event]}
        self.paths["/metadata/scheduledevents?api-version=2020-07-01"] = json.dumps(events)
        self.paths["/metadata/instance/compute/name?api-version=2021-02-01&format=text"] = MACHINE


class _Handler(BaseHTTPRequestHandler):
    stub: MetadataStub

    def do_PUT(self) -> None:
        if self.path == "/latest/api/token" and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
            self._answer(200, TOKEN)
        else:
            self._answer(400, "")

    def do_GET(self) -> None:
        self.stub.asked.append(self.path)
        if not self._is_entitled():
            self._answer(401 if self.path.startswith("/latest") else 403, "")
        elif self.path in self.stub.paths:
            self._answer(200, self.stub.paths[self.path])
        elif self.path.startswith("/metadata/scheduledevents"):
            self._answer(200, json.dumps({"DocumentIncarnation": 1, "Events": []}))
        elif self.path.startswith("/computeMetadata"):
            self._answer(200, "FALSE")
        else:
            self._answer(404, "<?xml version='1.0'?><html>404 - Not Found</html>")

    def _is_entitled(self) -> bool:
        if self.path.startswith("/latest"):
            return self.headers.get("X-aws-ec2-metadata-token") == TOKEN
        if self.path.startswith("/computeMetadata"):
            return self.headers.get("Metadata-Flavor") == "Google"
        return self.headers.get("Metadata") == "true"

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


def be_in(stub: MetadataStub, cloud: str, patch: pytest.MonkeyPatch) -> None:
    """Put this machine into a cloud whose metadata server is the stub."""
    patch.setattr(preemption, "find_cloud", lambda: cloud)
    patch.setitem(preemption.METADATA_URLS, cloud, stub.url)


@contextlib.contextmanager
def metadata_server() -> Iterator[MetadataStub]:
    """Run a stub on the loopback interface while the block lasts; yield it."""
    stub = MetadataStub()
    handler = type("Handler", (_Handler,), {"stub": stub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
