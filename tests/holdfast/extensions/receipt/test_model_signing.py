"""Receipts as model signatures: OpenSSF's reference implementation verifies them, and Holdfast the weights in them."""

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.checkpoint import save
from holdfast.cli import app, run_app
from holdfast.errors import ConfigError, NotTrusted
from holdfast.extensions.receipt.checking import check_receipt, check_weights
from holdfast.extensions.receipt.model import hash_files, state_model
from holdfast.extensions.receipt.signed import describe_commit, open_receipt
from holdfast.journal import Journal
from holdfast.journal.signature import generate_key, load_trusted_key
from holdfast.state import to_payload
from holdfast.store import open_store
from tests.conftest import ROOT
from tests.support.makers import METADATA_FIELDS, make_line, train

CONFIGS = {"pair": {"config.json": {"model_type": "pair"}}}
PYTHON = ROOT / ".venv" / "signing" / "bin" / "python"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Return a run of two commits; the second has a model with a part."""
    line = make_line(open_store(str(tmp_path / "runs")))
    parent = train(line)
    fields = METADATA_FIELDS | {
        "optimizer_steps_total": 20, "epoch": 2, "previous_checkpoint_sha256": parent.checkpoint_sha256,
        "config_fingerprint": parent.config_fingerprint, "model_configs": CONFIGS,
    }  # fmt: skip
    weights = {"pair.first": torch.arange(6.0), "pair.second": torch.ones(3)}
    trail = "".join(f'{{"step": {step}}}\n' for step in range(11, 21))
    line.commit(save(line.journal.store, to_payload({"model": weights}), fields, trail), "chunk")
    return line.journal


@pytest.fixture
def key(tmp_path: Path) -> str:
    generate_key(tmp_path / "team.key")
    return str(tmp_path / "team.key")


@pytest.fixture
def model(journal: Journal, tmp_path: Path) -> Path:
    """Return an exported folder for transformers, with a page about the model beside it."""
    model = tmp_path / "model"
    hold("export", name(journal), str(model), "--form", "transformers", "--part", "pair")
    (model / "docs").mkdir()
    (model / "docs.md").write_text("a name before docs/, if names are compared as texts")
    (model / "docs" / "README.md").write_text("about the model")
    return model


def name(journal: Journal) -> str:
    return f"{journal.store_url}/{journal.run}"


def hold(*words: str, code: int = 0) -> None:
    assert run_app(app, list(words)) == code


def sign(journal: Journal, key: str, out: Path, model: Path | None = None, part: str = "") -> Path:
    options = ["--model", str(model), *(["--part", part] if part else [])] if model else []
    hold("receipt", name(journal), str(out), "--signing-key", key, *options)
    return out


def verify(model: Path, signature: Path, key: str) -> "subprocess.CompletedProcess[str]":
    """Verify a model with the reference implementation."""
    words = ["verify", "key", str(model), "--signature", str(signature), "--public_key", f"{key}.pub"]
    command = [PYTHON, "-m", "model_signing", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


@pytest.mark.extras
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv/signing: make .venv/signing/ready")
class TestReferenceImplementation:
    def test_it_verifies_an_exported_folder_and_refuses_a_changed_one(
        self, journal: Journal, key: str, model: Path, tmp_path: Path
    ) -> None:
        receipt = sign(journal, key, tmp_path / "receipt.json", model, "pair")
        (model / ".gitattributes").write_text("*.safetensors filter=lfs")
        verified = verify(model, receipt, key)
        assert verified.returncode == 0, verified.stdout
        assert "Verification succeeded" in verified.stdout
        (model / "docs" / "README.md").write_text("about another model")
        assert "Hash mismatch for 'docs/README.md'" in verify(model, receipt, key).stdout
        (model / "docs" / "README.md").write_text("about the model")
        (model / "adapter.safetensors").touch()
        assert "Extra files found" in verify(model, receipt, key).stdout

    def test_it_verifies_the_receipt_inside_of_the_folder(self, journal: Journal, key: str, model: Path) -> None:
        receipt = sign(journal, key, model / "receipt.json", model, "pair")
        assert verify(model, receipt, key).returncode == 0

    def test_it_verifies_a_single_file(self, journal: Journal, key: str, tmp_path: Path) -> None:
        model = tmp_path / "all.safetensors"
        hold("export", name(journal), str(model))
        receipt = sign(journal, key, tmp_path / "receipt.json", model)
        assert verify(model, receipt, key).returncode == 0
        model.write_bytes(model.read_bytes() + b"\0")
        assert verify(model, receipt, key).returncode == 1

    def test_it_verifies_the_checkpoint_itself(self, journal: Journal, key: str, tmp_path: Path) -> None:
        receipt = sign(journal, key, tmp_path / "receipt.json")
        newest = journal.newest()
        assert newest is not None
        assert verify(Path(journal.store.url) / newest.path, receipt, key).returncode == 0
        assert verify(Path(journal.store.url) / "epoch-0001", receipt, key).returncode == 1

    def test_it_refuses_another_key(self, journal: Journal, key: str, model: Path, tmp_path: Path) -> None:
        receipt = sign(journal, key, tmp_path / "receipt.json", model, "pair")
        generate_key(tmp_path / "other.key")
        assert "Key mismatch" in verify(model, receipt, str(tmp_path / "other.key")).stdout

    def test_its_digest_of_a_model_is_ours(self, model: Path) -> None:
        code = (
            "import sys; from model_signing import hashing; from model_signing._signing.signing import Payload\n"
            "print(Payload(hashing.hash(sys.argv[1])).statement.pb.subject[0].digest['sha256'])"
        )
        theirs = subprocess.run([PYTHON, "-c", code, model], capture_output=True, text=True, check=True).stdout
        assert state_model("model", hash_files(model))["subject"][0]["digest"]["sha256"] == theirs.strip()


def opened(receipt: Path, key: str) -> Any:
    return open_receipt(receipt.read_bytes(), [load_trusted_key(f"{key}.pub")])


def test_the_audit_tells_the_weights_from_what_lies_beside(
    journal: Journal, key: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = opened(sign(journal, key, tmp_path / "receipt.json", model, "pair"), key)
    assert "signed, but the run didn't make these files: docs/README.md, docs.md" in capsys.readouterr().out
    assert sorted(receipt.files) == ["config.json", "docs.md", "docs/README.md", "model.safetensors"]
    told = check_weights(journal, receipt, check_receipt(journal, receipt)[-1])
    assert (
        told
        == "the signed files have the weights of commit 2; the run didn't make these files: docs/README.md, docs.md"
    )
    (model / "config.json").write_text('{"model_type": "pair", "auto_map": "evil"}')
    other = opened(sign(journal, key, tmp_path / "other.json", model, "pair"), key)
    assert "config.json" in check_weights(journal, other, check_receipt(journal, other)[-1])


def test_weights_that_were_tuned_in_secret_are_not_signed(journal: Journal, model: Path) -> None:
    tuned = load_file(model / "model.safetensors")
    tuned["first"][0] += 1
    save_file(tuned, model / "model.safetensors")
    with pytest.raises(ConfigError, match="contains the weights of pair in commit 2"):
        describe_commit(journal, journal.read_commit(2), model, "pair")


def test_weights_that_a_signer_tuned_in_secret_are_refused(
    journal: Journal, key: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.extensions.receipt.signed.find_others", lambda *_: [])
    (model / "model.safetensors").write_bytes(b"tuned")
    receipt = opened(sign(journal, key, tmp_path / "receipt.json", model, "pair"), key)
    monkeypatch.undo()
    with pytest.raises(NotTrusted, match="no file of the receipt has the weights of commit 2"):
        check_weights(journal, receipt, check_receipt(journal, receipt)[-1])


def test_the_weights_of_a_pruned_commit_are_not_compared(
    journal: Journal, key: str, model: Path, tmp_path: Path
) -> None:
    receipt = opened(sign(journal, key, tmp_path / "receipt.json", model, "pair"), key)
    (Path(journal.store.url) / "pruned").mkdir()
    (Path(journal.store.url) / "pruned" / "00000002.json").touch()
    assert "were not compared" in check_weights(journal, receipt, check_receipt(journal, receipt)[-1])


def test_what_cannot_be_signed_is_named(journal: Journal, model: Path, tmp_path: Path) -> None:
    def problem(model: Path, part: str = "pair") -> str:
        with pytest.raises(ConfigError) as caught:
            describe_commit(journal, journal.read_commit(2), model, part)
        return str(caught.value)

    assert "can't be read: No such file" in problem(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "contains no files" in problem(tmp_path / "empty")
    assert "no weights named critic" in problem(model, "critic")
    assert "contains the weights of commit 2" in problem(model, "")
    (tmp_path / "link").symlink_to(model)
    assert "it is a link" in problem(tmp_path / "link")
    (model / "linked").symlink_to("docs.md")
    assert "linked can't be signed, because it is a link" in problem(model)
    (model / "linked").unlink()
    os.mkfifo(model / "pipe")
    assert "pipe can't be signed, because it is no file" in problem(model)
    (model / "pipe").unlink()
    (Path(os.fsdecode(os.fsencode(model) + b"/\xff"))).touch()
    assert "its name is not UTF-8" in problem(model)


def test_a_part_needs_a_model(journal: Journal, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold("receipt", name(journal), str(tmp_path / "r.json"), "--signing-key", key, "--part", "pair", code=1)
    assert "--part needs --model" in capsys.readouterr().err


def test_one_file_is_signed_under_a_point(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert hash_files(tmp_path / "w") == {".": digest}
    statement = state_model("w", {".": digest})
    assert statement["subject"][0]["digest"]["sha256"] == hashlib.sha256(bytes.fromhex(digest)).hexdigest()
