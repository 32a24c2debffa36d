"""Tests of a Docker pool: attempts and their supervisor run in containers of the image, and whatever dies, the run
ends on the right bytes."""

import contextlib
import itertools
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import docker
import psutil
import pytest

from deployments import local
from deployments.pools import make_pools
from tests.conftest import IS_SOAK, ROOT, await_ended, kill_tree
from tests.support.containers import IMAGE, Engine, engine_up, host_process
from tests.support.pools import Pool, PoolRun, await_true, served

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.pool]

STEPS = 30
CHUNK = 4
DELAY = "0.5"  # seconds of each half of a step: on a busy machine it takes seconds to find the process to strike
VICTIMS = ("process", "container", "worker", "engine")
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
# Each test takes minutes on a busy machine.
ALWAYS = {("container", signal.SIGTERM)}
DEATHS = [each for each in itertools.product(VICTIMS, SIGNALS) if IS_SOAK or each in ALWAYS]
GRACE_S = 60
ENDS_WITHIN_S = 400.0  # a container imports everything anew
names = itertools.count(1)


class DockerPool(Pool):
    """A server, and a worker of each pool that starts a container for each flow run."""

    engine: Engine
    label: str

    def change(self, **values: Any) -> None:
        """Give variables of the pool `gpu` other defaults."""
        with self.settings():
            make_pools("docker", ["gpu"], self.values | values)

    def containers(self) -> list[docker.models.containers.Container]:
        """Return the live containers of this pool's flow runs."""
        with contextlib.closing(self.engine.client()) as client:
            return list(client.containers.list(filters={"label": self.label}, ignore_removed=True))

    def container(self, flow_run: str) -> docker.models.containers.Container:
        """Return the live container of a flow run."""
        wanted = f"PREFECT__FLOW_RUN_ID={flow_run}"
        return next(each for each in self.containers() if wanted in each.attrs["Config"]["Env"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_up(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[DockerPool]:
    folder = tmp_path_factory.mktemp("docker")
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # for the image's user
    hurried = folder / "hurried"  # see PoolRun.hurry
    hurried.mkdir()
    own = uuid.uuid4().hex  # another process's tests have a folder of this name, too
    values = {
        "image": IMAGE,
        "image_pull_policy": "Never",
        "volumes": [f"{shared}:{shared}", f"{hurried}:{hurried}:ro", f"{ROOT}/tests:/app/tests:ro"],
        "device_requests": [],
        "env": {"TOY_DELAY_S": DELAY, "TOY_TRAINED": str(shared), "TOY_HURRIED": str(hurried)},
        "labels": {"holdfast.test": own},
    }
    pool = DockerPool(local.ProcessLedger(folder), engine.environment, "docker", values)
    pool.engine, pool.label = engine, f"holdfast.test={own}"
    try:
        with served(pool):
            pool.make_up()
            yield pool
    finally:
        with contextlib.closing(engine.client()) as client:
            for container in client.containers.list(all=True, filters={"label": pool.label}, ignore_removed=True):
                container.remove(force=True)


@pytest.fixture
def run(pool: DockerPool) -> PoolRun:
    return PoolRun(pool, pool.ledger.folder / "shared", f"toy-{next(names)}")


@pytest.fixture(scope="module")
def uninterrupted(pool: DockerPool) -> str:
    """The content id of a run in containers that nothing has interrupted."""
    run = PoolRun(pool, pool.ledger.folder / "shared", "uninterrupted")
    run.hurry()
    train = run.start()
    assert pool.await_end(train, ENDS_WITHIN_S)["state"]["name"] == "Completed", pool.logs(train)
    assert run.reasons() == [("completed", STEPS)]
    return run.standing().checkpoint_sha256


@pytest.mark.parametrize(("victim", "number"), DEATHS, ids=lambda value: getattr(value, "name", value))
def test_a_run_survives_a_death(
    pool: DockerPool, run: PoolRun, uninterrupted: str, victim: str, number: signal.Signals
) -> None:
    train = run.start()
    run.await_commits(1, ENDS_WITHIN_S)
    (attempt,) = run.attempts()
    container = pool.container(attempt["id"])
    at = time.monotonic()
    if victim == "container" and number == signal.SIGTERM:
        container.stop(timeout=GRACE_S)
    elif victim == "container":
        container.kill()
    elif victim == "worker":
        worker = psutil.Process(pool.worker())
        worker.send_signal(number)
        await_ended([worker])
        pool.start_worker()
    else:
        host_process(container, "execute" if victim == "process" else "prefect.engine").send_signal(number)
    run.hurry()
    print(f"{victim} {number.name}: over after {time.monotonic() - at:.1f} s")
    assert pool.await_end(train, ENDS_WITHIN_S)["state"]["name"] == "Completed", pool.logs(train)
    standing = run.standing()
    assert (standing.step, standing.checkpoint_sha256) == (STEPS, uninterrupted)
    reasons = [reason for reason, _ in run.reasons()]
    first = {signal.SIGTERM: ["preempted"], signal.SIGKILL: ["crashed"]}[number] if victim != "worker" else []
    assert reasons == [*first, "completed"]
    at_most_redone = CHUNK if number == signal.SIGKILL and victim != "worker" else 0
    assert STEPS <= len((run.folder / run.name).read_text()) / 2 <= STEPS + at_most_redone
    await_true(lambda: not pool.containers(), "containers are left", ENDS_WITHIN_S)


@pytest.fixture
def lack(pool: DockerPool, request: pytest.FixtureRequest) -> Iterator[str]:
    """Take away what an attempt in a container needs, and give it back."""
    if request.param == "engine":
        kill_tree(pool.worker())
        pool.start_worker(DOCKER_HOST="unix:///nowhere/docker.sock")
    elif request.param == "image":
        pool.change(image="holdfast:nowhere")
    yield request.param
    pool.change()
    kill_tree(pool.worker())
    pool.start_worker()


@pytest.mark.skipif(not IS_SOAK, reason="a minute each: make soak")
@pytest.mark.parametrize(
    ("lack", "said"),
    [
        ("engine", "Could not connect to Docker"),
        ("image", "holdfast:nowhere"),
        ("module", "there is no module my_models"),
    ],
    indirect=["lack"],
)
def test_what_is_lacking_is_named_and_the_run_is_not_lost(
    pool: DockerPool, run: PoolRun, uninterrupted: str, lack: str, said: str
) -> None:
    recipe = "my_models.net:small" if lack == "module" else "tests.support.toy:toy"
    at = time.monotonic()
    train = run.start(recipe=recipe, supervision={"max_failures": 2})
    state = pool.await_end(train, ENDS_WITHIN_S)["state"]
    print(f"without {lack}: {time.monotonic() - at:.0f} s, {state['message']}")
    assert state["name"] == "Failed"
    assert said in state["message"]  # its log arrives later
    pool.change()
    kill_tree(pool.worker())
    pool.start_worker()
    run.hurry()
    state = pool.await_end(run.start(), ENDS_WITHIN_S)["state"]
    assert state["name"] == "Completed", state["message"]
    assert run.standing().checkpoint_sha256 == uninterrupted
