"""Stores on clouds: their requests and memory, their retries, and their error messages."""

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
from tasks.server import free_port
from tests.conftest import AZURITE
from tests.support.faulty import faulty_s3, use
from tests.support.waiting import WITHIN_S

needs_azurite = pytest.mark.skipif(not AZURITE.exists(), reason="Azurite is installed where there is npm")
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that gets the seconds of every sleep. A retry sleeps first; a slow machine adds nothing."""
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
def test_a_missing_bucket_is_not_retried(scheme: str, request: pytest.FixtureRequest, pauses: list[float]) -> None:
    empty(scheme, request)
    pauses.clear()
    store = open_store(f"{scheme}no-such-bucket-here/runs")
    for write in (store.create, store.replace, functools.partial(in_parts, store)):
        with pytest.raises(StoreDenied, match="no-such-bucket-here") as caught:
            write("a", b"x" * 17 * 2**20)
        assert "create the bucket" in caught.value.hint
    assert store.list() == []
    assert sum(pauses) < 1


def test_a_lack_of_permission_is_not_retried(gcs_bucket: str, pauses: list[float]) -> None:
    store = open_store("gs://forbidden/runs")
    for verb in (store.read, store.list, store.delete, store.exists, lambda name: store.create(name, b"")):
        with pytest.raises(StoreDenied, match="the caller does not have") as caught:
            verb("a")
        assert "the right to perform this action" in caught.value.hint
    with pytest.raises(StoreDenied, match="the caller does not have"):
        in_parts(store, "a", b"x")
    assert sum(pauses) < 1


def test_a_denied_deletion_is_reported(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(f"{bucket}/runs", fresh_s3())
    store.create("a/b", b"")
    monkeypatch.setattr(store._fs, "rm", lambda *_, **__: [])
    with pytest.raises(StoreDenied, match=r"it still contains .*b"):
        store.delete_folder("a")


@needs_azurite
def test_a_wrong_key_is_not_retried(container: str, azure_server: str, pauses: list[float]) -> None:
    key = base64.b64encode(b"hunter2" * 9).decode()
    connection = re.sub("AccountKey=[^;]+", f"AccountKey={key}", azure_server)
    fs = adlfs.AzureBlobFileSystem(connection_string=connection, use_listings_cache=False, skip_instance_cache=True)
    store = AzureStore(f"{container}/runs", fs)
    for verb in (store.read, store.exists, lambda name: store.create(name, b"")):
        with pytest.raises(StoreDenied) as caught:
            verb("a")
        assert "credentials" in caught.value.hint or "the right to perform this action" in caught.value.hint
        assert key not in "".join(traceback.format_exception(caught.value))
    assert sum(pauses) < 1


@pytest.mark.parametrize(
    ("code", "hint"), [("ExpiredToken", "set the cloud's usual credentials"), ("RequestTimeTooSkewed", "clock")]
)
def test_credentials_and_clocks_are_no_missing_right(
    code: str, hint: str, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    with faulty_s3(choose=lambda *_: code) as proxy:
        store = open_store(f"{use(proxy, monkeypatch)}/runs")
        pauses.clear()
        for verb in (store.list, store.delete, lambda name: store.replace(name, b"")):
            with pytest.raises(StoreDenied, match=code) as caught:
                verb("a")
            assert hint in caught.value.hint
            assert "lacks_right" not in caught.value.data
    assert sum(pauses) < 1


def test_expired_credentials_are_a_hint_where_the_answer_has_no_reason(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    with faulty_s3(choose=lambda method, *_: "ExpiredToken" if method == "HEAD" else "") as proxy:
        store = open_store(f"{use(proxy, monkeypatch)}/runs")
        pauses.clear()
        with pytest.raises(StoreDenied, match="Bad Request") as caught:
            store.exists("a")
        assert "expired credentials are often refused" in caught.value.hint
    assert sum(pauses) < 1


def test_exists_raises_if_the_storage_cannot_be_reached(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    store = S3Store(f"{bucket}/runs", fresh_s3())
    store.retry_within_s = 0.5
    with pytest.raises(StoreError, match="can't look at a"):
        store.exists("a")


def test_a_transient_failure_is_retried(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(f"{bucket}/runs", fresh_s3())
    ask, failures = store._fs.pipe_file, iter([ConnectionResetError, TimeoutError])

    def flaky(path: str, data: bytes, **options: str) -> None:
        ask(path, data, **options)  # the request succeeds, and its response is lost
        for failure in failures:
            raise failure

    monkeypatch.setattr(store._fs, "pipe_file", flaky)
    store.create("a", b"mine")
    assert store.read("a") == b"mine"


def test_s3_lists_only_the_names_after_the_given_one(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store(f"{bucket}/runs", fresh_s3())
    pages = paged(store, "call_s3", monkeypatch, MaxKeys=3)
    assert store.list("commits", "11") == ["12", "13", "14", "15"]
    assert [page["KeyCount"] for page in pages] == [3, 1]


def test_gcs_lists_only_the_names_from_the_given_one_on(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"{gcs_bucket}/runs")
    assert isinstance(store, GcsStore)
    pages = paged(store, "call", monkeypatch, maxResults=3)
    assert store.list("commits", "11") == ["12", "13", "14", "15"]
    assert [len(page["items"]) for page in pages] == [3, 2]  # a GCS listing includes the name that it starts at


def test_s3_uploads_that_never_ended_are_swept(bucket: str) -> None:
    store = S3Store(f"{bucket}/runs", fresh_s3())
    StoreTests()._fail_to_create(store, "failed", 20)  # aborts its own upload
    for name in ("runs/a/1", "runs/a/2", "runs/ab/3", "runs-not-these/4"):
        store._upload(f"{bucket.removeprefix('s3://')}/{name}").part(1, b"x")
    assert store.sweep(datetime(2009, 1, 1, tzinfo=UTC)) == 0  # moto says that all uploads began in 2010
    assert store.sweep(datetime.now(UTC), {"a"}.__contains__) == 1
    assert store.inside("a").sweep(datetime.now(UTC), {"1"}.__contains__) == 2  # no folder has this name
    assert store.sweep(datetime.now(UTC)) == 0
    assert [upload["Key"] for upload in store._fs.list_multipart_uploads(bucket[5:])] == ["runs-not-these/4"]


@pytest.mark.parametrize(
    ("scheme", "upload"), [("s3://", S3Upload), pytest.param("az://", AzureUpload, marks=needs_azurite)]
)
def test_several_parts_are_sent_in_parallel(
    scheme: str, upload: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"{empty(scheme, request)}/runs")
    together, send = threading.Barrier(uploads.AT_ONCE, timeout=WITHIN_S), upload.part
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
    assert peak_bytes < 9 * 2**20  # the parts being sent, the one being filled, and the caller's own bytes


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
    ask, losses = store._fs.call, [OSError("the line is dead")] * 2  # for a part, and for the upload's completion

    def flaky(*arguments: Any, **request: Any) -> Any:
        if losses and arguments[0] != "GET":
            raise losses.pop()
        return ask(*arguments, **request)

    monkeypatch.setattr(store._fs, "call", flaky)
    with pytest.raises(StoreError, match="the line is dead"):
        in_parts(store, "a", bytes(uploads.PART_BYTES + 1))
    gc.collect()
    time.sleep(0.5)  # the destructor of gcsfs's file closes an open upload in the background
    assert store.list() == []


@pytest.mark.parametrize(("scheme", "call"), [("s3://", "call_s3"), ("gs://", "call")])
def test_a_part_that_cannot_be_sent_raises_a_store_error(
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
    """Return the URL of an empty bucket."""
    return str(request.getfixturevalue({"s3://": "bucket", "gs://": "gcs_bucket", "az://": "container"}[scheme]))


def paged(store: ObjectStore, call: str, monkeypatch: pytest.MonkeyPatch, **options: int) -> list[dict[str, Any]]:
    """Create 16 files in ``commits/``; return a list that gets every page of a later listing."""
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
