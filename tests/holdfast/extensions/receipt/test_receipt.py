"""Receipts: a signed chain of commits, checked against a store, with chunks trained again."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from holdfast.attempt import live
from holdfast.cli.app import app
from holdfast.config import ChunkLength, Compute, Log, Retention, RunConfig
from holdfast.errors import WrongUse
from holdfast.extensions.receipt.auditing import ReceiptAudit, audit_receipt
from holdfast.extensions.receipt.checking import check_receipt
from holdfast.extensions.receipt.signed import describe_commit, open_receipt, seal_receipt
from holdfast.journal import Commit, Journal
from holdfast.keeping.retention import prune_run
from holdfast.recipe.trust import Trust
from holdfast.store import open_store
from tests.support.signing import OTHER_TRUSTED, PRIVATE, SIGNING, TRUSTED

RECIPE = "tests.support.spiking:spike"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]


def train(folder: Path, run: str = "r", **fields: Any) -> Journal:
    """Train a run of four commits, of which the third has step 30."""
    config = RunConfig(
        recipe=RECIPE, run=run, store=str(folder / "runs"), epochs=5, chunk=ChunkLength(steps=10),
        log=Log(folder=str(folder / "logs")), compute=Compute(device="cpu"),
        **{"settings": {"cause": ""}, "retention": Retention(keep_last=9)} | fields,
    )  # fmt: skip
    assert live(config).complete
    return Journal(open_store(config.store), run)


def newest(journal: Journal) -> Commit:
    found = journal.newest()
    assert found is not None
    return found


def make(journal: Journal) -> bytes:
    return seal_receipt(describe_commit(journal, newest(journal)), SIGNING)


class TestReceipt:
    @pytest.fixture
    def journal(self, tmp_path: Path) -> Journal:
        return train(tmp_path)

    def test_a_receipt_is_checked_by_another_implementation_and_against_the_store(self, journal: Journal) -> None:
        data = make(journal)
        envelope = Envelope.from_dict(json.loads(data)["dsseEnvelope"])
        key = SSlibKey.from_crypto(PRIVATE.public_key(), keyid=SIGNING.key_id)
        assert list(envelope.verify([key], 1)) == [SIGNING.key_id]
        folder = Path(journal.store.url) / newest(journal).path
        for resource in json.loads(envelope.payload)["predicate"]["resources"]:
            content = (folder / resource["name"]).read_bytes()
            assert resource["digest"] == hashlib.sha256(content).hexdigest()
        receipt = open_receipt(data, [OTHER_TRUSTED, TRUSTED])
        commits = check_receipt(journal, receipt)
        assert [each.step for each in commits][-1] == receipt.chain.commit.step == 40
        assert commits[0].parent == 0
        (identity,) = receipt.chain.settings.values()
        assert identity["recipe"] == RECIPE
        assert receipt.chain.attempts[1].environment["sources"]

    def test_chunks_are_trained_again(self, journal: Journal, tmp_path: Path) -> None:
        receipt = open_receipt(make(journal), [TRUSTED])
        found = audit_receipt(journal, receipt, 2, 5, Trust(recipe=RECIPE))
        assert found.is_good
        assert len(found.audits) == 2
        assert found.replayable == found.commits
        assert "all end on the same bytes" in str(found)
        assert [each.commit for each in audit_receipt(journal, receipt, 2, 5, Trust(recipe=RECIPE)).audits] == [
            each.commit for each in found.audits
        ]

    def test_an_exchanged_data_shard_is_found(self, journal: Journal) -> None:
        receipt = open_receipt(make(journal), [TRUSTED])
        found = audit_receipt(journal, receipt, 1, 5, Trust(recipe="tests.support.spiking:spike_on_other_data"))
        assert not found.is_good
        assert "NOT all end on the same bytes" in str(found)

    def test_a_pruned_checkpoint_leaves_a_commit_unchecked(self, tmp_path: Path) -> None:
        journal = train(tmp_path, retention=Retention(keep_last=1))
        prune_run(journal)
        receipt = open_receipt(make(journal), [TRUSTED])
        found = audit_receipt(journal, receipt, 9, 5, Trust(recipe=RECIPE, records=True))
        assert [each.commit for each in found.audits] == [1]
        assert found.unchecked == [each.number for each in check_receipt(journal, receipt)[1:]]
        assert "not checked" in str(found)


def test_a_chunk_that_was_changed_in_secret_is_found(tmp_path: Path) -> None:
    """The commit has a chain without a fault, but its chunk does not train to its bytes."""
    flips = tmp_path / "flips"
    flips.touch()
    journal = train(tmp_path, settings={"cause": "", "flips": str(flips)})
    flips.unlink()
    receipt = open_receipt(make(journal), [TRUSTED])
    found = audit_receipt(journal, receipt, 9, 5, Trust(recipe=RECIPE, records=True))
    assert not found.is_good
    assert [each.is_identical for each in found.audits].count(False) == 1
    assert "NOT all end on the same bytes" in str(found)


@pytest.mark.parametrize(
    ("replayable", "audited", "forged", "chance"),
    [(10, 3, 1, 0.7), (10, 3, 2, 7 / 15), (10, 10, 1, 0.0), (4, 3, 2, 0.0), (1000, 20, 50, 0.355)],
)
def test_the_probability_that_forged_chunks_pass(replayable: int, audited: int, forged: int, chance: float) -> None:
    found = ReceiptAudit.model_construct(audits=[None] * audited, replayable=replayable)
    assert found.chance(forged) == pytest.approx(chance, abs=1e-3)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    run, out, key = str(tmp_path / "runs/r"), str(tmp_path / "r.json"), str(tmp_path / "k")
    model = str(tmp_path / "model.safetensors")
    receipt = ["receipt", run, out, "--signing-key", key, "--model", model]
    for words in (["keygen", key], ["export", run, model], receipt):
        with pytest.raises(SystemExit) as ended:
            app(words)
        assert ended.value.code == 0
    assert "r.json: receipt of commit" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        app(["audit", run, "--receipt", out, "--key", f"{key}.pub", "--random", "1", "--recipe", RECIPE])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "1 of 4 chunks trained again" in told.replace("5 chunks", "4 chunks")
    assert "the signed files have the weights of commit" in told
    for words, problem in (
        (["audit", run, "--receipt", out], "--receipt needs the public key"),
        (["audit", run, "--receipt", out, "--key", f"{key}.pub", "--commit", "1"], "--receipt and --commit exclude"),
        (["audit", run, "--receipt", out, "--key", f"{key}.pub", "--random", "0"], "--random 0"),
    ):
        with pytest.raises(WrongUse, match=problem):
            app(words, exit_on_error=False)
