"""A store behind a failing network: a write that the server carried out counts, even if its response was lost."""

import contextlib
import importlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NameMissing, NameTaken, Superseded
from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.keeping.verification import verify_run
from holdfast.store import Store, open_store, uploads
from holdfast.store.local import LocalStore
from holdfast.store.objects import ObjectStore
from holdfast.testing.stores import StoreTests
from tests.conftest import AZURITE
from tests.support import servers
from tests.support.faulty import (
    KINDS,
    LOST,
    SHORT,
    SILENT,
    TORN,
    Faulty,
    behind_faults,
    each_once,
    faulty_s3,
    use,
)  # fmt: skip
from tests.support.makers import head_step, make_line, train

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
CLOUDS = ["s3", "gs", pytest.param("az", marks=pytest.mark.skipif(not AZURITE.exists(), reason="no Azurite here"))]


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Faulty]:
    """Start a cloud server that loses its response to the first try of each write; S3, unless a test names another."""
    with contextlib.ExitStack() as stack:
        cloud, choose = getattr(request, "param", "s3"), each_once(LOST, "PUT", "POST")
        if cloud == "s3":
            yield stack.enter_context(faulty_s3(choose=choose))
        elif cloud == "gs":
            direct = stack.enter_context(servers.gcs_server())
            yield stack.enter_context(behind_faults(direct, "STORAGE_EMULATOR_HOST", choose))
        else:
            variable = "AZURE_STORAGE_CONNECTION_STRING"
            direct = {variable: request.getfixturevalue("azure_server")}
            yield stack.enter_context(behind_faults(direct, variable, choose))


@pytest.fixture
def store(network: Faulty, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    makers: dict[str, Callable[[], str]] = {
        "AWS_ENDPOINT_URL": servers.make_s3_bucket,
        "STORAGE_EMULATOR_HOST": servers.make_gcs_bucket,
        "AZURE_STORAGE_CONNECTION_STRING": lambda: str(request.getfixturevalue("container")),
    }
    (make_bucket,) = (make for name, make in makers.items() if name in network.direct)
    return open_store(f"{use(network, monkeypatch, make_bucket)}/runs")


def test_files_are_complete_although_every_kind_of_fault_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_s3(0.3, seed=3) as proxy:
        store = open_store(f"{use(proxy, monkeypatch)}/runs")
        names = [f"commits/{number:08d}.json" for number in range(20)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.replace(name, name.encode()), names))
            assert list(pool.map(store.read, names)) == [name.encode() for name in names]
        assert store.list("commits") == [name.rpartition("/")[2] for name in names]
        assert set(proxy.faults) == set(KINDS)


@pytest.mark.parametrize("network", CLOUDS, indirect=True)
def test_a_write_whose_response_was_lost_succeeds(store: Store, network: Faulty) -> None:
    store.create("attempts/00000001.json", b"mine")
    assert network.faults == {LOST: 1}
    with pytest.raises(NameTaken):
        store.create("attempts/00000001.json", b"other")
    assert store.read("attempts/00000001.json") == b"mine"


@pytest.mark.parametrize("network", CLOUDS, indirect=True)
def test_a_response_that_is_cut_is_asked_for_again(store: ObjectStore, network: Faulty) -> None:
    """A response that ends too early is an error of the network, also that to a question for a missing file.

    aiohttp gives its error the code 400, as if the server had refused the request.
    """
    network.choose = lambda *_: ""
    store.create("a", b"bytes" * 100)
    network.choose = each_once(TORN, "GET")
    assert store.read("a") == b"bytes" * 100
    with pytest.raises(NameMissing):
        store.read("b")
    assert network.faults[TORN] >= 2


