"""Hide the user's own settings from the tests. pytest loads this module first; see ``pyproject.toml``.

A user's server, cloud, proxy, launcher and colours are for the user's runs: no test may reach them or depend on them.
Their variables are removed, and the home folder, which configures them too, is an empty one. Everything else stays,
because Holdfast has to work there: locale, time zone, width of the terminal, umask, temporary folder, user, cores.
"""

import atexit
import os
import tempfile

from hypothesis import HealthCheck, settings

from holdfast.rank.process import is_launchers

HIDDEN = ("COLORTERM", "FORCE_COLOR", "NO_COLOR", "STORAGE_EMULATOR_HOST", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
HIDDEN_PREFIXES = ("AWS_", "AZURE_", "CLOUDSDK_", "FSSPEC_", "GCSFS_", "GOOGLE_", "HOLDFAST_", "PREFECT_", "TOY_")
KEPT = ("HOLDFAST_EXAMPLES",)


def is_hidden(name: str) -> bool:
    """Return whether no test sees the environment variable of this name."""
    name = name.upper()  # http_proxy is the usual way to write it
    is_known = name in HIDDEN or name.startswith(HIDDEN_PREFIXES) or name.endswith("_PROXY") or is_launchers(name)
    return is_known and name not in KEPT


for hidden in filter(is_hidden, list(os.environ)):
    del os.environ[hidden]

# Profiles of Prefect, and configurations of the clouds, are in the home folder.
_home = tempfile.TemporaryDirectory(prefix="home-", ignore_cleanup_errors=True)
atexit.register(_home.cleanup)
os.environ["HOME"] = _home.name

# As the Makefile has it: a training machine sends nothing home, and no test waits for an answer from there.
os.environ.setdefault("DO_NOT_TRACK", "1")

# A busy machine takes a second for what an idle one does in a millisecond: `timeout` in pyproject.toml is the limit.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
