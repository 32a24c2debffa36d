"""MLflow's own tracking server, from the environment that `make test-extras` makes for it."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.server import free_port
from tests.conftest import ROOT
from tests.support import servers

MLFLOW = ROOT / ".venv" / "mlflow" / "bin" / "mlflow"


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Run MLflow's own server for the block, in the environment that `make test-extras` makes for it; yield its URL."""
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command = [MLFLOW, "server", *options, "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as server:
        try:
            servers.await_port(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


@pytest.fixture(scope="session")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a tracking server; empty if MLflow isn't installed."""
    if not MLFLOW.exists():
        yield ""
        return
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url
