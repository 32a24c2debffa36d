"""Requests, counted where a store's verbs are called and where HTTP leaves this process."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import aiohttp

from holdfast.store import Store

VERBS = (
    "create", "creating", "copy", "replace", "read", "pieces", "fill", "size_bytes", "modified", "exists", "list",
    "delete", "delete_folder", "sweep",
)  # fmt: skip


@dataclass
class Tally:
    """What was asked of a store.

    Attributes:
        requests: calls of its verbs, of which each is at least a request.
        http: requests that s3fs and gcsfs sent; both send theirs with aiohttp.
        names: what listings answered with. Object stores send them a thousand a request; a local folder is always
            read whole.
        bytes_read: by `Store.read`, which reads records.
    """

    requests: int = 0
    http: int = 0
    names: int = 0
    bytes_read: int = 0
    ms: float = 0.0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """The tally is of what is asked in the block."""
        send = aiohttp.ClientRequest.send

        async def counted(request: aiohttp.ClientRequest, *arguments: Any) -> aiohttp.ClientResponse:
            self.http += 1
            return await send(request, *arguments)

        self.requests = self.http = self.names = self.bytes_read = 0
        began = time.perf_counter()
        with mock.patch.object(aiohttp.ClientRequest, "send", counted):
            yield
        self.ms = (time.perf_counter() - began) * 1000


def counted(store: Store, tally: Tally) -> Store:
    """The store; what is asked of it, and of its folders, is put down."""
    return cast(Store, _Counted(store, tally))


class _Counted:
    def __init__(self, store: Store, tally: Tally) -> None:
        self._store, self._tally = store, tally

    def inside(self, folder: str) -> Store:
        return counted(self._store.inside(folder), self._tally)

    def existing(self) -> Store:
        return counted(self._store.existing(), self._tally)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._count(name, found) if name in VERBS else found

    def _count(self, verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*arguments: Any, **options: Any) -> Any:
            self._tally.requests += 1
            answer = call(*arguments, **options)
            if verb == "list":
                self._tally.names += len(answer)
            elif verb == "read":
                self._tally.bytes_read += len(answer)
            return answer

        return calling
