"""Forged receipts and forged runs: each is refused with its reason, or is among those that no receipt can show.

The signer of a receipt may lie, so most statements here have a good signature. The signature, the bundle and the
canonical JSON are made by other implementations.
"""

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from holdfast.checkpoint import METADATA, METRICS, PAYLOAD
from holdfast.errors import CheckpointDamaged, NotTrusted, RecordDamaged, WrongUse
from holdfast.extensions.receipt.auditing import ReceiptAudit, choose_chunks
from holdfast.extensions.receipt.checking import check_receipt, check_weights, describe_untrained
from holdfast.extensions.receipt.signed import describe_commit, open_receipt, seal_receipt
from holdfast.journal import AuditRecord, Journal, now, record_name
from holdfast.journal.audits import record_audit
from holdfast.journal.records import AttemptRecord, FileRecord, Origin
from holdfast.store import open_store
from tests.support.makers import CONFIG, IDENTITY, SETTINGS, make_commit, save
from tests.support.signing import OTHER_PRIVATE, SIGNING, TRUSTED, bundle, sealed_bundle

RECEIPT = "urn:holdfast:receipt:v1"
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
Statement = dict[str, Any]


def make_run(folder: Path, run: str, host: str = "first") -> Journal:
    """Make a run of four commits by two attempts, with accepted drift, rehearsals and an audit; train nothing."""
    journal = Journal(open_store(str(folder)), run)
    journal.begin("m:f")
    journal.record_config(SETTINGS, IDENTITY, CONFIG)
    change = {"kind": "code", "saved": "1" * 64, "now": "2" * 64, "was": "1" * 64, "default": False}
    drift = {"drift": {"sources.my_model": change}}
    journal.claim_attempt(
        1, "fresh", host, 1, {"sources": {"my_model": "1" * 64}, "packages": {"torch": "2.9"}, "deterministic": True}
    )
    parent = ""
    for number in (1, 2, 3, 4):
        if number == 3:
            journal.claim_attempt(2, "continued", "second", 1, {"sources": {"my_model": "2" * 64}}, drift)
        saved = save(journal.store, 10 * number, parent)
        parent = saved.metadata.checkpoint_sha256
        journal.publish_commit(
            make_commit(
                number, attempt=1 + number // 3, path=saved.path, files=saved.files, checkpoint_sha256=parent,
                rehearsed=[12] if number > 1 else [], inexact="step 33 differs" if number == 4 else "",
            )
        )  # fmt: skip
    second = journal.read_commit(2)
    record_audit(journal, AuditRecord(
        commit=2, number=1, from_commit=1, checkpoint_sha256=second.checkpoint_sha256, notes=[], host="auditor",
        environment={}, created_at=now(),
    ))  # fmt: skip
    return journal


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    return make_run(tmp_path_factory.mktemp("runs"), "r")


@pytest.fixture(scope="module")
def receipt(original: Journal) -> bytes:
    return make(original, 4)


@pytest.fixture
def journal(original: Journal, tmp_path: Path) -> Journal:
    """A copy of the run, for a forger."""
    shutil.copytree(Path(original.store.url), tmp_path / "r")
    return Journal(open_store(str(tmp_path)), "r")


@pytest.fixture
def statement(receipt: bytes) -> Statement:
    return read_statement(receipt)


def read_statement(receipt: bytes) -> Statement:
    found: Statement = json.loads(base64.b64decode(json.loads(receipt)["dsseEnvelope"]["payload"]))
    return found


def make(journal: Journal, commit: int) -> bytes:
    return seal_receipt(describe_commit(journal, journal.read_commit(commit)), SIGNING)


def check(journal: Journal, receipt: bytes) -> None:
    """Check a receipt as `holdfast audit --receipt` does before it trains anything."""
    opened = open_receipt(receipt, [TRUSTED])
    check_weights(journal, opened, check_receipt(journal, opened)[-1])


def chain(statement: Statement) -> dict[str, Any]:
    found: dict[str, Any] = statement["predicate"][RECEIPT]
    return found


def links(statement: Statement) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chain(statement)["chain"]
    return found


