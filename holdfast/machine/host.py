"""The name of this machine in the records of attempts and audits."""

import os
import platform

# Another name, with which tests let several machines train on one.
VARIABLE = "HOLDFAST_HOST"


def name_host() -> str:
    """Return the name of this machine."""
    return os.environ.get(VARIABLE) or platform.node()
