"""Receipts: a signed chain of commits, checked against a store, with chunks trained again."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from holdfast.attempt import live
from holdfast.cli.app import app
from holdfast.config import ChunkLength, Compute, Log, Retention, RunConfig
from holdfast.errors import NotTrusted, WrongUse
from holdfast.journal import Commit, Journal, record_name
from holdfast.journal.signature import PAYLOAD_TYPE
from holdfast.keeping.retention import prune_run
from holdfast.proof.receipt import (
    PREDICATE_TYPE,
    ReceiptAudit,
    audit_receipt,
    check_receipt,
    make_receipt,
    open_receipt,
)
from holdfast.recipe.permission import Trust
from holdfast.store import open_store
from tests.support.signing import OTHER_TRUSTED, PRIVATE, SIGNING, TRUSTED, sealed

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


def read_statement(envelope: bytes) -> dict[str, Any]:
    statement: dict[str, Any] = json.loads(Envelope.from_dict(json.loads(envelope)).payload)
    return statement


def change_commit(statement: dict[str, Any]) -> None:
    statement["predicate"]["chain"][1]["checkpoint_sha256"] = "0" * 64


def change_settings(statement: dict[str, Any]) -> None:
    next(iter(statement["predicate"]["settings"].values()))["seed"] = 7


def change_file(statement: dict[str, Any]) -> None:
    statement["subject"][-1]["digest"]["sha256"] = "0" * 64


def drop_commit(statement: dict[str, Any]) -> None:
    del statement["predicate"]["chain"][1]


def drop_first(statement: dict[str, Any]) -> None:
    del statement["predicate"]["chain"][0]


def drop_settings(statement: dict[str, Any]) -> None:
    statement["predicate"]["settings"] = {}


def name_other_run(statement: dict[str, Any]) -> None:
    statement["predicate"]["run"] = "other"


def name_other_type(statement: dict[str, Any]) -> None:
    statement["predicateType"] = "urn:holdfast:commit:v1"


def empty_chain(statement: dict[str, Any]) -> None:
    statement["predicate"]["chain"] = []


FORGED: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (change_commit, "its line about commit 2 is not what commits/00000002.json has"),
    (change_settings, "have another fingerprint"),
    (change_file, "its files are not those of commit"),
    (drop_commit, "commit 3 does not continue from commit 1"),
    (drop_first, "the chain begins with commit 2, which continues from commit 1"),
    (drop_settings, "the settings of commit 1 are missing"),
    (name_other_run, "it is about run 'other', not 'r'"),
    (name_other_type, "its types are"),
    (empty_chain, "the signed statement is no receipt"),
]


class TestReceipt:
    @pytest.fixture
    def journal(self, tmp_path: Path) -> Journal:
        return train(tmp_path)

    def test_a_receipt_is_checked_by_another_implementation_and_against_the_store(self, journal: Journal) -> None:
        envelope = make_receipt(journal, newest(journal), SIGNING)
        key = SSlibKey.from_crypto(PRIVATE.public_key(), keyid=SIGNING.key_id)
        assert list(Envelope.from_dict(json.loads(envelope)).verify([key], 1)) == [SIGNING.key_id]
        statement = read_statement(envelope)
        assert statement["predicateType"] == PREDICATE_TYPE
        folder = Path(journal.store.url)
        for subject in statement["subject"]:
            content = (folder / subject["name"]).read_bytes()
            assert subject["digest"] == {"sha256": hashlib.sha256(content).hexdigest()}
        receipt = open_receipt(envelope, [OTHER_TRUSTED, TRUSTED])
        commits = check_receipt(journal, receipt)
        assert [each.step for each in commits][-1] == receipt.commit.step == 40
        assert commits[0].parent == 0
        (identity,) = receipt.chain.settings.values()
        assert identity["recipe"] == RECIPE
        assert receipt.chain.attempts[1].environment["sources"]

    @pytest.mark.parametrize(("forge", "problem"), FORGED, ids=[forge.__name__ for forge, _ in FORGED])
    def test_a_forged_receipt_is_refused_even_with_a_good_signature(
        self, forge: Callable[[dict[str, Any]], None], problem: str, journal: Journal
    ) -> None:
        statement = read_statement(make_receipt(journal, newest(journal), SIGNING))
        forge(statement)
        with pytest.raises(NotTrusted, match=problem):
            check_receipt(journal, open_receipt(sealed(statement), [TRUSTED]))

    def test_another_key_and_changed_bytes_are_refused(self, journal: Journal) -> None:
        envelope = make_receipt(journal, newest(journal), SIGNING)
        with pytest.raises(NotTrusted, match="was not made with a trusted key"):
            open_receipt(envelope, [OTHER_TRUSTED])
        fields = json.loads(envelope)
        fields["payloadType"] = PAYLOAD_TYPE + "x"
        with pytest.raises(NotTrusted, match="doesn't match what it signs"):
            open_receipt(json.dumps(fields).encode(), [TRUSTED])

    def test_a_replaced_record_is_found(self, journal: Journal) -> None:
        receipt = open_receipt(make_receipt(journal, newest(journal), SIGNING), [TRUSTED])
        path = Path(journal.store.url) / record_name("commits", 2)
        path.write_bytes(path.read_bytes() + b"\n")
        with pytest.raises(NotTrusted, match=f"run 'r' has another {record_name('commits', 2)}"):
            check_receipt(journal, receipt)

    def test_chunks_are_trained_again(self, journal: Journal, tmp_path: Path) -> None:
        receipt = open_receipt(make_receipt(journal, newest(journal), SIGNING), [TRUSTED])
        found = audit_receipt(journal, receipt, 2, 5, Trust(recipe=RECIPE))
        assert found.is_good
        assert len(found.audits) == 2
        assert found.replayable == found.commits
        assert "all end on the same bytes" in str(found)
        assert [each.commit for each in audit_receipt(journal, receipt, 2, 5, Trust(recipe=RECIPE)).audits] == [
            each.commit for each in found.audits
        ]

    def test_a_pruned_checkpoint_leaves_a_commit_unchecked(self, tmp_path: Path) -> None:
        journal = train(tmp_path, retention=Retention(keep_last=1))
        prune_run(journal)
        receipt = open_receipt(make_receipt(journal, newest(journal), SIGNING), [TRUSTED])
        found = audit_receipt(journal, receipt, 9, 5, Trust(recipe=RECIPE))
        assert [each.commit for each in found.audits] == [1]
        assert found.unchecked == [each.number for each in check_receipt(journal, receipt)[1:]]
        assert "not checked" in str(found)


def test_a_chunk_that_was_changed_in_secret_is_found(tmp_path: Path) -> None:
    """The commit has a chain without a fault, but its chunk does not train to its bytes."""
    flips = tmp_path / "flips"
    flips.touch()
    journal = train(tmp_path, settings={"cause": "", "flips": str(flips)})
    flips.unlink()
    receipt = open_receipt(make_receipt(journal, newest(journal), SIGNING), [TRUSTED])
    found = audit_receipt(journal, receipt, 9, 5, Trust(recipe=RECIPE))
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
    for words in (["keygen", key], ["receipt", run, out, "--signing-key", key]):
        with pytest.raises(SystemExit) as ended:
            app(words)
        assert ended.value.code == 0
    assert "r.json: receipt of commit" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        app(["audit", run, "--receipt", out, "--key", f"{key}.pub", "--random", "1", "--recipe", RECIPE])
    assert ended.value.code == 0
    assert "1 of 4 chunks trained again" in capsys.readouterr().out.replace("5 chunks", "4 chunks")
    for words, problem in (
        (["audit", run, "--receipt", out], "--receipt needs the public key"),
        (["audit", run, "--receipt", out, "--key", f"{key}.pub", "--commit", "1"], "--receipt and --commit exclude"),
        (["audit", run, "--receipt", out, "--key", f"{key}.pub", "--random", "0"], "--random 0"),
    ):
        with pytest.raises(WrongUse, match=problem):
            app(words, exit_on_error=False)