def settings(statement: Statement) -> dict[str, Any]:
    found: dict[str, Any] = chain(statement)["settings"][SETTINGS]
    return found


def attempt(statement: Statement, number: int) -> dict[str, Any]:
    found: dict[str, Any] = chain(statement)["attempts"][str(number)]
    return found


def link(number: int, **fields: Any) -> Callable[[Statement], None]:
    """Return a forger who changes fields of the line about a commit."""
    return lambda statement: links(statement)[number - 1].update(fields)


def resources(statement: Statement) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = statement["predicate"]["resources"]
    return found


def test_the_true_receipt_passes(journal: Journal, receipt: bytes, statement: Statement) -> None:
    check(journal, receipt)
    check(journal, sealed_bundle(statement))


LIES: dict[str, tuple[Callable[[Statement], object], str]] = {
    # commits
    "a replaced commit": (link(2, record_sha256="0" * 64), "run 'r' has a different commits/00000002.json"),
    "a different content id": (link(2, checkpoint_sha256="0" * 64), "checkpoint_sha256 of commit 2 is not what"),
    "another step": (link(2, step=19), "step of commit 2 is not what"),
    "another parent": (link(3, parent=1), "parent of commit 3 is not what"),
    "a dropped commit": (lambda s: links(s).pop(1), "chain has commit 3 where the run's chain has commit 2"),
    "a dropped beginning": (lambda s: links(s).pop(0), "chain has commit 2 where the run's chain has commit 1"),
    "a truncated chain": (lambda s: links(s).pop(), "names attempts 1, 2,|files are not the files of commit 3"),
    "no chain": (lambda s: links(s).clear(), "List should have at least 1 item"),
    "reordered commits": (
        lambda s: links(s).insert(0, links(s).pop(1)),
        "the receipt's chain has commit 2 where the run's chain has commit 1",
    ),
    "a commit twice": (
        lambda s: links(s).insert(1, links(s)[1]),
        "the receipt's chain has commit 2 where the run's chain has commit 3",
    ),
    "an invented commit": (
        lambda s: links(s).append(links(s)[-1] | {"commit": 5, "parent": 4}),
        "the run lacks a record that the receipt names: run 'r' has no commits/00000005.json",
    ),
    "commit 0": (link(4, commit=0), "Input should be greater than or equal to 1"),
    "a negative commit": (link(4, commit=-4), "Input should be greater than or equal to 1"),
    "a number beyond exact numbers": (link(4, commit=2**53 - 1), "the run lacks a record that the receipt names"),
    "a number beyond every integer": (link(4, step=1e300), "exceeded maximum size|is not spelled"),
    "a number as text": (link(2, step="20"), "is not spelled as a receipt is"),
    "a truth value as number": (link(1, commit=True), "is not spelled as a receipt is"),
    "a list as number": (link(1, commit=[1]), "Input should be a valid integer"),
    # attempts and machines
    "another attempt": (link(3, attempts=[1]), "attempts of commit 3 is not what"),
    "no attempt": (link(1, attempts=[]), "attempts of commit 1 is not what"),
    "a dropped attempt": (lambda s: chain(s)["attempts"].pop("1"), "names attempts 2, but attempts 1, 2 trained"),
    "an invented attempt": (
        lambda s: chain(s)["attempts"].update({"3": attempt(s, 2)}),
        "names attempts 1, 2, 3, but attempts 1, 2 trained",
    ),
    "an attempt under two spellings": (
        lambda s: chain(s)["attempts"].update({"01": attempt(s, 2)}),
        "is not spelled as a receipt is",
    ),
    "another machine": (lambda s: attempt(s, 1).update(host="dgx-1"), "host of attempt 1 is not what"),
    "exchanged machines": (
        lambda s: chain(s)["attempts"].update({"1": attempt(s, 2), "2": attempt(s, 1)}),
        "host of attempt 1 is not what",
    ),
    "other code": (
        lambda s: attempt(s, 1)["environment"]["sources"].update(my_model="3" * 64),
        "environment of attempt 1 is not what",
    ),
    "another package": (
        lambda s: attempt(s, 1)["environment"]["packages"].update(torch="2.10"),
        "environment of attempt 1 is not what",
    ),
    "a version as number": (
        lambda s: attempt(s, 1)["environment"]["packages"].update(torch=2.9),
        "environment of attempt 1 is not what",
    ),
    "a number for a truth value": (
        lambda s: attempt(s, 1)["environment"].update(deterministic=1),
        "environment of attempt 1 is not what",
    ),
    "a dropped drift record": (lambda s: attempt(s, 2)["lineage"].clear(), "lineage of attempt 2 is not what"),
    "other accepted drift": (
        lambda s: attempt(s, 2)["lineage"].update(drift={}),
        "lineage of attempt 2 is not what",
    ),
    "invented drift": (
        lambda s: attempt(s, 1)["lineage"].update(drift={"epochs": {"saved": 1, "current": 2}}),
        "lineage of attempt 1 is not what",
    ),
    # what others have found
    "an invented certification": (
        lambda s: links(s)[0]["certified_by"].append("auditor"),
        "certified_by of commit 1 is not what",
    ),
    "certified by another host, too": (
        lambda s: links(s)[1]["certified_by"].append("laboratory"),
        "certified_by of commit 2 is not what",
    ),
    "certified twice by one host": (
        lambda s: links(s)[1]["certified_by"].append("auditor"),
        "certified_by of commit 2 is not what",
    ),
    "a rehearsal that was skipped": (link(1, rehearsed=[3]), "rehearsed of commit 1 is not what"),
    "a dropped rehearsal": (link(2, rehearsed=[]), "rehearsed of commit 2 is not what"),
    "a rehearsal that differed, wiped": (link(4, inexact=""), "inexact of commit 4 is not what"),
    "an invented origin": (link(1, origin={"source": "gpt"}), "origin of commit 1 is not what"),
    # settings and data
    "a different seed": (lambda s: settings(s).update(seed=7), "have a different fingerprint"),
    "an exchanged data shard": (lambda s: settings(s).update(data=["0" * 64]), "have a different fingerprint"),
    "a hidden setting": (lambda s: settings(s).update(_audited="by all"), "have a different fingerprint"),
    "a dropped setting": (lambda s: settings(s).pop("seed"), "have a different fingerprint"),
    "dropped settings": (lambda s: chain(s)["settings"].clear(), "the settings of commit 1 are missing"),
    "settings of no commit": (
        lambda s: chain(s)["settings"].update({rfc_sha256({"seed": 1}): {"seed": 1}}),
        "no commit has the settings",
    ),
    "settings of another run": (link(2, settings="0" * 64), "settings of commit 2 is not what"),
    # the run
    "another run": (lambda s: chain(s).update(run="other"), "receipt is about run 'other', not 'r'"),
    "a run's name that looks alike": (lambda s: chain(s).update(run="\u0433"), r"is about run '\\u0433', not 'r'"),
    "a run's name with a space": (lambda s: chain(s).update(run="r "), "receipt is about run 'r ', not 'r'"),
    "a run's name with a zero width": (lambda s: chain(s).update(run="r\u200b"), r"receipt is about run 'r\\u200b'"),
    # the signed files
    "an exchanged file": (lambda s: resources(s)[0].update(digest="0" * 64), "not spelled as a receipt is"),
    "an exchanged file and its root": (lambda s: reroot(s, 0, "0" * 64), "files are not the files of commit 4"),
    "an export of other weights": (
        lambda s: chain(s).update(exported=""),
        "the checkpoint has no weights|no file of the receipt has the weights",
    ),
    "an unknown part": (lambda s: chain(s).update(exported="critic"), "the checkpoint has no weights named critic"),
    "a dropped file": (lambda s: resources(s).pop(), "not spelled as a receipt is"),
    "no file": (lambda s: resources(s).clear(), "List should have at least 1 item"),
    "a file twice": (lambda s: resources(s).append(resources(s)[0]), "not spelled as a receipt is"),
    "files in a different order": (lambda s: resources(s).reverse(), "not spelled as a receipt is"),
    "a hash of a different kind": (lambda s: resources(s)[0].update(algorithm="blake3"), "not spelled as a receipt is"),
    "a digest that is no hash": (lambda s: resources(s)[0].update(digest="0" * 63 + "G"), "String should match"),
    "another root": (lambda s: s["subject"][0]["digest"].update(sha256="0" * 64), "not spelled as a receipt is"),
    "another subject": (lambda s: s["subject"].append(s["subject"][0]), "List should have at most 1 item"),
    "no subject": (lambda s: s["subject"].clear(), "List should have at least 1 item"),
    "a second digest": (lambda s: s["subject"][0]["digest"].update(sha512="0"), "Extra inputs are not permitted"),
    "a file that model signing ignores": (
        lambda s: s["predicate"]["serialization"].update(ignore_paths=["adapter.safetensors"]),
        "not spelled as a receipt is",
    ),
    "links in the model": (
        lambda s: s["predicate"]["serialization"].update(allow_symlinks=True),
        "not spelled as a receipt is",
    ),
    "shards of files": (
        lambda s: s["predicate"]["serialization"].update(method="shards"),
        "not spelled as a receipt is",
    ),
    # the statement
    "another statement's type": (
        lambda s: s.update(predicateType="https://slsa.dev/provenance/v1"),
        "its type is 'https://slsa.dev/provenance/v1'",
    ),
    "a different version of in-toto": (lambda s: s.update(_type="https://in-toto.io/Statement/v2"), "not spelled"),
    "another field": (lambda s: s.update(audited="by all"), "audited: Extra inputs are not permitted"),
    "another field of the predicate": (lambda s: s["predicate"].update(a=1), "Extra inputs are not permitted"),
    "another field of a commit": (link(1, audited="by all"), "Extra inputs are not permitted"),
    "another field of an attempt": (lambda s: attempt(s, 1).update(gpu="H100"), "Extra inputs are not permitted"),
    "a missing field": (lambda s: links(s)[1].pop("certified_by"), "certified_by: Field required"),
    "a chain of a later form": (
        lambda s: s["predicate"].update({"urn:holdfast:receipt:v2": s["predicate"].pop(RECEIPT)}),
        "Field required|Extra inputs",
    ),
}  # fmt: skip


