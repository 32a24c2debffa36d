"""Tests of a store that fails now and then: the run ends on the same bytes."""

from pathlib import Path

import pytest

from holdfast.config import ChunkLength, ProofSettings, RunConfig
from holdfast.journal import Journal
from holdfast.store import open_store
from tests.support.faulty import faulty_s3, use
from tests.support.lives import Lives
from tests.support.varied import EPOCHS, STEPS_PER_EPOCH

RATE = 0.12


# The second run is rehearsed at each commit: its new ranks read the store, too.
PROOFS = (ProofSettings(), ProofSettings(rehearse="on", share=1.0))


def end(
    nursery: Lives, environment: dict[str, str], store: str, run: str, proof: ProofSettings = PROOFS[0]
) -> tuple[int, str]:
    """Train a run whose loss draws from Python's, NumPy's and torch's generators; return its step and content id."""
    config = RunConfig(
        recipe="tests.support.varied:pythonic", run=run, store=store, epochs=EPOCHS, chunk=ChunkLength(steps=2),
        proof=proof,
    )  # fmt: skip
    done = nursery.call("tests.support.forked:train_chunks", config.model_dump(mode="json"), 99, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    newest = Journal(open_store(store), run).newest()
    assert newest is not None
    assert bool(newest.rehearsed) == (proof.rehearse == "on"), done.stderr
    return newest.step, newest.checkpoint_sha256


@pytest.mark.slow
def test_a_run_on_a_faulty_store_ends_on_the_bytes_of_a_quiet_one(
    nursery: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = end(nursery, {}, str(tmp_path), "quiet")
    assert quiet[0] == EPOCHS * STEPS_PER_EPOCH
    for seed, proof in enumerate(PROOFS, 1):
        with faulty_s3(RATE, seed) as s3:
            store = f"{use(s3, monkeypatch)}/runs"
            assert end(nursery, s3.environment, store, "faulty", proof) == quiet
            assert sum(s3.faults.values()) > s3.requests * RATE / 3
