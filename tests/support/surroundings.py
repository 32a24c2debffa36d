"""A clean environment for the tests, without the user's own settings. pytest loads this module first (pyproject.toml).

No test may use or depend on the user's server, cloud, proxy, launcher or colours. So this module removes their
variables, and makes an empty home folder, because files there configure them too. Everything else stays, because
Holdfast has to work with it: locale, time zone, width of the terminal, umask, temporary folder, user, cores.
"""

import atexit
import contextlib
import os
import tempfile

import psutil
from hypothesis import HealthCheck, settings

from holdfast.rank.spawn import is_launchers

HIDDEN = ("COLORTERM", "FORCE_COLOR", "NO_COLOR", "STORAGE_EMULATOR_HOST", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
HIDDEN_PREFIXES = (
    "AWS_", "AZURE_", "CLOUDSDK_", "FSSPEC_", "GCSFS_", "GOOGLE_", "HOLDFAST_", "MLFLOW_", "PREFECT_", "TOY_",
    "TRACKIO_", "WANDB_",
)  # fmt: skip
KEPT = (
    "HOLDFAST_EXAMPLES", "HOLDFAST_TERRAFORM_PLUGINS", "HOLDFAST_TEST_DEVICE", "HOLDFAST_TEST_TABLE",
    "HOLDFAST_TEST_UNTIL",
)  # fmt: skip


def is_hidden(name: str) -> bool:
    """Return whether the tests hide the environment variable of this name."""
    name = name.upper()  # http_proxy is usually written in lower case
    is_known = name in HIDDEN or name.startswith(HIDDEN_PREFIXES) or name.endswith("_PROXY") or is_launchers(name)
    return is_known and name not in KEPT


for hidden in filter(is_hidden, list(os.environ)):
    del os.environ[hidden]

MEMORY = "/dev/shm"
ROOM = 8 << 30  # bytes that must be free


def has_room() -> bool:
    """Return whether the tests' files can be in memory, and whether a program that lies there can be started."""
    with contextlib.suppress(OSError):
        found = os.statvfs(MEMORY)
        free = min(found.f_bavail * found.f_frsize, psutil.virtual_memory().available)
        return free >= ROOM and not found.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK)
    return False


# A run of the toy syncs 250 files and folders, which takes longer than its training on a disk. make soak uses the disk.
if "TMPDIR" not in os.environ and "HOLDFAST_EXAMPLES" not in os.environ and has_room():
    os.environ["TMPDIR"] = MEMORY

# The home folder holds Prefect's profiles and the clouds' configurations.
_home = tempfile.TemporaryDirectory(prefix="home-", ignore_cleanup_errors=True)
atexit.register(_home.cleanup)
os.environ["HOME"] = _home.name

# Like the Makefile, turn usage data off, so that no test waits for an answer from the internet.
os.environ.setdefault("DO_NOT_TRACK", "1")

# A busy machine can be a thousand times slower than an idle one. The limit is `timeout` in pyproject.toml.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