def rfc_sha256(value: dict[str, Any]) -> str:
    return hashlib.sha256(rfc8785.dumps(value)).hexdigest()


def reroot(statement: Statement, number: int, digest: str) -> None:
    """Change the digest of a file, and compute the model's digest again."""
    resources(statement)[number]["digest"] = digest
    root = hashlib.sha256(b"".join(bytes.fromhex(each["digest"]) for each in resources(statement))).hexdigest()
    statement["subject"][0]["digest"]["sha256"] = root


@pytest.mark.parametrize(("forge", "problem"), LIES.values(), ids=LIES)
def test_a_lie_of_the_signer_is_refused(
    forge: Callable[[Statement], object], problem: str, journal: Journal, statement: Statement
) -> None:
    forge(statement)
    with pytest.raises(NotTrusted, match=problem):
        check(journal, sealed_bundle(statement))


SPELLINGS: dict[str, Callable[[bytes], bytes]] = {
    "white space": lambda payload: payload.replace(b",", b", ", 1),
    "a space behind": lambda payload: payload + b" ",
    "a byte order mark": lambda payload: b"\xef\xbb\xbf" + payload,
    "a key twice, the true one last": lambda payload: payload.replace(b'"run":', b'"run":"other","run":', 1),
    "a key twice, the true one first": lambda payload: payload.replace(b'"run":"r"', b'"run":"r","run":"r"', 1),
    "a commit's key twice": lambda payload: payload.replace(b'"step":20', b'"step":19,"step":20', 1),
    "an escaped letter": lambda payload: payload.replace(b'"run":"r"', rb'"run":"\u0072"', 1),
    "an escaped key": lambda payload: payload.replace(b'"run":', rb'"\u0072un":', 1),
    "another float": lambda payload: payload.replace(b'"step":20', b'"step":20.0', 1),
    "an exponent": lambda payload: payload.replace(b'"step":20', b'"step":2e1', 1),
    "a number with 400 digits": lambda payload: payload.replace(b'"step":20', b'"step":' + b"2" * 400, 1),
    "a number with 5,000 digits": lambda payload: payload.replace(b'"step":20', b'"step":' + b"2" * 5000, 1),
    "an infinite number": lambda payload: payload.replace(b'"step":20', b'"step":1e999', 1),
    "no number": lambda payload: payload.replace(b'"step":20', b'"step":NaN', 1),
    "half of a surrogate pair": lambda payload: payload.replace(b'"run":"r"', rb'"run":"\ud800"', 1),
    "a letter that is no UTF-8": lambda payload: payload.replace(b'"run":"r"', b'"run":"\xff"', 1),
    "10,000 brackets": lambda payload: payload.replace(b'"step":20', b'"step":' + b"[" * 10_000, 1),
    "keys in a different order": lambda payload: json.dumps(
        dict(reversed(json.loads(payload).items())), separators=(",", ":")
    ).encode(),
    "two statements": lambda payload: payload + payload,
    "no JSON": lambda payload: payload[:-1],
}


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
def test_a_signed_statement_in_another_spelling_is_refused(
    spell: Callable[[bytes], bytes], journal: Journal, statement: Statement
) -> None:
    payload = rfc8785.dumps(statement)
    assert spell(payload) != payload
    with pytest.raises(NotTrusted, match=r"the signed statement is no(t spelled as a receipt is| receipt)"):
        check(journal, sealed_bundle(spell(payload)))


