"""Fixtures for all tests: a Prefect server, servers of object stores, and drivers that train the toy recipe."""

import base64
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from azure.storage.blob import BlobServiceClient

from holdfast.journal import Journal
from holdfast.standing import Standing, read_standing
from holdfast.store import open_store
from tasks.credentials import new_auth
from tasks.server import await_healthy, describe_server, free_port
from tests.support import servers
from tests.support.lives import Lives, lives

# If a shell runs the tests in its background, they and all their processes would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
# make soak sets this variable, and so runs more cases than make test.
IS_SOAK = "HOLDFAST_EXAMPLES" in os.environ
# The timeout of a command. A command takes ten seconds alone, and two hundred beside eight others on a core.
COMMAND_WITHIN_S = 600
AZURITE = ROOT / ".venv" / "node_modules" / ".bin" / "azurite-blob"
# Files whose tests take minutes begin first, so that no worker of pytest waits for another one at the end. Tests of a
# pool stay together, so that the other worker, which steals the last tests, needs no pool of its own.
LONGEST = (
    "flows/test_pool.py",
    "project/test_readme.py",
    "flows/test_main_job.py",
    "flows/test_local.py",
    "flows/test_untracked.py",
    "flows/test_doors.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and keep the order of the others."""
    items.sort(key=lambda item: place(item.path))


def place(path: Path) -> int:
    """Return a test file's place in the order: its index in LONGEST, or after all of those."""
    places = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    return places.get(path, len(places))


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the environment variables that select a Prefect server of this session."""
    home = tmp_path_factory.mktemp("prefect")
    port = free_port()
    url, auth = f"http://127.0.0.1:{port}/api", new_auth()
    environment = {"PREFECT_HOME": str(home), "PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": auth}
    command = [sys.executable, "-m", "tasks.server", str(port)]
    own = os.environ | environment | describe_server(url, auth)
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=own, cwd=ROOT) as server:
        try:
            await_healthy(server, url)
            yield environment
        finally:
            server.terminate()


@dataclass
class Driver:
    """A driver that runs ``python -m flows.train`` on the toy recipe, with all its files in one folder."""

    folder: Path
    environment: dict[str, str]
    store: str = ""

    def __post_init__(self) -> None:
        self.store = self.store or f"{self.folder}/runs"
        self.config = self.folder / "toy.toml"
        self.config.write_text(
            'recipe = "tests.support.toy:toy"\nrun = "toy"\nepochs = 3\n'
            f'store = "{self.store}"\n[chunk]\nsteps = 4\n[log]\nfolder = "{self.folder}/logs"\nevery = 1\n'
        )

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "toy"

    def start(self, *settings: str, **environment: str) -> "subprocess.Popen[str]":
        """Start the command; return its process."""
        options = [option for setting in settings for option in ("--set", setting)]
        return subprocess.Popen(
            [sys.executable, "-m", "flows.train", str(self.config), *options],
            env=os.environ | self.environment | environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *settings: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run the command to its end."""
        process = self.start(*settings, **environment)
        try:
            out, err = process.communicate(timeout=COMMAND_WITHIN_S)
        finally:
            kill_tree(process.pid)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def finish(self, *settings: str) -> Standing:
        """Run the command, assert that it succeeds and completes the run, and return the run's standing."""
        done = self.run(*settings)
        assert done.returncode == 0, done.stderr
        standing = self.standing()
        assert standing.complete
        return standing

    def await_commits(self, number: int) -> None:
        """Wait until the run, which another process trains, has `number` commits."""
        deadline = time.monotonic() + COMMAND_WITHIN_S
        while self.journal().newest_number() < number:
            assert time.monotonic() < deadline, f"there was no commit {number}"
            time.sleep(0.02)

    def standing(self) -> Standing:
        return read_standing(self.journal())

    def journal(self) -> Journal:
        return Journal(open_store(self.store), "toy")

    def metrics(self) -> list[dict[str, object]]:
        """Return every line of metrics of the committed steps."""
        store = self.journal().store
        files = [store.read(f"metrics/{name}") for name in store.list("metrics")]
        return [json.loads(line) for data in files for line in data.splitlines()]


@pytest.fixture
def driver(tmp_path: Path, prefect_api: dict[str, str]) -> Driver:
    return Driver(tmp_path, prefect_api)


@dataclass(frozen=True)
class Reference:
    """The standing and the metrics of the toy run that was never interrupted."""

    standing: Standing
    metrics: list[dict[str, object]]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Reference:
    driver = Driver(tmp_path_factory.mktemp("reference"), prefect_api)
    return Reference(driver.finish(), driver.metrics())


@pytest.fixture(scope="session")
def nursery() -> Iterator[Lives]:
    """Yield a process with torch imported, from which tests fork others without that cost."""
    with lives() as started:
        yield started


@dataclass
class Engine(Driver):
    """A driver that forks the same command without Prefect, in a tenth of the time, for tests of the engine alone."""

    nursery: Lives | None = None

    def run(self, *settings: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return self.call("train", str(self.config), settings, **environment)

    def command(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run ``holdfast`` with these arguments."""
        return self.call("command", *arguments, **environment)

    def call(self, function: str, *arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run one of the commands of `tests.support.forked`."""
        assert self.nursery is not None
        return self.nursery.call(f"tests.support.forked:{function}", *arguments, **self.environment | environment)


@pytest.fixture
def engine(tmp_path: Path, nursery: Lives) -> Engine:
    return Engine(tmp_path, {}, nursery=nursery)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """Yield the environment variables that select an S3 server of this session, over HTTP."""
    with servers.s3_server() as environment:
        yield environment


@pytest.fixture
def bucket(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty bucket; set its endpoint and credentials in the environment, as a user does."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    return servers.make_s3_bucket()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[dict[str, str]]:
    """Yield the environment variables that select a Google Cloud Storage server of this session, over HTTP."""
    with servers.gcs_server() as environment:
        yield environment


@pytest.fixture
def gcs_bucket(gcs_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty bucket; set its endpoint in the environment, as a user of an emulator does."""
    for name, value in gcs_server.items():
        monkeypatch.setenv(name, value)
    return servers.make_gcs_bucket()


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the connection string of a Blob Storage server of this session, over HTTP, with a random key."""
    if not AZURITE.exists():
        pytest.skip("Azurite is installed by make test, where there is npm")
    port = free_port()
    folder = tmp_path_factory.mktemp("azurite")
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    command = [AZURITE, *options, "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    environment = os.environ | {"AZURITE_ACCOUNTS": f"testing:{key}"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            servers.await_port(port)
            yield (
                f"DefaultEndpointsProtocol=http;AccountName=testing;AccountKey={key};"
                f"BlobEndpoint=http://127.0.0.1:{port}/testing;"
            )
        finally:
            server.terminate()


@pytest.fixture
def container(azure_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty container; set the connection string in the environment, as a user does."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_server)
    name = f"container-{secrets.token_hex(8)}"
    with BlobServiceClient.from_connection_string(azure_server) as client:
        client.create_container(name)
    return f"az://{name}"


def ranks_of(pid: int) -> list[psutil.Process]:
    """Return the ranks that a process has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children(recursive=True) if is_rank(child)]
    return []


def is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "holdfast.rank" in process.cmdline()
    return False


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, and wait until they are dead: a killed process lives on for a moment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        killed = [*process.children(recursive=True), process]
        for each in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        while any(map(has_not_ended, killed)):
            time.sleep(0.01)


def has_not_ended(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie, which nobody has waited for yet, doesn't."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def assert_same_bytes(driver: Driver, reference: Reference) -> None:
    """Assert that the run ended like the reference: weights, rates, losses, gradient norms and order of samples."""
    standing = driver.standing()
    assert standing.complete
    assert standing.checkpoint_sha256 == reference.standing.checkpoint_sha256
    assert standing.learning_rate_history == reference.standing.learning_rate_history
    assert driver.metrics() == reference.metrics
