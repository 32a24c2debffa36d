"""``python -m tests.bench.life CONFIG``: one attempt at a run by the engine alone, as `flows.attempt` makes it."""

import signal
import sys

from holdfast.attempt import live
from holdfast.config import load_config
from holdfast.terminal import interrupt

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt.end)
    live(load_config(sys.argv[1]))