def read_envelope(receipt: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(receipt)["dsseEnvelope"]
    return found


def name_mirrored(receipt: bytes) -> str:
    """Return the other signature that is good wherever this one is: ECDSA has two."""
    first, second = decode_dss_signature(base64.b64decode(read_envelope(receipt)["signatures"][0]["sig"]))
    return base64.b64encode(encode_dss_signature(first, ORDER - second)).decode()


def resign(receipt: bytes, **fields: str) -> bytes:
    """Change fields of the signature."""
    envelope = read_envelope(receipt)
    return bundle(envelope | {"signatures": [envelope["signatures"][0] | fields]})


def swap(receipt: bytes, before: bytes, after: bytes) -> bytes:
    """Change the signed statement, and keep its signature."""
    envelope = read_envelope(receipt)
    payload = base64.b64decode(envelope["payload"])
    assert before in payload
    return bundle(envelope | {"payload": base64.b64encode(payload.replace(before, after, 1)).decode()})


MATCHES = "doesn't match what it signs"
SHAPE = "is no bundle|is not a bundle"
STRANGERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another run": (lambda r: swap(r, b'"run":"r"', b'"run":"q"'), MATCHES),
    "another step": (lambda r: swap(r, b'"step":20', b'"step":21'), MATCHES),
    "another key": (lambda r: sealed_bundle(read_statement(r), OTHER_PRIVATE), "was not made with a trusted key"),
    "another key under the trusted one's id": (
        lambda r: sealed_bundle(read_statement(r), OTHER_PRIVATE, signatures=[
            read_envelope(sealed_bundle(read_statement(r), OTHER_PRIVATE))["signatures"][0]
            | {"keyid": TRUSTED.key_id}
        ]),
        MATCHES,
    ),
    "the signature of another receipt": (
        lambda r: resign(r, sig=read_envelope(sealed_bundle({"other": 1}))["signatures"][0]["sig"]), MATCHES,
    ),
    "the other form of the signature": (
        lambda r: resign(r, sig=name_mirrored(r)), "the one with the higher s",
    ),
    "no signature": (lambda r: bundle(read_envelope(r) | {"signatures": []}), SHAPE),
    "an empty signature": (lambda r: resign(r, sig=""), MATCHES),
    "a signature of zeros": (
        lambda r: resign(r, sig=base64.b64encode(encode_dss_signature(0, 0)).decode()), MATCHES,
    ),
    "a signature that is no base64": (lambda r: resign(r, sig="*"), "is not a DSSE envelope"),
    "a second signature": (
        lambda r: bundle(read_envelope(r) | {"signatures": read_envelope(r)["signatures"] * 2}), SHAPE,
    ),
    "another payload's type": (lambda r: bundle(read_envelope(r) | {"payloadType": "text/plain"}), MATCHES),
    "another bundle's type": (lambda r: bundle(read_envelope(r), mediaType="text/plain"), "its types are 'text/plain'"),
    "an entry of a log": (
        lambda r: bundle(read_envelope(r), verificationMaterial={"publicKey": {"hint": ""}, "tlogEntries": ["x"]}),
        SHAPE,
    ),
    "another field of the bundle": (lambda r: bundle(read_envelope(r), audited="by all"), SHAPE),
    "another field of the envelope": (lambda r: bundle(read_envelope(r) | {"audited": "by all"}), SHAPE),
    "the envelope twice": (
        lambda r: r.replace(b'{"dsseEnvelope":', b'{"dsseEnvelope":{},"dsseEnvelope":', 1), "the bundle is not spelled",
    ),
    "the payload twice": (
        lambda r: r.replace(b'"payload":', b'"payload":"","payload":', 1), "the bundle is not spelled",
    ),
    "a payload in two lines": (
        lambda r: bundle(read_envelope(r) | {"payload": read_envelope(r)["payload"] + "\n"}), "is not a DSSE envelope",
    ),
    "white space": (lambda r: r.replace(b":", b": ", 1), "the bundle is not spelled"),
    "another line": (lambda r: r + b"\n", "the bundle is not spelled"),
    "two receipts": (lambda r: r + r, SHAPE),
    "1,000 fields": (lambda r: r[:-2] + b"," * 1000 + r[-2:], "it has too many values"),
    "half of the file": (lambda r: r[: len(r) // 2], SHAPE),
    "an empty file": (lambda r: b"", SHAPE),
    "an envelope alone": (lambda r: rfc8785.dumps(read_envelope(r)), SHAPE),
    "the signature of a commit": (
        lambda r: bundle(json.loads(SIGNING.sign("r", record_name("commits", 4), b"{}", {"a/b": "0" * 64}))),
        "the signed statement is no receipt",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("forge", "problem"), STRANGERS.values(), ids=STRANGERS)
def test_what_a_stranger_without_the_key_changes_is_refused(
    forge: Callable[[bytes], bytes], problem: str, journal: Journal, receipt: bytes
) -> None:
    with pytest.raises(NotTrusted, match=problem):
        check(journal, forge(receipt))


HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "another id of the key": lambda r: resign(r, keyid="0" * 64),
    "another hint at the key": lambda r: bundle(read_envelope(r)),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_changes_outside_of_the_signed_statement_change_no_statement(
    change: Callable[[bytes], bytes], journal: Journal, receipt: bytes
) -> None:
    changed = change(receipt)
    assert changed != receipt
    assert open_receipt(changed, [TRUSTED]) == open_receipt(receipt, [TRUSTED])


def rewrite_commit(journal: Journal, number: int, **fields: Any) -> None:
    """Replace a commit's record by one whose own hash is right."""
    commit = journal.read_commit(number).model_copy(update=fields)
    path_of(journal, record_name("commits", number)).write_bytes(commit.to_bytes())


def rewrite_attempt(journal: Journal, number: int, **fields: Any) -> None:
    attempt: AttemptRecord = journal.read_attempt(number).model_copy(update=fields)
    path_of(journal, record_name("attempts", number)).write_bytes(attempt.to_bytes())


def path_of(journal: Journal, name: str) -> Path:
    return Path(journal.store.url) / name


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def reopen(journal: Journal) -> Journal:
    """Return the run as another process reads it."""
    return Journal(open_store(journal.store_url), journal.run)


def replace_run(journal: Journal) -> None:
    """Put another run, with other machines, in the run's place, under its name."""
    shutil.rmtree(journal.store.url)
    make_run(Path(journal.store.url).parent, "r", host="elsewhere")


STORES: dict[str, tuple[Callable[[Journal], object], str]] = {
    "a replaced commit": (
        lambda j: rewrite_commit(j, 2, metrics={"avg_loss": 0.0}), "run 'r' has a different commits/00000002.json",
    ),
    "fine-tuned weights": (
        lambda j: rewrite_commit(j, 4, files=[FileRecord(name="checkpoint.safetensors", size_bytes=1, sha256="0" * 64)],
                                 checkpoint_sha256="0" * 64),
        "run 'r' has a different commits/00000004.json",
    ),
    "a commit from another parent": (
        lambda j: rewrite_commit(j, 4, parent=2), "the receipt's chain has commit 3 where the run's chain has commit 4",
    ),
    "a commit from a later parent": (lambda j: rewrite_commit(j, 4, parent=4), "no commits/00000004.json that can be"),
    "a commit with a line more": (
        lambda j: append(path_of(j, "commits/00000001.json"), b"\n"), "has a different commits/00000001.json",
    ),
    "a lost commit": (lambda j: path_of(j, "commits/00000002.json").unlink(), "no commits/00000002.json that can be"),
    "a damaged commit": (
        lambda j: path_of(j, "commits/00000002.json").write_bytes(b"{}"), "no commits/00000002.json that can be",
    ),
    "a lost attempt": (lambda j: path_of(j, "attempts/00000001.json").unlink(), "the run lacks a record"),
    "a dropped drift record": (lambda j: rewrite_attempt(j, 2, lineage={}), "lineage of attempt 2 is not what"),
    "another machine": (lambda j: rewrite_attempt(j, 1, host="third"), "host of attempt 1 is not what"),
    "other code": (lambda j: rewrite_attempt(j, 1, environment={}), "environment of attempt 1 is not what"),
    "a lost audit": (
        lambda j: path_of(j, "audits/00000002-00000001.json").unlink(), "certified_by of commit 2 is not what",
    ),
    "a commit in quarantine": (lambda j: j.quarantine(3, "wrong", 2), "commit 3 is quarantined on the store"),
    "another run in its place": (replace_run, "has a different commits/0000000|host of attempt 1"),
}  # fmt: skip


@pytest.mark.parametrize(("forge", "problem"), STORES.values(), ids=STORES)
def test_a_run_that_was_changed_after_its_receipt_is_refused(
    forge: Callable[[Journal], object], problem: str, journal: Journal, receipt: bytes
) -> None:
    forge(journal)
    with pytest.raises(NotTrusted, match=problem):
        check(reopen(journal), receipt)


def test_the_receipt_of_another_run_is_refused(journal: Journal) -> None:
    other = make_run(Path(journal.store.url).parent, "s")
    with pytest.raises(NotTrusted, match="receipt is about run 's', not 'r'"):
        check(journal, make(other, 4))


def test_the_receipt_of_an_earlier_commit_is_about_that_commit(journal: Journal) -> None:
    opened = open_receipt(make(journal, 2), [TRUSTED])
    assert [each.number for each in check_receipt(journal, opened)] == [1, 2]
    assert opened.chain.commit.commit == 2


def test_later_audits_and_commits_leave_a_receipt_good(journal: Journal, receipt: bytes) -> None:
    third = journal.read_commit(3)
    record_audit(journal, AuditRecord(
        commit=3, number=1, from_commit=2, checkpoint_sha256=third.checkpoint_sha256, notes=[], host="auditor",
        environment={}, created_at=now(),
    ))  # fmt: skip
    journal.publish_commit(make_commit(5, attempt=2))
    check(reopen(journal), receipt)


def test_weights_that_the_run_has_not_trained_are_named(journal: Journal, receipt: bytes) -> None:
    first = journal.read_commit(1)
    told = open_receipt(receipt, [TRUSTED]).chain
    assert describe_untrained(journal, told, first) == ""
    origin = Origin(form="torch", source="tuned.pt", sha256="5" * 64, step=1000)
    imported = first.model_copy(update={"origin": origin})
    assert "commit 1, imported from tuned.pt (torch, step 1000" in describe_untrained(journal, told, imported)
    began = {SETTINGS: IDENTITY | {"init_from": {"run": "tuned", "checkpoint_sha256": "6" * 64}}}
    found = describe_untrained(journal, told.model_copy(update={"settings": began}), first)
    assert found == f"not trained by the run: the weights that it began with, {'6' * 64} of tuned"
    packed = journal.read_run().model_copy(update={"packed": True})
    journal.store.replace("run.json", packed.to_bytes())
    assert "which was unpacked" in describe_untrained(reopen(journal), told, first)


def test_no_receipt_is_made_that_its_audit_would_refuse(journal: Journal) -> None:
    journal.quarantine(3, "damaged", 2)
    for number in (3, 4):  # commit 4 continues commit 3
        with pytest.raises(WrongUse, match="commit 3 of run 'r' is quarantined, so its receipt would never pass"):
            make(journal, number)
    assert make(journal, 2)


@pytest.mark.parametrize("name", [PAYLOAD, METADATA, METRICS])
def test_other_bytes_in_the_signed_checkpoint_are_refused(journal: Journal, receipt: bytes, name: str) -> None:
    file = Path(journal.store.url) / journal.path_of(4) / name
    file.write_bytes(bytes([*file.read_bytes()[:-1], 0]))
    with pytest.raises(CheckpointDamaged, match=f"isn't the checkpoint that the receipt signs: .*{name}"):
        check(reopen(journal), receipt)


def test_a_pruned_checkpoint_is_said_not_to_be_read(journal: Journal, receipt: bytes) -> None:
    journal.store.create(record_name("pruned", 4), b"")
    opened = open_receipt(receipt, [TRUSTED])
    assert "were not compared with commit 4" in check_weights(journal, opened, check_receipt(journal, opened)[-1])


# The signer also holds the store, and rewrites both. SECURITY.md lists these.
UNSEEN: dict[str, Callable[[Journal], object]] = {
    "another machine": lambda j: rewrite_attempt(j, 1, host="dgx-1"),
    "a dropped drift record": lambda j: rewrite_attempt(j, 2, lineage={}),
    "other code on record": lambda j: rewrite_attempt(j, 1, environment={}),
    "an invented certification": lambda j: record_audit(j, AuditRecord(
        commit=1, number=1, from_commit=0, checkpoint_sha256=j.read_commit(1).checkpoint_sha256, notes=[],
        host="laboratory", environment={}, created_at=now(),
    )),
    "a rehearsal that was skipped": lambda j: rewrite_commit(j, 1, rehearsed=[3]),
    "a rehearsal that differed, wiped": lambda j: rewrite_commit(j, 4, inexact=""),
    "another time": lambda j: rewrite_commit(j, 4, created_at="2020-01-01T00:00:00+00:00"),
}  # fmt: skip


@pytest.mark.parametrize("forge", UNSEEN.values(), ids=UNSEEN)
def test_the_records_that_a_signer_rewrites_with_the_store_are_not_caught(
    forge: Callable[[Journal], object], journal: Journal, receipt: bytes
) -> None:
    forge(journal)
    forged = reopen(journal)
    made = make(forged, 4)
    check(forged, made)
    assert read_statement(made) != read_statement(receipt)


@pytest.mark.parametrize(("commits", "chunks", "forged"), [(8, 3, 1), (8, 3, 2), (40, 5, 4)])
def test_a_forged_chunk_passes_as_often_as_the_audit_says(commits: int, chunks: int, forged: int) -> None:
    """The forger has chosen the chunks before the seed is known."""
    line = [make_commit(number) for number in range(1, commits + 1)]
    tries = 2000
    passed = sum(
        all(each.number > forged for each in choose_chunks(line, chunks, seed)) for seed in range(tries)
    )  # fmt: skip
    told = ReceiptAudit.model_construct(audits=[None] * chunks, replayable=commits).chance(forged)
    assert passed / tries == pytest.approx(told, abs=0.05)  # four standard deviations


def test_there_are_as_many_forgeries_as_promised() -> None:
    assert len(LIES) + len(SPELLINGS) + len(STRANGERS) + len(STORES) >= 50


def test_a_record_with_a_number_that_canonical_json_lacks_gets_no_receipt(journal: Journal) -> None:
    name = "attempts/00000001.json"
    record = journal.read_attempt(1)
    changed = record.model_copy(update={"environment": record.environment | {"torch": 2**53}})
    journal.store.replace(name, changed.to_bytes())
    with pytest.raises(RecordDamaged, match=r"the run's records contain an impossible value: 9007199254740992"):
        make(journal, 4)
