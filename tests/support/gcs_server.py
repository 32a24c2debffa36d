"""A server for the JSON API of Google Cloud Storage that gcsfs uses: ``python -m tests.support.gcs_server PORT``.

A write with ``ifGenerationMatch=0`` succeeds only if the object doesn't exist. Listings have short pages. The bucket
``forbidden`` refuses every request.
"""

import base64
import hashlib
import json
import re
import secrets
import sys
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

PAGE = 7
LARGE = 32 * 2**20


class Answer(Exception):
    """The response to a request, raised to end its handling."""

    def __init__(self, status: int, body: Any = b"", **headers: str) -> None:
        super().__init__(status)
        if isinstance(body, str):
            body = {"error": {"code": status, "message": body}}
        self.status, self.headers = status, headers
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


class Buckets:
    """All objects, and all unfinished uploads."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, tuple[dict[str, Any], bytes]]] = {}
        self.uploads: dict[str, tuple[str, str, bool, bytearray, dict[str, str]]] = {}
        self.lock = threading.RLock()
        self.generation = 0

    def bucket(self, name: str) -> dict[str, tuple[dict[str, Any], bytes]]:
        if name == "forbidden":
            raise Answer(403, "the caller does not have storage.objects access")
        if name not in self.objects:
            raise Answer(404, "The specified bucket does not exist.")
        return self.objects[name]

    def object(self, bucket: str, name: str) -> tuple[dict[str, Any], bytes]:
        try:
            return self.bucket(bucket)[name]
        except KeyError:
            raise Answer(404, f"No such object: {bucket}/{name}") from None

    def insert(
        self, bucket: str, name: str, data: bytes, *, once: bool, metadata: dict[str, str] | None = None
    ) -> dict[str, Any]:
        with self.lock:
            self.check_once(bucket, name, once)
            self.generation += 1
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            found = {
                "kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(data)),
                "generation": str(self.generation), "timeCreated": now, "updated": now,
                "contentType": "application/octet-stream",
                "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(), "metadata": metadata or {},
            }  # fmt: skip
            self.objects[bucket][name] = (found, data)
            return found

    def check_once(self, bucket: str, name: str, once: bool) -> None:
        if name in self.bucket(bucket) and once:
            raise Answer(412, "At least one of the pre-conditions you specified did not hold.")

    def page(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        first, token = query.get("startOffset", ""), query.get("pageToken", "")
        found: dict[str, dict[str, Any] | None] = {}
        for name, (metadata, _) in sorted(self.bucket(bucket).items()):
            if name.startswith(prefix) and name >= first:
                inner, cut, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else (name, "", "")
                found[prefix + inner + cut if cut else name] = None if cut else metadata
        names = [name for name in found if name > token]
        page = names[: min(PAGE, int(query.get("maxResults", PAGE)))]
        answer: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [found[name] for name in page if found[name]],
            "prefixes": [name for name in page if not found[name]],
        }
        return answer | ({"nextPageToken": page[-1]} if len(page) < len(names) else {})


class Handler(BaseHTTPRequestHandler):
    """The handler of one connection. Every response, of success or failure, is raised as an `Answer`."""

    protocol_version = "HTTP/1.1"
    # Send a response in one packet: a second one would wait for the first one's acknowledgement, 40 ms a request.
    wbufsize = -1
    buckets = Buckets()

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        query, data = dict(parse_qsl(url.query)), self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            with self.buckets.lock:
                self.route(self.command, url.path, query, data)
            raise Answer(501, f"{self.command} {url.path} is not one of the requests that gcsfs makes")
        except Answer as answer:
            self.send_response(answer.status)
            for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

    do_GET = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815

    def route(self, method: str, path: str, query: dict[str, str], data: bytes) -> None:
        if (method, path) == ("POST", "/storage/v1/b"):
            self.buckets.objects[json.loads(data)["name"]] = {}
            raise Answer(200, {"kind": "storage#bucket"})
        found = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)(/o(?:/(.+))?)?", path)
        if not found:
            return
        kind, bucket, objects, name = found[1], found[2], found[3], unquote(found[4] or "")
        if kind == "/upload":
            self.upload(bucket, query, data)
        elif not objects and method == "GET":
            self.buckets.bucket(bucket)
            raise Answer(200, {"kind": "storage#bucket", "name": bucket})
        elif not name and method == "GET":
            raise Answer(200, self.buckets.page(bucket, query))
        elif method == "POST" and (rewrite := re.fullmatch(r"(.+)/rewriteTo/b/([^/]+)/o/(.+)", found[4])):
            self.rewrite(bucket, *map(unquote, rewrite.groups()), query, metadata_in(data))
        elif method == "DELETE":
            self.buckets.object(bucket, name)
            del self.buckets.bucket(bucket)[name]
            raise Answer(204)
        elif method == "GET":
            metadata, content = self.buckets.object(bucket, name)
            if kind == "/download" or query.get("alt") == "media":
                self.send_media(content)
            raise Answer(200, metadata)

    def rewrite(
        self, bucket: str, name: str, to: str, new_name: str, query: dict[str, str], metadata: dict[str, str]
    ) -> None:
        """Copy an object; a large one takes two requests, as Google's may."""
        _, content = self.buckets.object(bucket, name)
        once = query.get("ifGenerationMatch") == "0"
        if len(content) >= LARGE and "rewriteToken" not in query:
            self.buckets.check_once(to, new_name, once)
            raise Answer(200, {"kind": "storage#rewriteResponse", "done": False, "rewriteToken": secrets.token_hex(8)})
        found = self.buckets.insert(to, new_name, content, once=once, metadata=metadata)
        raise Answer(200, {"kind": "storage#rewriteResponse", "done": True, "resource": found})

    def send_media(self, content: bytes) -> None:
        bounds = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not bounds:
            raise Answer(200, content)
        start, last = int(bounds[1]), int(bounds[2] or len(content) - 1)
        if start >= len(content):
            raise Answer(416, "Request range not satisfiable")
        raise Answer(206, content[start : last + 1])

    def upload(self, bucket: str, query: dict[str, str], data: bytes) -> None:
        if "upload_id" in query:
            self.upload_part(query["upload_id"], data)
        once = query.get("ifGenerationMatch") == "0"
        if query["uploadType"] == "multipart":
            metadata, content = self.parts_of(data)
            raise Answer(200, self.buckets.insert(bucket, metadata["name"], content, once=once))
        if query["uploadType"] == "media":
            raise Answer(200, self.buckets.insert(bucket, query["name"], data, once=once))
        self.buckets.check_once(bucket, query["name"], once)
        upload_id = secrets.token_hex(8)
        self.buckets.uploads[upload_id] = (bucket, query["name"], once, bytearray(), metadata_in(data))
        host, condition = self.headers["Host"], "&ifGenerationMatch=0" if once else ""
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload_id}{condition}"
        raise Answer(200, b"", Location=f"http://{host}{path}")

    def parts_of(self, data: bytes) -> tuple[dict[str, Any], bytes]:
        boundary = b"--" + self.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
        _, metadata, media = data.split(boundary, 2)
        content = media.split(b"\n\n", 1)[1].removesuffix(b"\n" + boundary + b"--")
        return json.loads(metadata.split(b"\n\n", 1)[1]), content

    def upload_part(self, upload_id: str, data: bytes) -> None:
        try:
            bucket, name, once, content, metadata = self.buckets.uploads[upload_id]
        except KeyError:
            raise Answer(404, "no such upload") from None
        if self.command == "DELETE":
            del self.buckets.uploads[upload_id]
            raise Answer(499)
        bounds = re.fullmatch(r"bytes (?:\*|(\d+)-(\d+))/(\*|\d+)", self.headers["Content-Range"])
        assert bounds
        if bounds[1]:
            start, stop = int(bounds[1]), int(bounds[2]) + 1
            if stop - start != len(data) or start > len(content):
                raise Answer(400, "the range is not that of the bytes")
            if bounds[3] == "*" and len(data) % 2**18:
                raise Answer(400, "the bytes are no multiple of 256 KiB")
            content[start:stop] = data
        if bounds[3] == "*" or int(bounds[3]) > len(content):
            raise Answer(308, b"", Range=f"bytes=0-{len(content) - 1}")
        found = self.buckets.insert(bucket, name, bytes(content), once=once, metadata=metadata)
        del self.buckets.uploads[upload_id]
        raise Answer(200, found)

    def log_message(self, format: str, *args: object) -> None:
        pass


def metadata_in(data: bytes) -> dict[str, str]:
    """Return the metadata that a request gives an object."""
    found: dict[str, str] = json.loads(data).get("metadata", {}) if data else {}
    return found


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that disconnected is no error
            super().handle_error(request, client_address)


if __name__ == "__main__":
    PAGE = int(sys.argv[2]) if len(sys.argv) > 2 else PAGE
    threading.Thread(target=Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever, daemon=True).start()
    sys.stdin.read()  # returns when the parent process ends, even if it is killed
