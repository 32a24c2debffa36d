"""``python -m tests.bench.life CONFIG``: one attempt at a run by the engine alone, as `flows.attempt` makes it."""

import sys

from holdfast.attempt import Attempt
from holdfast.config import load_config


def main(path: str) -> None:
    attempt = Attempt(load_config(path))
    try:
        attempt.open()
        while (chunk := attempt.next_chunk()) is not None:
            saved = attempt.train_chunk(chunk)
            if saved is not None:
                attempt.commit(saved)
    finally:
        attempt.end("completed" if attempt.is_complete else "stopped")


if __name__ == "__main__":
    main(sys.argv[1])
