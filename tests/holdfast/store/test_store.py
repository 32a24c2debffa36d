"""Every store passes the conformance suite, and unusable URLs are refused."""

import secrets
import traceback
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, StoreDenied, StoreError
from holdfast.store import Store, failures, open_store
from holdfast.store.memory import MemoryStore
from holdfast.testing.stores import StoreTests
from tests.conftest import AZURITE


class TestLocal(StoreTests):
    rounds = 60

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(str(tmp_path / "store"))


class TestMemory(StoreTests):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://{secrets.token_hex(8)}")


class TestS3(StoreTests):
    writers = 4

    @pytest.fixture
    def store(self, bucket: str) -> Store:
        return open_store(f"{bucket}/runs")


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
class TestGcs(StoreTests):
    writers = 4

    @pytest.fixture
    def store(self, gcs_bucket: str) -> Store:
        return open_store(f"{gcs_bucket}/runs")


@pytest.mark.skipif(not AZURITE.exists(), reason="Azurite is installed where there is npm")
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
class TestAzure(StoreTests):
    writers = 4

    @pytest.fixture
    def store(self, container: str) -> Store:
        return open_store(f"{container}/runs")

    @pytest.mark.xfail(strict=True, reason="Azurite counts blocks that were never committed as a blob, for create-once")
    def test_a_write_that_failed_can_be_done_again(self, store: Store) -> None:  # type: ignore[override]
        """On such a store a checkpoint takes the next free name, as test_checkpoint.py checks."""
        super().test_a_write_that_failed_can_be_done_again(store, 40)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreDenied, match="Not a directory") as caught:
        open_store(str(tmp_path / "file")).create("a", b"")
    assert isinstance(caught.value, PermissionError)


def test_file_urls_are_folders(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}").create("a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"


@pytest.mark.parametrize("url", ["http://host/a", "ftp://host/a", "zip://a.zip", "sftp://host/a", "hdfs://host/a"])
def test_a_scheme_without_create_once_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="isn't known to create a file only if its name is free"):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hunter2@bucket/runs", "s3://AKIA:hun/ter2@bucket", "s3://hunter2@bucket/runs", "ftp://me:hunter2@host/a",
        "az://container/runs?sv=1&sig=hunter2", "abfs://me:hunter2@account.dfs.core.windows.net/runs",
        "gs://bucket/runs?X-Goog-Signature=hunter2",
    ],
)  # fmt: skip
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="contains credentials or a query") as caught:
        open_store(url)
    assert "hunter2" not in f"{caught.value!r} {caught.value.hint}"
    assert "ter2@" not in str(caught.value)


def test_an_azure_url_may_name_its_account(azure_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_server)
    assert "container@account" in open_store("abfs://container@account.dfs.core.windows.net/runs").url


@pytest.mark.parametrize(
    "text",
    [
        "AccountName=me;AccountKey=hunter2;EndpointSuffix=x", "GET https://host/a?sv=1&sig=hunter2&se=3",
        "https://host/?X-Amz-Signature=hunter2", "https://me:hunter2@host/a", "aws_secret_access_key='hunter2'",
        "X-Amz-Security-Token: hunter2", '{"private_key": "hunter2"}', "Authorization: Bearer hunter2",
    ],
)  # fmt: skip
def test_messages_hold_no_secrets(text: str) -> None:
    with pytest.raises(StoreError) as caught, failures.translate_library_errors("read a in s3://bucket"):
        raise ZeroDivisionError(text)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_memory_is_shared_by_path() -> None:
    MemoryStore("x/y").create("a", b"1")
    assert MemoryStore("x").inside("y").read("a") == b"1"
