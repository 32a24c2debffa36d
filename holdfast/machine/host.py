"""The name of this machine in the records of attempts, checkpoints and audits."""

import os
import platform
from collections.abc import Mapping
from typing import Any

# The environment variable with another name for this machine, with which tests simulate several machines.
VARIABLE = "HOLDFAST_HOST"
# The key of an environment's entry with each rank's host, if the ranks were on several nodes.
HOSTS = "hosts"


def name_host() -> str:
    """Return the name of this machine."""
    return os.environ.get(VARIABLE) or platform.node()


def read_hosts(environment: Mapping[str, Any]) -> list[str]:
    """Return the host of each rank from the environment of a record; empty if the ranks were on one node."""
    found = environment.get(HOSTS)
    return list(map(str, found)) if isinstance(found, list) else []
