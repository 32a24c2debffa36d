"""Local stand-ins for clouds: HTTP servers in processes of their own, on free ports of the loopback interface."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import boto3

from tasks.server import free_port

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start an S3 server for the block; yield the environment variables with which S3 clients use it."""
    port = free_port()
    command = [sys.executable, "-m", "tests.support.s3_server", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, stdout=quiet, stderr=quiet) as server:
        try:
            await_port(port)
            yield {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            server.terminate()


def make_s3_bucket() -> str:
    """Create a bucket on the S3 server that the environment names; return its URL."""
    name = f"bucket-{secrets.token_hex(8)}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


@contextlib.contextmanager
def gcs_server(*page: int) -> Iterator[dict[str, str]]:
    """Start a Google Cloud Storage server for the block; yield the environment variables with which clients use it.

    Args:
        page: the number of names on a page of a listing.
    """
    port = free_port()
    command = [sys.executable, "-m", "tests.support.gcs_server", str(port), *map(str, page)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as server:
        try:
            await_port(port)
            yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
        finally:
            server.terminate()


def make_gcs_bucket() -> str:
    """Create a bucket on the Google Cloud Storage server that the environment names; return its URL."""
    name = f"bucket-{secrets.token_hex(8)}"
    endpoint = f"{os.environ['STORAGE_EMULATOR_HOST']}/storage/v1/b"
    with urllib.request.urlopen(endpoint, json.dumps({"name": name}).encode()):
        return f"gs://{name}"


def await_port(port: int, within_s: float = 600) -> None:
    """Wait until a server listens on the port; fail after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)
