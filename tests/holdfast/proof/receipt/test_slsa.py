"""The provenance of SLSA's form: another implementation reads it, and it has what the receipt has."""

import base64
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from holdfast.cli import app, run_app
from holdfast.errors import NotTrusted
from holdfast.journal import Journal
from holdfast.journal.signature import generate_key, load_signing_key, load_trusted_key
from holdfast.proof.receipt import open_receipt
from holdfast.proof.receipt.slsa import BUILD_TYPE
from holdfast.store import open_store
from tests.conftest import ROOT
from tests.support.makers import CONFIG, IDENTITY, SETTINGS, make_commit, save

PYTHON = ROOT / ".venv" / "signing" / "bin" / "python"
ENVIRONMENT = {
    "source_bytes": {"my_model": "1" * 64},
    "packages": {"Einops": "0.8"},
    "files": {
        "texts/*": {"size_bytes": 9, "files": 40, "sha256": "2" * 64},
        "corpus.txt": {"size_bytes": 3, "sha256": "3" * 64},
    },
    "torch": "2.13.0+cpu",
    "deterministic": True,
}
# Reads a statement strictly, as the protocol buffers of in-toto declare it: an unknown field is an error.
READER = """
import json, sys
from google.protobuf.json_format import Parse, ParseDict
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as Fields
text = sys.stdin.read()
Statement.copy_from_pb(Parse(text, Fields())).validate()
found = ParseDict(json.loads(text)["predicate"], Provenance())
details = found.run_details
print(found.build_definition.build_type, len(found.build_definition.resolved_dependencies), details.builder.id)
print(details.metadata.started_on.seconds <= details.metadata.finished_on.seconds)
"""


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Return a run of two commits by two attempts on different code."""
    journal = Journal(open_store(str(tmp_path / "runs")), "r")
    journal.begin("m:f")
    journal.record_config(SETTINGS, IDENTITY, CONFIG)
    journal.claim_attempt(1, "fresh", "first", 1, ENVIRONMENT, began_at="2026-01-01T00:00:00.000+00:00")
    parent = ""
    for number in (1, 2):
        if number == 2:
            changed = ENVIRONMENT | {"source_bytes": {"my_model": "4" * 64}}
            journal.claim_attempt(2, "continued", "second", 1, changed, {"drift": {"sources.my_model": "changed"}})
        saved = save(journal.store, 10 * number, parent)
        parent = saved.metadata.checkpoint_sha256
        journal.publish_commit(
            make_commit(number, attempt=number, path=saved.path, files=saved.files, checkpoint_sha256=parent)
        )
    return journal


@pytest.fixture
def envelope(journal: Journal, tmp_path: Path) -> dict[str, Any]:
    generate_key(tmp_path / "k")
    words = ["receipt", f"{journal.store_url}/r", str(tmp_path / "p.json"), "--signing-key", str(tmp_path / "k")]
    assert run_app(app, [*words, "--form", "slsa"]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "p.json").read_bytes())
    return found


def test_the_provenance_names_what_the_checkpoint_was_made_from(
    journal: Journal, envelope: dict[str, Any], tmp_path: Path
) -> None:
    key = load_signing_key(str(tmp_path / "k"))
    opened = Envelope.from_dict(envelope)
    assert opened.verify([SSlibKey.from_crypto(key._private.public_key(), keyid=key.key_id)], 1)
    statement = json.loads(opened.payload)
    newest = journal.read_commit(2)
    folder = Path(journal.store.url) / newest.path
    assert {each["name"] for each in statement["subject"]} == {file.name for file in newest.files}
    for subject in statement["subject"]:
        assert subject["digest"]["sha256"] == hashlib.sha256((folder / subject["name"]).read_bytes()).hexdigest()
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"run": "r", "step": 20, "settings": IDENTITY}
    assert definition["internalParameters"]["machines"] == {"1": "first", "2": "second"}
    assert definition["internalParameters"]["lineage"]["2"] == {"drift": {"sources.my_model": "changed"}}
    assert definition["resolvedDependencies"] == [
        {"name": "source my_model", "digest": {"sha256": "1" * 64}},
        {"name": "file texts/*", "annotations": ENVIRONMENT["files"]["texts/*"]},  # type: ignore[index]
        {"name": "file corpus.txt", "digest": {"sha256": "3" * 64}},
        {"uri": "pkg:pypi/einops@0.8"},
        {"uri": "pkg:pypi/torch@2.13.0+cpu"},
        {"name": "source my_model", "digest": {"sha256": "4" * 64}},
    ]
    metadata = statement["predicate"]["runDetails"]["metadata"]
    assert metadata["startedOn"] == "2026-01-01T00:00:00.000+00:00"
    assert metadata["finishedOn"] == newest.created_at


@pytest.mark.extras
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv/signing: make .venv/signing/ready")
def test_another_implementation_reads_the_provenance(envelope: dict[str, Any]) -> None:
    text = base64.b64decode(envelope["payload"]).decode()
    told = subprocess.run([PYTHON, "-c", READER], input=text, capture_output=True, text=True, check=True).stdout
    assert told == f"{BUILD_TYPE} 6 urn:holdfast:builder:v1\nTrue\n"


def test_a_provenance_is_no_receipt(envelope: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(NotTrusted, match="it is no bundle, which holdfast receipt writes without --form slsa"):
        open_receipt((tmp_path / "p.json").read_bytes(), [load_trusted_key(str(tmp_path / "k.pub"))])
