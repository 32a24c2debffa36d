"""Tests of the trials of a store: each right that is missing is named, and nothing is left behind."""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from azure.storage.blob import BlobServiceClient

from holdfast.extensions.doctor.trials import Trial, Trials
from holdfast.store import Store, open_store
from holdfast.store.memory import MemoryStore
from holdfast.store.objects import ObjectStore
from holdfast.store.rights import AZURE_DELETE, AZURE_READ, AZURE_WRITE, KINDS, RIGHTS, find_rights
from holdfast.store.s3 import S3Store
from tests.conftest import AZURITE
from tests.support import faulty, servers

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

VERBS = tuple(RIGHTS["disk"])
# Verbs without a right don't ask the cloud for anything that another verb doesn't.
CLOUDS = ["s3", "gcs", pytest.param("azure", marks=pytest.mark.skipif(not AZURITE.exists(), reason="no Azurite here"))]
DENIABLE = [
    pytest.param(kind, right, id=f"{kind} {right.rpartition('/')[2]}", marks=[] if kind != "azure" else [
        pytest.mark.skipif(not AZURITE.exists(), reason="no Azurite here")])
    for kind in ("s3", "gcs", "azure")
    for right in sorted({right for rights in RIGHTS[kind].values() for right in rights})
]  # fmt: skip


def rights_of_s3(method: str, path: str, query: dict[str, str], headers: Any) -> set[str]:
    is_bucket = not path.strip("/").partition("/")[2]
    if method in ("GET", "HEAD"):
        if "uploads" in query:
            return {"s3:ListBucketMultipartUploads"}
        # Without the right to list, S3 answers 403 for a name that doesn't exist.
        return {"s3:ListBucket"} if is_bucket else {"s3:GetObject"} | ({"s3:ListBucket"} if is_new(path) else set())
    if method == "DELETE":
        return {"s3:AbortMultipartUpload"} if "uploadId" in query else {"s3:DeleteObject"}
    if method == "POST" and "delete" in query:
        return {"s3:DeleteObject"}
    return {"s3:PutObject"} | ({"s3:GetObject"} if "x-amz-copy-source" in headers else set())


def rights_of_gcs(method: str, path: str, query: dict[str, str], headers: Any) -> set[str]:
    if method == "GET":
        return {"storage.objects.list"} if path.endswith("/o") else {"storage.objects.get"}
    if method == "DELETE" and "upload_id" not in query:
        return {"storage.objects.delete"}
    if "/rewriteTo/" in path:
        return {"storage.objects.get", "storage.objects.create"}
    replaces = method == "POST" and query.get("ifGenerationMatch") != "0"
    return {"storage.objects.create"} | ({"storage.objects.delete"} if replaces else set())


def rights_of_azure(method: str, path: str, query: dict[str, str], headers: Any) -> set[str]:
    return {{"GET": AZURE_READ, "HEAD": AZURE_READ, "DELETE": AZURE_DELETE}.get(method, AZURE_WRITE)}


def is_new(path: str) -> bool:
    """Return whether a name doesn't exist yet when the trials ask for it."""
    return path.endswith(("/nothing", "/large", "/raced", "/unfinished"))


CLASSIFY = {"s3": rights_of_s3, "gcs": rights_of_gcs, "azure": rights_of_azure}


