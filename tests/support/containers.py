"""A container engine for tests: Docker, or podman, answering as Docker's API does."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
import pytest

from tests.conftest import ROOT, kill_tree
from tests.support.processes import command_of

IMAGE = "holdfast:rank-cpu"
ROOMS = ("holdfast", "tasks", "flows", "deployments")
CONFIGURATION = str(ROOT / "tests" / "support" / "containers.conf")


@dataclass
class Engine:
    """An engine and its API.

    Attributes:
        host: the address of its API.
        environment: what a client of it needs.
    """

    host: str

    @property
    def environment(self) -> dict[str, str]:
        return {"DOCKER_HOST": self.host}

    def client(self) -> docker.DockerClient:
        return docker.DockerClient(base_url=self.host)

    def run(self, *arguments: str) -> str:
        """Run a container of the image with these arguments, to its end. Return what it printed."""
        with contextlib.closing(self.client()) as client:
            volumes = [f"{ROOT}:/tree:ro"]
            output = client.containers.run(IMAGE, [*arguments], volumes=volumes, network_mode="host", remove=True)
        return bytes(output).decode()

    def check_image(self) -> None:
        """Skip the test if the image isn't there, or was built from different code than this repository's."""
        try:
            for room in ROOMS:
                self.run("diff", "--recursive", "--brief", "--exclude=__pycache__", f"/app/{room}", f"/tree/{room}")
        except docker.errors.ImageNotFound:
            pytest.skip(f"there is no image {IMAGE}: make image")
        except docker.errors.ContainerError as error:
            pytest.skip(f"{IMAGE} has different code than this repository: make image ({error})")


def find_engine(environment: dict[str, str]) -> str:
    """Return the command of the engine that `infra/image` takes; skip the test if it finds none that works."""
    done = subprocess.run(
        [ROOT / "infra" / "image", "--engine"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(done.stderr.partition("\n")[0])
    return done.stdout.strip()


@contextlib.contextmanager
def engine_up(folder: Path) -> Iterator[Engine]:
    """Yield the engine of `infra/image`, which has its image, while the block lasts: Docker, which runs already, or
    podman's service in this folder."""
    environment = os.environ | {"CONTAINERS_CONF": CONFIGURATION}
    command = find_engine(environment)
    if not command.endswith("podman"):
        engine = Engine(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
        engine.check_image()
        yield engine
        return
    socket = folder / "podman.sock"
    with (folder / "podman.log").open("wb") as log:
        service = subprocess.Popen(
            [command, "system", "service", "--time=0", f"unix://{socket}"], env=environment, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while not socket.exists():
            assert service.poll() is None, (folder / "podman.log").read_text()
            assert time.monotonic() < deadline, "podman's service did not start"
            time.sleep(0.05)
        engine = Engine(f"unix://{socket}")
        engine.check_image()
        yield engine
    finally:
        kill_tree(service.pid)
        service.wait(timeout=30)


def host_process(container: docker.models.containers.Container, name: str) -> psutil.Process:
    """Return the process of a container whose command line has a word that ends with this, as this machine sees it."""
    first = psutil.Process(container.attrs["State"]["Pid"])
    for process in first.children(recursive=True):
        if any(word.endswith(name) for word in command_of(process)):
            return process
    raise AssertionError(f"no process of {container.name} has {name} in its command")
