"""Named points at which a test may end this process; in a real run, nothing happens at them."""

import os

# A kill between any two leaves a run that resumes and a store that verifies.
POINTS = (
    "payload-written",  # a rank: every byte is with the operating system, none is promised
    "payload-durable",  # a rank: the payload has its name
    "metadata-durable",  # a rank: the checkpoint is complete and may be adopted
    "chunk-reported",  # the attempt: it knows of the checkpoint and has not committed it
    "commit-recorded",  # the attempt: the commit counts, latest.json is stale
    "latest-replaced",  # the attempt: the commit is done
)


def reach(point: str) -> None:
    """Pass a named point; see `holdfast.testing.faults` for how one is made to fail."""
    if "HOLDFAST_FAULT" in os.environ:
        from holdfast.testing.faults import strike

        strike(point)
