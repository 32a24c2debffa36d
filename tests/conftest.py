"""Fixtures for all tests: a Prefect server, servers of object stores, and drivers that train the toy recipe.

What takes a second to import (torch, Prefect, the clouds' libraries) is imported in the fixtures that need it.
"""

import base64
import contextlib
import fcntl
import functools
import json
import os
import platform
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from holdfast.journal import Journal
from holdfast.ledger.standing import Standing, read_standing
from holdfast.store import open_store
from tasks.credentials import new_auth
from tasks.processes import has_ended
from tests.support.device import DEVICE, ON_GPUS
from tests.support.gpus import TABLE_VARIABLE, count_needed, limit_time, note_result, place_on_gpus, skip_if_too_few
from tests.support.lives import Command, Lives, lives
from tests.support.nvidia_smi import Machine, install, print_gpus
from tests.support.promises import is_promise
from tests.support.waiting import await_equal

# If a shell runs the tests in its background, they and all their processes would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A temporary server ends with its command, so that no test finds the server of another one.
os.environ["HOLDFAST_SERVER_LINGERS_S"] = "0"

ROOT = Path(__file__).parent.parent
MakeHome = Callable[[Path], Path]
RunFlow = Callable[..., "subprocess.CompletedProcess[str]"]
# make soak sets this variable, and so runs more cases than make test.
IS_SOAK = "HOLDFAST_EXAMPLES" in os.environ
# For a test, or a parameter of one, whose like is in the suite.
IN_SOAK = pytest.mark.skipif(not IS_SOAK, reason="a combination that make soak has")
# The timeout of a command. A command takes ten seconds alone, and two hundred beside eight others on a core.
COMMAND_WITHIN_S = 200 if ON_GPUS else 600
ON_A_GPU = f'compute.device = "{DEVICE}"\n' if ON_GPUS else ""  # for the configuration of a `Driver`
MICRO_BATCHES = 2  # of a step of the toy
AZURITE = ROOT / ".venv" / "node_modules" / ".bin" / "azurite-blob"
# Node loads this module first, so that a server ends with the process that has started it, even if that is killed.
ENDS_WITH_PARENT = "data:text/javascript,process.stdin.resume().on('end', () => process.exit())"
# Files whose tests take minutes begin first, so that no worker of pytest waits for another one at the end. Tests of a
# pool stay together, so that the other worker, which steals the last tests, needs no pool of its own.
LONGEST = (
    "flows/test_pool.py",
    "flows/test_local.py",
    "holdfast/extensions/ray/test_cluster.py",
    "infra/test_docker_pool.py",
    "infra/test_kubernetes_pool.py",
    "flows/test_gpu_workers.py",
    "flows/test_main_job.py",
    "project/test_readme.py",
    "flows/test_untracked.py",
    "flows/test_interrupted.py",
    "flows/test_doors.py",
    "project/test_wheel.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files and folders without a test that make test-extras, test-pools or test-gpus runs.

    That saves their imports. A machine with a GPU may lack libraries that only other tests import.
    """
    name = {"extras": "extras", "pool and not extras": "pool", "gpus": "gpus"}.get(config.option.markexpr)
    if name is None or not (collection_path.is_dir() or collection_path.suffix == ".py"):
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any(has_mark(each, name) for each in files) else True


@functools.cache
def has_mark(path: Path, name: str) -> bool:
    """Return whether a file of tests writes the mark of this name."""
    return f"pytest.mark.{name}" in path.read_text("utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, keep the order of the others, and mark those that show a promise.

    A mark of `pytest_ignore_collect` has to be written in the file of the test.
    """
    items.sort(key=lambda item: place_on_gpus(item.path) if ON_GPUS else place(item.path))
    for item in items:
        if is_promise(item.nodeid.removeprefix("tests/")):
            item.add_marker("promise")
        for name in ("extras", "pool"):
            assert has_mark(item.path, name) or not item.get_closest_marker(name), f"{item.path} hides its mark {name}"
        count_needed(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Set a test's timeout before pytest-timeout reads it."""
    limit_time(item)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In make test-gpus, note a test's result. A worker of pytest sends its reports to the main process."""
    if (table := os.environ.get(TABLE_VARIABLE)) and "PYTEST_XDIST_WORKER" not in os.environ:
        note_result(report, Path(table))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs an extra's library which isn't installed, or more GPUs than there are."""
    skip_if_too_few(item)
    for mark in item.iter_markers("extras"):
        for library in mark.args:
            pytest.importorskip(library)


def place(path: Path) -> int:
    """Return a test file's place in the order: its index in LONGEST, or after all of those."""
    places = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    return places.get(path, len(places))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of this run of pytest share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[dict[str, str]]:
    """Yield the environment variables that select a Prefect server of this session.

    The first process's server makes its database, which takes six seconds; every other server begins with a copy.
    """
    home, database = tmp_path_factory.mktemp("prefect"), shared / "prefect.db"
    with contextlib.ExitStack() as stack:
        environment = {}
        with (shared / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if database.exists():
                shutil.copy(database, home)
            else:
                environment = stack.enter_context(prefect_server(home))
                copy_database(home / database.name, database)
        yield environment or stack.enter_context(prefect_server(home))


@contextlib.contextmanager
def prefect_server(home: Path) -> Iterator[dict[str, str]]:
    """Run a Prefect server for the block; yield the environment variables that select it."""
    from tasks.server import await_healthy, describe_server, free_port

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


def copy_database(used: Path, copy: Path) -> None:
    """Copy a SQLite database that a server uses."""
    with (
        contextlib.closing(sqlite3.connect(used)) as source,
        contextlib.closing(sqlite3.connect(copy.with_suffix(".new"))) as target,
    ):
        source.backup(target)
    copy.with_suffix(".new").rename(copy)


@pytest.fixture(scope="session")
def make_home(prefect_api: dict[str, str], shared: Path) -> MakeHome:
    """Return a function that makes a PREFECT_HOME with an empty database, which spares a server making one."""

    def make(home: Path) -> Path:
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(shared / "prefect.db", home)
        return home

    return make


def count_shadows(journal: Journal) -> int:
    """Return how many steps stopped ranks have trained after their saves; see `holdfast.rank.shadow`."""
    names = (f"rehearsals/{number:08d}.json" for number in journal.numbers("rehearsals"))
    records = [json.loads(journal.store.read(name)) for name in names]
    return sum(len(each["lines"]) for each in records if not each["difference"])


def count_trained(folder: Path, run: str) -> float:
    """Return how many steps of the toy were trained, including lost ones that were trained again.

    Args:
        folder: the folder that TOY_TRAINED named.
    """
    return len((folder / run).read_text()) / MICRO_BATCHES


@dataclass
class Driver:
    """A driver that runs ``python -m flows.train`` on the toy recipe, with all its files in one folder.

    A nursery forks the command, which spares it the imports; without one, Python starts it.
    """

    folder: Path
    environment: dict[str, str]
    store: str = ""
    nursery: Lives | None = None

    def __post_init__(self) -> None:
        self.store = self.store or f"{self.folder}/runs"
        self.config = self.folder / "toy.toml"
        self.config.write_text(
            'recipe = "tests.support.toy:toy"\nrun = "toy"\nepochs = 3\n'
            f'store = "{self.store}"\n{ON_A_GPU}[chunk]\nsteps = 4\n[log]\nfolder = "{self.folder}/logs"\nevery = 1\n'
        )

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "toy"

    def start(self, *settings: str, **environment: str) -> "subprocess.Popen[str] | Command":
        """Start the command; return its process."""
        options = [option for setting in settings for option in ("--set", setting)]
        arguments, variables = [str(self.config), *options], os.environ | self.environment | environment
        if self.nursery:
            return self.nursery.start_flow("flows.train", arguments, variables)
        return subprocess.Popen(
            [sys.executable, "-m", "flows.train", *arguments],
            env=variables,
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
        return subprocess.CompletedProcess([], process.returncode, out, err)

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
        """Return every line of metrics of the committed steps, without the facts of ranks.

        Which lines have these depends on where the run was interrupted.
        """
        store = self.journal().store
        files = [store.read(f"metrics/{name}") for name in store.list("metrics")]
        lines = [json.loads(line) for data in files for line in data.splitlines()]
        return [{name: each for name, each in line.items() if name != "parts"} for line in lines]


@pytest.fixture
def driver(tmp_path: Path, prefect_api: dict[str, str], nursery: Lives) -> Driver:
    return Driver(tmp_path, prefect_api, nursery=nursery)


@dataclass(frozen=True)
class Reference:
    """The standing, the metrics and the number of commits of a run that was never interrupted."""

    standing: Standing
    metrics: list[dict[str, object]]
    commits: int

    @classmethod
    def train(cls, engine: "Engine") -> "Reference":
        """Let the engine train its run to the end."""
        return cls(engine.finish(), engine.metrics(), engine.journal().newest_number())


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Reference:
    engine = Engine(tmp_path_factory.mktemp("reference"), {}, nursery=nursery)
    return Reference.train(engine)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Lives]:
    """Yield a process with torch imported, from which tests fork others without that cost."""
    with lives() as started:
        yield started


@pytest.fixture
def run_flow(nursery: Lives, prefect_api: dict[str, str]) -> RunFlow:
    """Return a function that calls a flow of flows/ from Python, in a process that the nursery forks."""

    def run(name: str, **parameters: object) -> "subprocess.CompletedProcess[str]":
        process = nursery.call_flow(name, parameters, os.environ | prefect_api)
        out, err = process.communicate(timeout=COMMAND_WITHIN_S)
        return subprocess.CompletedProcess([name], process.returncode or 0, out, err)

    return run


@pytest.fixture
def forked_ranks(nursery: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the nursery fork the ranks of attempts in the test's own process, instead of starting Python for each."""
    from holdfast.rank.launching import Ranks
    from tests.support.forked import spawn_from

    monkeypatch.setattr(Ranks, "spawn", staticmethod(functools.partial(spawn_from, nursery)))


@dataclass
class Engine(Driver):
    """A driver that forks the same command without Prefect, for tests of the engine alone."""

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
    from tests.support import servers

    with servers.s3_server() as environment:
        yield environment


@pytest.fixture
def bucket(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty bucket; set its endpoint and credentials in the environment, as a user does."""
    from tests.support import servers

    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    return servers.make_s3_bucket()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[dict[str, str]]:
    """Yield the environment variables that select a Google Cloud Storage server of this session, over HTTP."""
    from tests.support import servers

    with servers.gcs_server() as environment:
        yield environment


@pytest.fixture
def gcs_bucket(gcs_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty bucket; set its endpoint in the environment, as a user of an emulator does."""
    from tests.support import servers

    for name, value in gcs_server.items():
        monkeypatch.setenv(name, value)
    return servers.make_gcs_bucket()


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the connection string of a Blob Storage server of this session, over HTTP, with a random key."""
    if not AZURITE.exists():
        pytest.skip("Azurite is installed by make test, where there is npm")
    from tasks.server import free_port
    from tests.support import servers

    port = free_port()
    folder = tmp_path_factory.mktemp("azurite")
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    quiet = ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    command = ["node", "--import", ENDS_WITH_PARENT, str(AZURITE), *options, *quiet]
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    environment = os.environ | {"AZURITE_ACCOUNTS": f"testing:{key}"}
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, stdout=null, stderr=null) as server:
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
    from azure.storage.blob import BlobServiceClient

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_server)
    name = f"container-{secrets.token_hex(8)}"
    with BlobServiceClient.from_connection_string(azure_server) as client:
        client.create_container(name)
    return f"az://{name}"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that puts GPUs into this machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def put(*found: dict[str, str], text: str = "", exit_code: int = 0, hangs: bool = False, visible: str = "") -> None:
        monkeypatch.setenv("PATH", install(tmp_path / "bin", text or print_gpus(*found), exit_code, hangs=hangs))
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return put


@pytest.fixture
def dying() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process whose main thread has ended, and another one not: a killed process is so for a moment."""
    exit_of_a_thread = {"x86_64": 60, "aarch64": 93}.get(platform.machine())  # the number of this system call
    if exit_of_a_thread is None:
        pytest.skip("this machine's system calls are unknown")
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
    code += f"ctypes.CDLL(None).syscall({exit_of_a_thread}, 0)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            await_equal(lambda: psutil.Process(process.pid).status(), psutil.STATUS_ZOMBIE)
            yield process
        finally:
            process.kill()


@pytest.fixture
def no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every program off this machine's PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))


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
    """Return whether a process still runs; one that nobody has waited for yet doesn't."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and not has_ended(process)
    return False


def await_ended(processes: Iterable[psutil.Process]) -> None:
    """Wait until these processes have ended.

    `psutil.wait_procs` also waits until nobody has to wait for a process any more. The init of a container may never do
    so for an orphan.
    """
    known = [*processes]
    await_equal(lambda: [each for each in known if has_not_ended(each)], [])


def assert_same_bytes(driver: Driver, reference: Reference) -> None:
    """Assert that the run ended like the reference: weights, rates, losses, gradient norms and order of samples."""
    standing = driver.standing()
    assert standing.complete
    assert standing.checkpoint_sha256 == reference.standing.checkpoint_sha256
    assert standing.learning_rate_history == reference.standing.learning_rate_history
    assert driver.metrics() == reference.metrics


@pytest.fixture
def same_process() -> Iterator[None]:
    """Take back the settings that a training makes for its process."""
    import torch

    from holdfast import state

    threads, rng = torch.get_num_threads(), state.capture_rng()
    yield
    torch.set_num_threads(threads)
    state.restore_rng(rng)