def test_google_is_asked_again_if_a_connection_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default gcsfs waits for ever, and so a run would."""
    gcs = importlib.import_module("holdfast.store.gcs")
    monkeypatch.setattr(gcs, "SILENT_S", 2.0)
    silent = itertools.chain([SILENT], itertools.repeat(""))
    with (
        servers.gcs_server() as direct,
        behind_faults(direct, "STORAGE_EMULATOR_HOST", lambda *_: "") as proxy,
    ):
        store = open_store(f"{use(proxy, monkeypatch, servers.make_gcs_bucket)}/runs")
        store.create("a", b"bytes")
        proxy.choose = lambda *_: next(silent)
        assert store.read("a") == b"bytes"
        assert proxy.asked_again == 1


@pytest.mark.parametrize("network", CLOUDS[:2], indirect=True)
def test_a_response_with_too_few_bytes_is_no_damage(store: ObjectStore, network: Faulty) -> None:
    network.choose = lambda *_: ""
    data = random.Random(0).randbytes(1000)
    store.create("a", data)
    shortened = itertools.chain([SHORT], itertools.repeat(""))
    network.choose = lambda method, path, headers: next(shortened) if "Range" in headers else ""
    assert b"".join(store.pieces("a", 400)) == data
    assert network.faults[SHORT] == 1


@pytest.mark.parametrize("code", ["BadDigest", "IncompleteBody"])
def test_a_request_that_the_network_changed_is_sent_again(store: ObjectStore, network: Faulty, code: str) -> None:
    """Their status is 400, which otherwise says that the request is wrong."""
    refused = itertools.chain([code] * 7, itertools.repeat(""))  # boto's own tries are fewer
    network.choose = lambda *_: next(refused)
    store.replace("a", b"bytes")
    assert network.faults[code] == 7
    assert store.read("a") == b"bytes"


@pytest.mark.parametrize("network", CLOUDS, indirect=True)
def test_an_upload_whose_responses_were_lost_succeeds(store: ObjectStore, network: Faulty) -> None:
    store.part_bytes = 5 * 2**20
    data = random.Random(0).randbytes(2 * store.part_bytes + 1)
    StoreTests._create_in_pieces(store, "payload", [data])
    assert network.faults[LOST] >= 2  # the responses to the parts, and to the completion
    assert store.read("payload") == data


@pytest.mark.parametrize("network", CLOUDS, indirect=True)
def test_only_one_of_two_uploads_of_equal_bytes_succeeds(store: Store, network: Faulty) -> None:
    """Equal bytes don't identify their writer; the upload's token does."""
    data = bytes(uploads.PART_BYTES + 1)
    with contextlib.ExitStack() as last, contextlib.ExitStack() as first:
        for stack in (first, last):
            stack.enter_context(store.creating("payload")).write(data)
        first.close()
        with pytest.raises(NameTaken):
            last.close()


@pytest.mark.parametrize("network", CLOUDS[:2], indirect=True)
def test_a_copy_whose_response_was_lost_succeeds(store: Store, network: Faulty) -> None:
    data = random.Random(0).randbytes(uploads.PART_BYTES + 1)
    store.create("first", data)
    before = network.faults[LOST]
    assert store.copy("first", "second")
    assert network.faults[LOST] > before
    assert store.read("second") == data
    with pytest.raises(NameTaken):
        store.copy("first", "second")


def test_a_run_is_complete_although_the_first_response_to_every_write_is_lost(store: Store, network: Faulty) -> None:
    """Covers the claim, the configuration, the payload's parts, the metadata, the commit and the ending."""
    line = make_line(store)
    commits = [train(line, size_bytes=64), train(line, size_bytes=uploads.PART_BYTES + 64)]
    line.journal.end_attempt(1, Ending("completed", step=head_step(line)))
    line.journal.pin(1)
    line.journal.quarantine(2, "damaged", 1)
    assert [commit.path for commit in commits] == ["epoch-0001", "epoch-0002"]  # each write recognized its own file
    assert network.faults[LOST] >= 15
    report = verify_run(Journal(store, "run"), everything=True, deep=True)
    assert (report.problems, report.notes) == ([], [])


def test_only_one_of_two_equal_claims_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host, process id and second don't identify a writer: processes of two containers may share them all."""
    monkeypatch.setattr("holdfast.journal.journal.now", lambda: "2026-01-01T00:00:00+00:00")
    store = open_store("memory://claims")
    first, second = Journal(store, "run"), Journal(store, "run")
    records = [first.claim_attempt(1, "fresh", "host", 1, {})]
    with pytest.raises(Superseded):
        second.claim_attempt(1, "fresh", "host", 1, {})
    records.append(second.claim_attempt(2, "fresh", "host", 1, {}))
    assert records[0].writer != records[1].writer
    assert first.read_attempt(1) == records[0]


# ---- NFS: the response to link(2) is lost


@pytest.fixture
def nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Return a store on a simulated NFS server that loses its first response to every link(2)."""
    link = os.link

    def linked_twice(*names: str, **options: Any) -> None:
        with contextlib.suppress(FileExistsError):
            link(*names, **options)
        link(*names, **options)

    monkeypatch.setattr(os, "link", linked_twice)
    return LocalStore(str(tmp_path))


def test_a_link_whose_response_was_lost_succeeds(nfs: LocalStore) -> None:
    nfs.create("a", b"mine")
    with pytest.raises(NameTaken):
        nfs.create("a", b"mine")  # the same bytes, but another file
    assert nfs.copy("a", "b")
    with pytest.raises(NameTaken):
        nfs.copy("a", "b")
    assert nfs.read("a") == nfs.read("b") == b"mine"
