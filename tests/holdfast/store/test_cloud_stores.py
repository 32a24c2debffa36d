"""Stores on clouds: what they cost, what they try again, and what they say when it can't be done."""

import asyncio
import base64
import functools
import gc
import random
import re
import threading
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import adlfs
import pytest
import s3fs

from holdfast.errors import StoreDenied, StoreError
from holdfast.store import Store, open_store, uploads
from holdfast.store.azure import AzureStore, AzureUpload
from holdfast.store.gcs import GcsStore
from holdfast.store.objects import ObjectStore
from holdfast.store.s3 import S3Store, S3Upload
from holdfast.testing.stores import StoreTests
from tests.conftest import AZURITE, free_port

needs_azurite = pytest.mark.skipif(not AZURITE.exists(), reason="Azurite is installed where there is npm")
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that anything pauses, as whoever asks again does; a slow machine is no pause."""
    pauses: list[float] = []
    pause, pause_async = time.sleep, asyncio.sleep

    def noted(seconds: float) -> None:
        pauses.append(seconds)
        pause(seconds)

    async def noted_async(seconds: float, result: Any = None) -> Any:
        pauses.append(seconds)
        return await pause_async(seconds, result)

    monkeypatch.setattr(time, "sleep", noted)
    monkeypatch.setattr(asyncio, "sleep", noted_async)
    return pauses


@pytest.mark.parametrize("scheme", ["s3://", "gs://", pytest.param("az://", marks=needs_azurite)])
def test_a_missing_bucket_says_so_at_once(scheme: str, request: pytest.FixtureRequest, pauses: list[float]) -> None:
    empty(scheme, request)
    pauses.clear()
    store = open_store(f"{scheme}no-such-bucket-here/runs")
    for write in (store.create, store.replace, functools.partial(in_parts, store)):
        with pytest.raises(StoreDenied, match="no-such-bucket-here") as caught:
            write("a", b"x" * 17 * 2**20)
        assert "create the bucket" in caught.value.hint
    assert store.list() == []
    assert sum(pauses) < 1


def test_a_lack_of_rights_says_so_at_once(gcs_bucket: str, pauses: list[float]) -> None:
    store = open_store("gs://forbidden/runs")
    for verb in (store.read, store.list, store.delete, store.exists, lambda name: store.create(name, b"")):
        with pytest.raises(StoreDenied, match="the caller does not have") as caught:
            verb("a")
        assert "the right to it" in caught.value.hint
    with pytest.raises(StoreDenied, match="the caller does not have"):
        in_parts(store, "a", b"x")
    assert sum(pauses) < 1


def test_what_may_not_be_deleted_says_so(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(f"{bucket}/runs", fresh_s3())
    store.create("a/b", b"")
    monkeypatch.setattr(store._fs, "rm", lambda *_, **__: [])
    with pytest.raises(StoreDenied, match="b is still there"):
        store.delete_folder("a")


@needs_azurite
def test_a_wrong_key_says_so_at_once(container: str, azure_server: str, pauses: list[float]) -> None:
    key = base64.b64encode(b"hunter2" * 9).decode()
    connection = re.sub("AccountKey=[^;]+", f"AccountKey={key}", azure_server)
    fs = adlfs.AzureBlobFileSystem(connection_string=connection, use_listings_cache=False, skip_instance_cache=True)
    store = AzureStore(f"{container}/runs", fs)
    for verb in (store.read, store.exists, lambda name: store.create(name, b"")):
        with pytest.raises(StoreDenied) as caught:
            verb("a")
        assert "credentials" in caught.value.hint or "the right to it" in caught.value.hint
        assert key not in "".join(traceback.format_exception(caught.value))
    assert sum(pauses) < 1


def test_a_storage_that_cannot_be_reached_is_never_a_no(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    store = S3Store(f"{bucket}/runs", fresh_s3())
    store.retry_within_s = 0.5
    with pytest.raises(StoreError, match="can't look at a"):
        store.exists("a")


def test_what_passes_is_tried_again(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(f"{bucket}/runs", fresh_s3())
    ask, failures = store._fs.pipe_file, iter([ConnectionResetError, TimeoutError])

    def flaky(path: str, data: bytes, **options: str) -> None:
        ask(path, data, **options)  # the request arrives, the answer is lost
        for failure in failures:
            raise failure

    monkeypatch.setattr(store._fs, "pipe_file", flaky)
    store.create("a", b"mine")
    assert store.read("a") == b"mine"


def test_s3_lists_from_where_it_is_asked_to(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(f"{bucket}/runs", fresh_s3())
    pages = paged(store, "call_s3", monkeypatch, MaxKeys=3)
    assert store.list("commits", "11") == ["12", "13", "14", "15"]
    assert [page["KeyCount"] for page in pages] == [3, 1]


def test_gcs_lists_from_where_it_is_asked_to(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"{gcs_bucket}/runs")
    assert isinstance(store, GcsStore)
    pages = paged(store, "call", monkeypatch, maxResults=3)
    assert store.list("commits", "11") == ["12", "13", "14", "15"]
    assert [len(page["items"]) for page in pages] == [3, 2]  # the offset is of the first name, not the one before


def test_s3_uploads_that_never_ended_are_swept(bucket: str) -> None:
    store = S3Store(f"{bucket}/runs", fresh_s3())
    StoreTests()._fail_to_create(store, "failed", 20)  # sweeps behind itself
    for name in ("runs/a/1", "runs/a/2", "runs/ab/3", "runs-not-these/4"):
        store._upload(f"{bucket.removeprefix('s3://')}/{name}").part(1, b"x")
    assert store.sweep(datetime(2009, 1, 1, tzinfo=UTC)) == 0  # moto began them all in 2010
    assert store.inside("a").sweep(datetime.now(UTC)) == 2
    assert store.sweep(datetime.now(UTC)) == 1
    assert [upload["Key"] for upload in store._fs.list_multipart_uploads(bucket[5:])] == ["runs-not-these/4"]


@pytest.mark.parametrize(
    ("scheme", "upload"), [("s3://", S3Upload), pytest.param("az://", AzureUpload, marks=needs_azurite)]
)
def test_several_parts_are_on_their_way_at_once(
    scheme: str, upload: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"{empty(scheme, request)}/runs")
    together, send = threading.Barrier(uploads.AT_ONCE, timeout=30), upload.part
    assert isinstance(store, ObjectStore)
    store.part_bytes = 5 * 2**20
    monkeypatch.setattr(upload, "part", lambda *given: (together.wait(), send(*given)))
    data = random.Random(0).randbytes(2 * uploads.AT_ONCE * store.part_bytes)
    in_parts(store, "a", data)
    assert store.read("a") == data


def test_memory_for_parts_is_bounded() -> None:
    sent = 0

    class Slow:
        at_once = 4

        def part(self, number: int, data: bytes) -> None:
            nonlocal sent
            time.sleep(0.005)
            sent += len(data)

        def complete(self) -> None: ...

        def abort(self) -> None: ...

    with uploads.PartsWriter(lambda _: None, Slow, lambda send: send(), part_bytes=2**20) as writer:
        tracemalloc.start()
        for _ in range(50):
            writer.write(bytes(2**20 + 1))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        writer.complete()
    assert sent == 50 * (2**20 + 1)
    assert peak_bytes < 9 * 2**20  # of the parts on their way, the one being filled, and the caller's


def test_a_part_that_fails_is_sent_again(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    send, losses = S3Upload.part, [ConnectionResetError, TimeoutError]

    def flaky(upload: S3Upload, number: int, data: bytes) -> None:
        send(upload, number, data)
        if number == 2 and losses:
            raise losses.pop()

    monkeypatch.setattr(S3Upload, "part", flaky)
    store = open_store(f"{bucket}/runs")
    assert isinstance(store, ObjectStore)
    store.part_bytes = 5 * 2**20
    data = random.Random(0).randbytes(3 * store.part_bytes + 1)
    in_parts(store, "a", data)
    assert store.read("a") == data


def test_gcsfs_is_not_given_a_part_twice(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GcsStore(f"{gcs_bucket}/runs")
    ask, losses = store._fs.call, [OSError("the line is dead")] * 2  # a part, and the end of the upload

    def flaky(*arguments: Any, **request: Any) -> Any:
        if losses and arguments[0] != "GET":
            raise losses.pop()
        return ask(*arguments, **request)

    monkeypatch.setattr(store._fs, "call", flaky)
    with pytest.raises(StoreError, match="the line is dead"):
        in_parts(store, "a", bytes(uploads.PART_BYTES + 1))
    gc.collect()
    time.sleep(0.5)  # gcsfs closes in the background what its destructor finds open
    assert store.list() == []


@pytest.mark.parametrize(("scheme", "call"), [("s3://", "call_s3"), ("gs://", "call")])
def test_a_part_that_cannot_be_sent_is_our_error(
    scheme: str, call: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, written = open_store(f"{empty(scheme, request)}/runs"), 0
    assert isinstance(store, ObjectStore)
    store.retry_within_s = 0.3

    def writing() -> Iterator[bytes]:
        nonlocal written
        for written in range(20):  # noqa: B007
            yield bytes(8 * 2**20)
            monkeypatch.setattr(store._fs, call, dead)

    def dead(*_: object, **__: object) -> None:
        raise OSError("the line is dead")

    with pytest.raises(StoreError, match=r"can't write a in .*the line is dead"):
        StoreTests._create_in_pieces(store, "a", writing())
    assert written < 19


@needs_azurite
def test_blocks_of_two_writers_do_not_mix(container: str) -> None:
    store = AzureStore(f"{container}/runs")
    path = f"{container.removeprefix('az://')}/runs/a"
    one, two = store._upload(path), store._upload(path)
    for upload, data in ((one, b"1"), (two, b"2")):
        upload.part(1, data)
    one.complete()
    with pytest.raises(FileExistsError):
        two.complete()
    assert store.read("a") == b"1"


def in_parts(store: Store, name: str, data: bytes) -> None:
    StoreTests._create_in_pieces(store, name, [data])


def empty(scheme: str, request: pytest.FixtureRequest) -> str:
    """The URL of an empty bucket."""
    return str(request.getfixturevalue({"s3://": "bucket", "gs://": "gcs_bucket", "az://": "container"}[scheme]))


def paged(store: ObjectStore, call: str, monkeypatch: pytest.MonkeyPatch, **options: int) -> list[dict[str, Any]]:
    """Every page that the store, which has some names in a folder, lists from now on."""
    for number in range(16):
        store.create(f"commits/{number:02d}", b"")
    pages: list[dict[str, Any]] = []
    ask = getattr(store._fs, call)

    def asked(*arguments: str, **request: Any) -> dict[str, Any]:
        pages.append(ask(*arguments, **request, **options))
        return pages[-1]

    monkeypatch.setattr(store._fs, call, asked)
    return pages


def fresh_s3() -> object:
    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
