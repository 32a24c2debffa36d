"""The store on Google Cloud Storage."""

import os
import secrets
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from aiohttp import ClientTimeout

from holdfast.errors import NameTaken
from holdfast.store.failures import translate_library_errors
from holdfast.store.objects import ObjectStore
from holdfast.store.uploads import WRITER

# Without this setting, gcsfs asks a second service for the type of each bucket, and hangs if that service doesn't
# exist.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


# Timeouts of a request in seconds: for the connection, for the next bytes of a response, and in total. At 56 kB/s a
# part of 16 MiB still arrives in time. gcsfs's default has no timeouts, so a request on a dead connection would never
# end.
CONNECT_WITHIN_S = 30.0
SILENT_S = 60.0
REQUEST_WITHIN_S = 300.0


class GcsStore(ObjectStore):
    """A prefix of a bucket on Google Cloud Storage.

    `sweep` has nothing to do: Google deletes unfinished uploads after a week, and can't list them.
    """

    def _options(self) -> dict[str, Any]:
        limits = ClientTimeout(total=REQUEST_WITHIN_S, sock_connect=CONNECT_WITHIN_S, sock_read=SILENT_S)
        # An emulator needs no credentials. Google's own client doesn't send credentials to an emulator, either.
        token = {"token": "anon"} if os.environ.get("STORAGE_EMULATOR_HOST") else {}
        return super()._options() | {"requests_timeout": limits} | token

    def copy(self, source: str, name: str) -> bool:
        """Copy an object on the server, and return True. A large object needs several requests."""
        paths = *self._split(self._path(source)), *self._split(self._path(name))
        token = secrets.token_hex(16)

        def rewrite() -> None:
            request: dict[str, Any] = {"ifGenerationMatch": 0, "json": {"metadata": {WRITER: token}}}
            while True:
                found = self._fs.call("POST", "b/{}/o/{}/rewriteTo/b/{}/o/{}", *paths, json_out=True, **request)
                if found["done"]:
                    return
                request["rewriteToken"] = found["rewriteToken"]

        try:
            self._ask(f"copy {source} to {name}", rewrite)
        except NameTaken:  # perhaps an earlier try of this copy has created the object, and its response was lost
            if self._ask(f"look at {name}", lambda: writer_of(self._fs, self._path(name))) != token:
                raise
        return True

    def _stat(self, path: str) -> tuple[int, datetime]:
        found = _read_metadata(self._fs, path)
        return int(found["size"]), datetime.fromisoformat(found["updated"])

    def _upload(self, path: str) -> "GcsUpload":
        where = f"write {path.removeprefix(f'{self._root}/')} in {self.url}"
        token = secrets.token_hex(16)
        file = self._fs.open(path, "xb", block_size=self.part_bytes, metadata={WRITER: token})
        return GcsUpload(file, where, lambda: writer_of(self._fs, path) == token)

    def _list_after(self, path: str, after: str) -> Iterable[str]:
        bucket, key = self._split(path)
        prefix = f"{key}/" if key else ""
        request = {"prefix": prefix, "delimiter": "/", "startOffset": prefix + after}
        while True:
            page = self._fs.call("GET", "b/{}/o", bucket, json_out=True, **request)
            yield from (each["name"] for each in page.get("items", []))
            yield from page.get("prefixes", [])
            if "nextPageToken" not in page:
                return
            request["pageToken"] = page["nextPageToken"]


def _read_metadata(fs: Any, path: str) -> dict[str, Any]:
    """Return an object's metadata, in one request."""
    bucket, key, *_ = fs.split_path(path)
    found: dict[str, Any] = fs.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
    return found


def writer_of(fs: Any, path: str) -> str:
    """Return the token of the upload or copy that created an object; empty if the object has no token."""
    return str(_read_metadata(fs, path).get("metadata", {}).get(WRITER, ""))


class GcsUpload:
    """A resumable upload. It sends the parts one after the other.

    gcsfs itself sends a failed part again. A second `write` of the same bytes would append them twice. So this class
    translates gcsfs's errors into errors that aren't retried.
    """

    at_once = 1

    def __init__(self, file: Any, where: str, has_won: Callable[[], bool]) -> None:
        self._file, self._where = file, where
        self.has_won = has_won

    def part(self, number: int, data: bytes) -> None:
        with translate_library_errors(self._where):
            self._file.write(data)

    def complete(self) -> None:
        with translate_library_errors(self._where):
            self._file.close()

    def abort(self) -> None:
        try:
            self._file.discard()
        finally:
            self._file.closed = True  # so that gcsfs's destructor doesn't publish the incomplete file
