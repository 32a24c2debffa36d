"""What a rank's process gets from its attempt: the configuration, the commit to restore, and the number of its node."""

import os
from collections.abc import Mapping

from holdfast.config import Compute, RunConfig
from holdfast.errors import ConfigError

CONFIG_VARIABLE = "HOLDFAST_CONFIG"
# The environment variable with the number of the commit that the attempt will probably restore; 0 for no commit.
COMMIT_VARIABLE = "HOLDFAST_COMMIT"
NODE_VARIABLE = "HOLDFAST_NODE"
# The environment variables that may contain this node's number. A person, Slurm's srun or an indexed Kubernetes Job
# sets them.
NODE_VARIABLES = (NODE_VARIABLE, "SLURM_NODEID", "JOB_COMPLETION_INDEX")


def find_node(compute: Compute, environ: Mapping[str, str] = os.environ) -> int:
    """Return this node's number, counted from 0. Node 0 runs the attempt; all other nodes only run ranks.

    Raises:
        ConfigError: there are several nodes, and no environment variable contains this node's number.
    """
    if not compute.has_nodes:
        return 0
    for name in NODE_VARIABLES:
        if number := environ.get(name, ""):
            if not number.isdecimal():
                raise ConfigError(f"{name} = {number!r}: expected the number of this node, from 0")
            return int(number)
    raise ConfigError(
        f"compute.nodes = {compute.nodes}: this node's number is not known",
        hint=f"start with srun or as an indexed Job, or set {NODE_VARIABLE}=0 on one node, 1 on the next, and so on",
    )


def split_address(compute: Compute) -> tuple[str, int]:
    """Return the host and the port of the rendezvous."""
    host, _, port = (compute.rendezvous or "").rpartition(":")
    return host.strip("[]"), int(port)


def read_environment() -> tuple[RunConfig, int]:
    """Return the configuration and the commit's number that `make_environment` has set for this rank."""
    return RunConfig.model_validate_json(os.environ[CONFIG_VARIABLE]), int(os.environ.get(COMMIT_VARIABLE, "0"))
