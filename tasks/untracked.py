"""Prepare the environment that Prefect reads when it is imported; import this module before Prefect.

Prefect's usage data stays off unless you ask for it: `DO_NOT_TRACK` and `PREFECT_SERVER_ANALYTICS_ENABLED` keep the
values that you have set. The setting in pyproject.toml counts only in the repository's folder.
"""

import os

from tasks.credentials import find_auth

UNTRACKED = {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}


def prepare() -> None:
    """Turn usage data off. Set the secret of the server that `make up` has started, if `PREFECT_API_URL` names it."""
    for name, value in UNTRACKED.items():
        os.environ.setdefault(name, value)
    auth = find_auth(os.environ.get("PREFECT_API_URL", ""))
    if auth:
        os.environ.setdefault("PREFECT_API_AUTH_STRING", auth)


prepare()
