"""``python -m tests.bench.life CONFIG``: one attempt at a run by the engine alone, as `flows.attempt` makes it."""

import sys

from holdfast.attempt import live
from holdfast.config import load_config

if __name__ == "__main__":
    live(load_config(sys.argv[1]))
