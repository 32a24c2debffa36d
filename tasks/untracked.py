"""The environment for Prefect: turn usage data off, set the local server's secret, and turn the engine's log on.

Import this module before Prefect, which reads the environment when it is imported. `DO_NOT_TRACK` and
`PREFECT_SERVER_ANALYTICS_ENABLED` keep the values that you have set. Settings of Prefect in pyproject.toml wouldn't
suffice, because Prefect reads them only in the repository's folder.
"""

import logging
import os

from tasks.credentials import find_auth

UNTRACKED = {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}


def prepare() -> None:
    """Turn usage data off. If `PREFECT_API_URL` names the server that `make up` has started, set its secret."""
    for name, value in UNTRACKED.items():
        os.environ.setdefault(name, value)
    auth = find_auth(os.environ.get("PREFECT_API_URL", ""))
    if auth:
        os.environ.setdefault("PREFECT_API_AUTH_STRING", auth)


prepare()
# Prefect sends this logger's records to its server (pyproject.toml, extra_loggers), but doesn't set the logger's level.
logging.getLogger("holdfast").setLevel(logging.INFO)
