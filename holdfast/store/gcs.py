"""Google Cloud Storage."""

import os
import secrets
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from holdfast.errors import NameTaken
from holdfast.store.failures import explained
from holdfast.store.objects import ObjectStore
from holdfast.store.uploads import WRITER

# gcsfs would otherwise ask a second service what kind of bucket this is, and wait for it where there is none.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


class GcsStore(ObjectStore):
    """A prefix of a bucket on Google Cloud Storage.

    There is nothing to sweep: an upload that never ended expires after a week, and can't be listed.
    """

    def _options(self) -> dict[str, Any]:
        # An emulator takes no credentials; Google's own client gives it none either.
        return super()._options() | ({"token": "anon"} if os.environ.get("STORAGE_EMULATOR_HOST") else {})

    def copy(self, source: str, name: str) -> bool:
        """As the contract says; a long one takes several requests."""
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
        except NameTaken:  # perhaps by ourselves, in a try whose answer was lost
            if self._ask(f"look at {name}", lambda: writer_of(self._fs, self._path(name))) != token:
                raise
        return True

    def _stat(self, path: str) -> tuple[int, datetime]:
        found = describe(self._fs, path)
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


def describe(fs: Any, path: str) -> dict[str, Any]:
    """Return what is known of an object, in one request."""
    bucket, key, *_ = fs.split_path(path)
    found: dict[str, Any] = fs.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
    return found


def writer_of(fs: Any, path: str) -> str:
    """Return the token of the upload or copy that made an object; empty if it has none."""
    return str(describe(fs, path).get("metadata", {}).get(WRITER, ""))


class GcsUpload:
    """A resumable upload; its parts follow one another.

    gcsfs itself sends a part again whose failure may pass, and it must not be given the same bytes twice: whatever it
    raises is final.
    """

    at_once = 1

    def __init__(self, file: Any, where: str, has_won: Callable[[], bool]) -> None:
        self._file, self._where = file, where
        self.has_won = has_won

    def part(self, number: int, data: bytes) -> None:
        with explained(self._where):
            self._file.write(data)

    def complete(self) -> None:
        with explained(self._where):
            self._file.close()

    def abort(self) -> None:
        try:
            self._file.discard()
        finally:
            self._file.closed = True  # its destructor would otherwise publish what there is of it
