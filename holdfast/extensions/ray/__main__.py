"""The entry point of the process between an attempt and its ranks on a Ray cluster."""

import os
import sys

from holdfast.errors import HoldfastError
from holdfast.rank.events import Events
from holdfast.rank.process import read_environment
from holdfast.rank.watches import PATIENCE_VARIABLE


def main() -> int:
    """Run an attempt's ranks on Ray until they end. Return the exit code, which is 0 if an order ended them."""
    events = Events()  # from here on all output, including Ray's, goes to the log
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # set before Ray is imported

    from holdfast.extensions.ray.relaying import relay_ranks

    config, commit = read_environment()
    try:
        relay_ranks(config, commit, float(os.environ[PATIENCE_VARIABLE]), events)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        events.send_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # exit without Ray's own shutdown, which takes a second and has no further effect