class Cloud:
    """A store behind a proxy that knows which rights each request needs.

    Attributes:
        asked: the rights that the requests so far needed.
        denied: the rights that the proxy refuses.
    """

    def __init__(self, kind: str) -> None:
        self.classify = CLASSIFY[kind]
        self.asked: set[str] = set()
        self.denied: set[str] = set()
        self.url = ""

    def choose(self, method: str, path: str, headers: Any) -> str:
        url = urlsplit(path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        rights = self.classify(method, unquote(url.path), query, headers)
        self.asked |= rights
        return faulty.DENIED if rights & self.denied else ""


@pytest.fixture
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Yield the empty bucket of a cloud, behind its proxy. The parameter is the kind of the cloud."""
    cloud = Cloud(request.param)
    if request.param == "azure":
        direct = {"AZURE_STORAGE_CONNECTION_STRING": request.getfixturevalue("azure_server")}
    else:
        direct = request.getfixturevalue({"s3": "s3_server", "gcs": "gcs_server"}[request.param])
    (variable,) = {"AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING"} & direct.keys()
    make = {"s3": servers.make_s3_bucket, "gcs": servers.make_gcs_bucket, "azure": make_container}[request.param]
    with faulty.behind_faults(direct, variable, cloud.choose) as proxy:
        cloud.url = f"{faulty.use(proxy, monkeypatch, make)}/team/runs"
        yield cloud


def make_container() -> str:
    name = f"container-{os.urandom(8).hex()}"
    with BlobServiceClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"]) as client:
        client.create_container(name)
    return f"az://{name}"


def try_all(store: Store) -> dict[str, Trial]:
    trials = Trials(store)
    try:
        return {trial.verb: trial for trial in trials.run()}
    finally:
        assert trials.clean() == ""


# ---- what the table says


@pytest.mark.parametrize("cloud", CLOUDS, indirect=True)
def test_the_table_of_rights_is_what_the_requests_need(cloud: Cloud, request: pytest.FixtureRequest) -> None:
    store = open_store(cloud.url)
    trials, needed = Trials(store), {}
    for trial in trials.run():
        assert trial.is_good, trial
        needed[trial.verb] = cloud.asked
        cloud.asked = set()
    expected = {verb: {*rights} for verb, rights in find_rights(store.url).items()}
    for verb in VERBS:
        # A trial also makes the file that it tries its verb on, and looks at the result.
        assert expected[verb] <= needed[verb] <= expected[verb] | expected["upload"] | expected["list"], verb
    assert trials.clean() == ""
    assert store.list() == []


def test_every_verb_has_rights_on_every_disk_and_cloud() -> None:
    assert [trial.verb for trial in Trials(MemoryStore("verbs")).run()] == list(VERBS)
    assert all(tuple(RIGHTS[kind]) == VERBS for kind in KINDS)
    assert find_rights("memory://a") == {}
    assert find_rights("s3a://b/c") is RIGHTS["s3"]
    assert find_rights("/data") is find_rights("file:///data") is RIGHTS["disk"]


def test_every_method_of_a_store_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fill` and `pieces` read ranges, `existing` and `inside` make no request."""
    names = [name for name, value in vars(Store).items() if callable(value) and not name.startswith("_")]
    methods = {name: getattr(MemoryStore, name) for name in names}
    called = set()
    for name in methods:

        def noted(self: Store, *arguments: Any, name: str = name) -> Any:
            called.add(name)
            return methods[name](self, *arguments)

        monkeypatch.setattr(MemoryStore, name, noted)
    try_all(MemoryStore("methods"))
    assert methods.keys() - called == {"existing", "fill", "pieces"}


# ---- a missing right


@pytest.mark.parametrize(("cloud", "right"), DENIABLE, indirect=["cloud"])
def test_a_missing_right_is_named(cloud: Cloud, right: str) -> None:
    cloud.denied = {right}
    store = open_store(cloud.url)
    done = try_all(store)
    rights = find_rights(store.url)
    assert [trial for trial in done.values() if trial.outcome == "denied"]
    for verb, trial in done.items():
        if trial.outcome == "denied":
            assert right in trial.rights, trial
            assert right in rights[verb], trial
            assert "can't" in trial.message
        elif right in rights[verb]:
            assert trial.outcome == "not tried", trial
        else:
            assert trial.outcome in ("ok", "not offered", "not tried"), trial
    said = " ".join(trial.message for trial in done.values())
    assert re.search("is not authorized|does not have access|Forbidden|not authorized", said)
    cloud.denied = set()
    assert store.list() == []
    if isinstance(store, S3Store):
        assert not [*store._uploads(Bucket=store._split(store._root)[0])]


@pytest.mark.parametrize("cloud", ["s3"], indirect=True)
def test_a_reader_of_runs_is_told_what_it_may(cloud: Cloud) -> None:
    """Reading is tried on the record of a run if the trials can't write."""
    store = open_store(cloud.url)
    store.create("language/run.json", b"{}" * 20)
    cloud.denied = {"s3:PutObject", "s3:DeleteObject"}
    done = try_all(store)
    good = [verb for verb, trial in done.items() if trial.outcome == "ok" and verb != "abort"]
    assert good == ["list", "exists", "read", "read a range", "look", "list after"]
    assert done["delete"].rights == ("s3:DeleteObject",)
    assert done["create"].outcome == "not tried"  # its file could not be deleted again
    cloud.denied = {"s3:PutObject"}
    assert try_all(store)["create"].rights == ("s3:PutObject",)


def test_a_folder_that_only_others_may_write_to() -> None:
    with no_privileges() as folder:
        done = try_all(open_store(str(folder)))
        assert done["list"].outcome == "ok"
        assert done["create"].outcome == "denied"
        assert done["create"].rights == ("-wx on the folder",)
        assert "Permission denied" in done["create"].message


@contextlib.contextmanager
def no_privileges() -> Iterator[Path]:
    """Yield a folder that this process may only read, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)
            Path(folder).chmod(0o755)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_missing_bucket(scheme: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue({"s3": "bucket", "gs": "gcs_bucket"}[scheme])
    done = try_all(open_store(f"{scheme}://no-such-bucket-here/runs"))
    assert done["create"].outcome == "denied"
    assert "create the bucket" in done["create"].hint
    assert done["create"].rights == ()


# ---- a storage that breaks its contract


@pytest.mark.parametrize(
    ("verb", "broken", "message"),
    [
        ("create again", {"create": lambda self, name, data: self.replace(name, data)}, "both commit"),
        ("read a range", {"read": lambda self, name, start=0, stop=None: read(self, name)}, "different bytes"),
        ("look", {"size_bytes": lambda self, name: 3}, "a different size"),
        ("list after", {"list": lambda self, folder="", after="": list_all(self, folder)}, "sort before"),
        ("list after", {"list": lambda self, folder="", after="": []}, "different names"),
        ("copy", {"copy": lambda self, source, name: self.create(name, b"") or True}, "a different size"),
        ("delete a folder", {"delete_folder": lambda self, folder: None}, "still there"),
    ],
)
def test_a_verb_that_breaks_its_contract_fails(
    verb: str, broken: dict[str, Callable[..., Any]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name, method in broken.items():
            patch.setattr(MemoryStore, name, method)
        trials = Trials(MemoryStore("broken"))
        done = {trial.verb: trial for trial in trials.run()}
    assert done[verb].outcome == "failed"
    assert message in done[verb].message
    trials.clean()


read, list_all = MemoryStore.read, MemoryStore.list


def test_an_upload_that_replaces_another_file_fails(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some S3-compatible services check the precondition of a plain write, and not that of a multipart upload."""
    store = open_store(f"{bucket}/runs")
    assert isinstance(store, ObjectStore)
    call = store._fs.call_s3

    def ignorant(method: str, *arguments: Any, **request: Any) -> Any:
        if method == "complete_multipart_upload":
            request.pop("IfNoneMatch", None)
        return call(method, *arguments, **request)

    monkeypatch.setattr(store._fs, "call_s3", ignorant)
    done = try_all(store)
    assert {verb for verb, trial in done.items() if not trial.is_good} == {"upload again"}
    assert "two attempts of a run could mix" in done["upload again"].message


def test_a_storage_that_cannot_be_reached_is_asked_once(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"{bucket}/runs")
    assert isinstance(store, ObjectStore)
    asked: list[object] = []

    def dead(*request: object, **_: object) -> None:
        asked.append(request)
        raise OSError("the line is dead")

    monkeypatch.setattr(store._fs, "ls", dead)
    monkeypatch.setattr("holdfast.extensions.doctor.trials.RETRY_WITHIN_S", 0.3)
    done = try_all(store)
    assert done["list"].outcome == "failed"
    assert "the line is dead" in done["list"].message
    assert {trial.outcome for verb, trial in done.items() if verb != "list"} == {"not tried"}


# ---- nothing is left


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_nothing(verb: str, error: type[BaseException], tmp_path: Path) -> None:
    trials = Trials(open_store(f"{tmp_path}/new/deep"))
    with contextlib.suppress(error):
        for trial in trials.run():
            if trial.verb == verb:
                raise error
    assert trials.clean() == ""
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_upload_leaves_nothing(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"{bucket}/runs")
    assert isinstance(store, ObjectStore)
    trials = Trials(store)
    for trial in trials.run():
        if trial.verb == "create":
            break
    upload = trials._inner.creating("large")
    upload.__enter__().write(bytes(6 * 2**20))  # as a process that is interrupted here leaves it
    assert trials.clean() == ""
    assert store.list() == []
    assert store._fs.call_s3("list_multipart_uploads", Bucket=bucket[5:]).get("Uploads", []) == []
    with contextlib.suppress(KeyboardInterrupt):
        upload.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def test_what_cannot_be_deleted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "delete_folder", lambda self, folder: None)
        patch.setattr(MemoryStore, "delete", lambda self, name: None)
        trials = Trials(MemoryStore("kept"))
        list(trials.run())
        assert trials.clean() == f"memory://kept/{trials.name}"
    assert trials.clean() == ""


def test_what_else_is_in_the_store_stays(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.create("language/run.json", b"{}")
    assert all(trial.is_good for trial in try_all(store).values())
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {"language", "language/run.json"}


def test_the_clocks_are_compared(tmp_path: Path) -> None:
    trials = Trials(open_store(str(tmp_path)))
    list(trials.run())
    assert trials.clock_s is not None
    assert abs(trials.clock_s) < 2
    trials.clean()
