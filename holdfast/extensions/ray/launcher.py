"""The launcher ``ray``: the command that starts an attempt's ranks on a Ray cluster. Nothing here imports Ray."""

import importlib.util
import os

from holdfast.config import Compute, RunConfig
from holdfast.errors import ConfigError
from holdfast.rank.rendezvous import spell_nodes
from holdfast.store.modules import python_command
from holdfast.terminal import counted, spell_s
from holdfast.terminal.distribution import spell_install

ADDRESS_VARIABLE = "RAY_ADDRESS"


class RayLauncher:
    """The launcher ``ray``; see `holdfast.rank.spawn.ClusterLauncher`."""

    def make_command(self, config: RunConfig) -> list[str]:
        """Return the command of the process between the attempt and its ranks.

        Raises:
            ConfigError: Ray isn't installed.
        """
        if importlib.util.find_spec("ray") is None:
            raise ConfigError('compute.launcher = "ray": Ray is not installed', hint=spell_install("ray"))
        return python_command("-m", "holdfast.extensions.ray")

    def describe_wait(self, compute: Compute) -> str:
        return (
            f"waiting for room on the Ray cluster at {find_cluster_address()} for {spell_nodes(compute)} with "
            f"{counted(compute.rank_count, 'rank')} each, for up to {spell_s(compute.wait_s)}"
        )


def find_cluster_address() -> str:
    """Return the address of the Ray cluster: host:port, or auto."""
    return os.environ.get(ADDRESS_VARIABLE) or "auto"


launcher = RayLauncher()
