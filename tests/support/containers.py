"""A container engine for tests: podman, answering as Docker's API does, or Docker itself."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
import pytest

from tests.conftest import ROOT, kill_tree

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
        """Skip the test if the image isn't there, or was built from other code than this repository's."""
        try:
            for room in ROOMS:
                self.run("diff", "--recursive", "--brief", "--exclude=__pycache__", f"/app/{room}", f"/tree/{room}")
        except docker.errors.ImageNotFound:
            pytest.skip(f"there is no image {IMAGE}: make image")
        except docker.errors.ContainerError as error:
            pytest.skip(f"{IMAGE} has other code than this repository: make image ({error})")


@contextlib.contextmanager
def engine_up(folder: Path) -> Iterator[Engine]:
    """Yield an engine while the block lasts: podman's service in this folder, or the Docker that runs already."""
    podman = shutil.which("podman")
    if podman is None:
        with contextlib.suppress(docker.errors.DockerException):
            docker.from_env().ping()
            yield Engine(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
            return
        pytest.skip("containers need podman or docker")
    socket = folder / "podman.sock"
    environment = os.environ | {"CONTAINERS_CONF": CONFIGURATION}
    with (folder / "podman.log").open("wb") as log:
        service = subprocess.Popen(
            [podman, "system", "service", "--time=0", f"unix://{socket}"], env=environment, stdout=log, stderr=log
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
        if any(word.endswith(name) for word in process.cmdline()):
            return process
    raise AssertionError(f"no process of {container.name} has {name} in its command")
