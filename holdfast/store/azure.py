"""The store on Azure Blob Storage."""

import secrets
from datetime import datetime
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobBlock
from fsspec.asyn import sync

from holdfast.store.objects import ObjectStore
from holdfast.store.uploads import AT_ONCE, WRITER


class AzureStore(ObjectStore):
    """A prefix of a container on Azure Blob Storage.

    `sweep` has nothing to do: Azure deletes uncommitted blocks after a week. `list` always lists the whole folder,
    because Azure can't start a listing after a given name. `copy` returns False, because a blob that is being copied
    appears under its name before its bytes are complete.
    """

    def _stat(self, path: str) -> tuple[int, datetime]:
        async def stat() -> Any:
            async with self._fs.service_client.get_blob_client(*self._split(path)) as blob:
                return await blob.get_blob_properties()

        found = sync(self._fs.loop, stat)
        return int(found.size), found.last_modified

    def _upload(self, path: str) -> "AzureUpload":
        return AzureUpload(self._fs, *self._split(path))


class AzureUpload:
    """An upload in blocks. Azure mixes the blocks of all writers of a blob, so block ids contain the writer's token."""

    at_once = AT_ONCE

    def __init__(self, fs: Any, container: str, key: str) -> None:
        self._fs, self._container, self._key = fs, container, key
        self._token = secrets.token_hex(8)
        self._numbers: set[int] = set()

    def part(self, number: int, data: bytes) -> None:
        self._call("stage_block", self._block_id(number), data, length=len(data))
        self._numbers.add(number)

    def complete(self) -> None:
        blocks = [BlobBlock(self._block_id(number)) for number in sorted(self._numbers)]
        try:
            metadata = {WRITER: self._token}
            self._call("commit_block_list", blocks, metadata=metadata, match_condition=MatchConditions.IfMissing)
        except HttpResponseError as error:
            # Another writer has committed the blob first, and Azure has discarded the blocks of all other writers.
            if getattr(error, "error_code", "") in ("BlobAlreadyExists", "InvalidBlockList"):
                raise FileExistsError(self._key) from None
            raise

    def has_won(self) -> bool:
        return bool(self._call("get_blob_properties").metadata.get(WRITER) == self._token)

    def abort(self) -> None:
        """Do nothing: Azure can't delete single blocks."""

    def _block_id(self, number: int) -> str:
        return f"{self._token}-{number:06d}"

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        async def call() -> Any:
            async with self._fs.service_client.get_blob_client(self._container, self._key) as blob:
                return await getattr(blob, method)(*arguments, **options)

        return sync(self._fs.loop, call)
