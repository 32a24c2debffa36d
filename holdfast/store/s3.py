"""The store on Amazon S3 and S3-compatible services.

With the precondition ``If-None-Match: *`` a request never replaces an object. `objects.ObjectStore.create` sends it
with the only request for a small object, and `S3Upload.complete` with the last request of a multipart upload.
"""

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from holdfast.errors import NameMissing, StoreError
from holdfast.store.objects import ObjectStore
from holdfast.store.uploads import AT_ONCE, WRITER, complete

# The number of bytes that one request copies. S3 allows up to 5 GiB, but such a request would take long.
COPIED_BYTES = 2**30


class S3Store(ObjectStore):
    """A prefix of a bucket on S3."""

    def copy(self, source: str, name: str) -> bool:
        """Copy an object on the server by a multipart upload whose parts are copies. Return False for a small object.

        Not all S3-compatible services support a precondition for a plain copy, but all support it for a multipart
        upload. For an object of less than `part_bytes` bytes, the four requests of a multipart upload would take longer
        than sending the bytes.
        """
        size_bytes = self.size_bytes(source)
        if size_bytes < self.part_bytes:
            return False
        ask = functools.partial(self._ask, f"copy {source} to {name}")
        upload = ask(lambda: self._upload(self._path(name)))
        try:
            for number, start in enumerate(range(0, size_bytes, COPIED_BYTES), start=1):
                stop = min(start + COPIED_BYTES, size_bytes)
                ask(functools.partial(upload.copy, number, *self._split(self._path(source)), start, stop))
            complete(upload, ask)
        except BaseException:
            with contextlib.suppress(Exception):  # raise the first error; `sweep` deletes the remains later
                upload.abort()
            raise
        return True

    def sweep(self, before: datetime, is_spared: Callable[[str], bool] = lambda folder: False) -> int:
        """Abort the multipart uploads that began before a time and were neither completed nor aborted."""
        bucket, key = self._split(self._root)
        prefix = f"{key}/" if key else ""
        swept = 0
        for upload in self._uploads(Bucket=bucket, Prefix=prefix):
            folder, inside, _ = upload["Key"].removeprefix(prefix).partition("/")
            if upload["Initiated"] < before and not (inside and is_spared(folder)):
                with contextlib.suppress(NameMissing):  # this upload has just ended
                    self._call("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                    swept += 1
        return swept

    def abort_nothing(self) -> None:
        """Abort an upload that doesn't exist, to find out whether that is allowed.

        Raises:
            StoreDenied: the right to abort an upload is missing.
        """
        bucket, key = self._split(self._path("nothing"))
        with contextlib.suppress(NameMissing):
            self._call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId="nothing")

    @contextlib.contextmanager
    def unfinished(self, name: str) -> Iterator[None]:
        """Begin an upload, and leave it unfinished during the block, to test whether `sweep` finds it."""
        upload = self._ask(f"write {name}", lambda: self._upload(self._path(name)))
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # `sweep` has already aborted the upload
                upload.abort()

    def _uploads(self, **request: str) -> Iterator[dict[str, Any]]:
        while True:
            page = self._call("list_multipart_uploads", **request)
            yield from page.get("Uploads", [])
            if not page.get("IsTruncated"):
                return
            request |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _call(self, method: str, **request: str) -> dict[str, Any]:
        return self._ask("sweep", lambda: dict(self._fs.call_s3(method, **request)))

    def _stat(self, path: str) -> tuple[int, datetime]:
        bucket, key = self._split(path)
        found = self._fs.call_s3("head_object", Bucket=bucket, Key=key)
        return int(found["ContentLength"]), found["LastModified"]

    def _upload(self, path: str) -> "S3Upload":
        return S3Upload(self._fs, *self._split(path))

    def _list_after(self, path: str, after: str) -> Iterable[str]:
        bucket, key = self._split(path)
        prefix = f"{key}/" if key else ""
        request = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/", "StartAfter": prefix + after}
        while True:
            page = self._fs.call_s3("list_objects_v2", **request)
            yield from (each["Key"] for each in page.get("Contents", []))
            yield from (each["Prefix"] for each in page.get("CommonPrefixes", []))
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]


class S3Upload:
    """A multipart upload."""

    at_once = AT_ONCE

    def __init__(self, fs: Any, bucket: str, key: str) -> None:
        self._fs, self._which = fs, {"Bucket": bucket, "Key": key}
        self._token = secrets.token_hex(16)
        begun = fs.call_s3("create_multipart_upload", **self._which, Metadata={WRITER: self._token})
        self._which["UploadId"] = begun["UploadId"]
        self._etags: dict[int, str] = {}

    def part(self, number: int, data: bytes) -> None:
        self._etags[number] = self._call("upload_part", PartNumber=number, Body=data)["ETag"]

    def copy(self, number: int, bucket: str, key: str, start: int, stop: int) -> None:
        """Add a part to the upload: a copy of the bytes ``[start, stop)`` of another object."""
        source = {"CopySource": {"Bucket": bucket, "Key": key}, "CopySourceRange": f"bytes={start}-{stop - 1}"}
        self._etags[number] = self._call("upload_part_copy", PartNumber=number, **source)["CopyPartResult"]["ETag"]

    def complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._etags.items())]
        self._call("complete_multipart_upload", MultipartUpload={"Parts": parts}, IfNoneMatch="*")

    def has_won(self) -> bool:
        try:
            found = self._fs.call_s3("head_object", Bucket=self._which["Bucket"], Key=self._which["Key"])
        except FileNotFoundError:
            return False
        return bool(found["Metadata"].get(WRITER) == self._token)

    def abort(self) -> None:
        self._call("abort_multipart_upload")

    def _call(self, method: str, **request: Any) -> dict[str, Any]:
        try:
            return dict(self._fs.call_s3(method, **self._which, **request))
        except FileNotFoundError:  # the upload no longer exists; the bucket existed when the upload began
            raise StoreError(f"another process has ended the upload of {self._which['Key']}") from None
