"""Make a receipt, sign it, and open a receipt's file.

The file is a Sigstore bundle with a DSSE envelope around an in-toto statement: a model signature in OpenSSF's form over
the files of the checkpoint, or over the files of an export. The chain of commits is a field of the statement's
predicate.
"""

import base64
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import rfc8785
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from holdfast import __version__
from holdfast.errors import ConfigError, NotTrusted, RecordDamaged, WrongUse
from holdfast.extensions.receipt.chain import Chain, ReceiptPart, describe_line, list_line, read_settings
from holdfast.extensions.receipt.model import BUNDLE_TYPE, MODEL_TYPE, hash_files, state_model
from holdfast.journal import Commit, Journal, now
from holdfast.journal.signature import PAYLOAD_TYPE, SigningKey, TrustedKey, open_envelope
from holdfast.keeping.export import hash_export
from holdfast.provenance.canonical import dump_json

# The name of the chain among the predicate's fields. It is a URI, because in-toto requires a URI for a field that
# the predicate's type doesn't define.
CHAIN_TYPE = "urn:holdfast:receipt:v1"
MAX_RECEIPT_BYTES = 2**28
# The maximum number of values to parse in a bundle. A real bundle has fewer, because its payload is one text. Further
# values would take 60 bytes of memory for each byte or two of the file.
MOST_VALUES = 64


class _Hint(ReceiptPart):
    hint: str


class _Material(ReceiptPart):
    key: _Hint = Field(alias="publicKey")
    log: list[str] = Field(alias="tlogEntries", max_length=0)


class _Signature(ReceiptPart):
    keyid: str
    sig: str


class _Envelope(ReceiptPart):
    payload: str
    payload_type: str = Field(alias="payloadType")
    signatures: list[_Signature] = Field(min_length=1, max_length=1)


class _Bundle(ReceiptPart):
    media_type: str = Field(alias="mediaType")
    material: _Material = Field(alias="verificationMaterial")
    envelope: _Envelope = Field(alias="dsseEnvelope")


class _Digest(ReceiptPart):
    sha256: str


class _Subject(ReceiptPart):
    name: str
    digest: _Digest


class _Resource(ReceiptPart):
    name: str
    algorithm: str
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Predicate(ReceiptPart):
    serialization: dict[str, Any]
    resources: list[_Resource] = Field(min_length=1)
    chain: Chain = Field(alias=CHAIN_TYPE)


class _Statement(ReceiptPart):
    type: str = Field(alias="_type")
    subject: list[_Subject] = Field(min_length=1, max_length=1)
    predicate_type: str = Field(alias="predicateType")
    predicate: _Predicate


BUNDLE, STATEMENT = TypeAdapter(_Bundle), TypeAdapter(_Statement)


@dataclass(frozen=True)
class Receipt:
    """A receipt whose signature is good.

    Attributes:
        key_id: the id of the key that has signed the receipt.
        files: the SHA-256 of each signed file, by its path in the model's folder.
    """

    key_id: str
    files: dict[str, str]
    chain: Chain


@dataclass(frozen=True)
class Told:
    """The content of a receipt before it is signed.

    Attributes:
        name: the name of the model's file or folder.
        files: the SHA-256 of each of the model's files, by the file's path in the folder.
        others: the names of the signed files that `export` didn't make from the run.
    """

    name: str
    files: dict[str, str]
    others: list[str]
    chain: Chain


def describe_commit(journal: Journal, commit: Commit, model: Path | None = None, part: str = "") -> Told:
    """Return the content of a receipt about a commit.

    Args:
        model: the exported file or folder to sign; None for the checkpoint itself.
        part: the part of the model whose weights were exported; see `holdfast.keeping.export.export`.

    Raises:
        ConfigError: no file of the model contains the commit's weights.
        WrongUse: the settings of a commit were lost, or a commit of the chain is quarantined.
        NameMissing, RecordDamaged: a record of the chain is lost or damaged.
    """
    journal.read_run()
    line = list_line(journal, commit.number)
    if quarantined := {each.number for each, _ in line} & {*journal.numbers("quarantine")}:
        raise WrongUse(
            f"commit {min(quarantined)} of run {journal.run!r} is quarantined, so its receipt would never pass "
            "holdfast verify",
            hint="holdfast verify lists the commits that count",
        )
    links, attempts = describe_line(journal, line)
    chain = Chain(
        run=journal.run,
        holdfast=__version__,
        created_at=now(),
        chain=links,
        settings=read_settings(journal, line),
        attempts=attempts,
        exported=None if model is None else part,
    )
    if model is None:
        return Told(commit.path, list_own_files(commit), [], chain)
    files = hash_files(model)
    others = find_others(journal, commit, files, part)
    if others is None:
        raise ConfigError(
            f"no file in {model} contains the weights of {f'{part} in ' if part else ''}commit {commit.number}",
            hint="sign files that holdfast export wrote as safetensors or transformers, with the same --part",
        )
    return Told(model.resolve().name, files, others, chain)


def seal_receipt(told: Told, key: SigningKey) -> bytes:
    """Return a signed receipt.

    Raises:
        RecordDamaged: a record of the run has a number that canonical JSON lacks.
    """
    hint = hashlib.sha256(key.public_pem).hexdigest()
    return dump_json({
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": key.seal(_state(told.name, told.files, told.chain)),
    }) + b"\n"  # fmt: skip


def open_receipt(data: bytes, trusted: Sequence[TrustedKey]) -> Receipt:
    """Return a receipt that one of the keys has signed.

    A receipt has exactly one valid spelling, so that all programs read the same content: a key that is given twice, an
    unknown field or a number in a different form is refused.

    Raises:
        NotTrusted: none of the keys has signed the file, or it is no receipt.
    """
    if len(data) > MAX_RECEIPT_BYTES:
        refuse_receipt(f"the file has over {MAX_RECEIPT_BYTES} bytes")
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        refuse_receipt("the file is no bundle: it has too many values")
    bundle = _parse(BUNDLE, data, "the file is not a bundle that holdfast receipt has written")
    key_id, payload_type, payload = open_envelope(
        dump_json(_dump(bundle.envelope)), trusted, "the signature of the receipt", is_lower=True
    )
    if (bundle.media_type, payload_type) != (BUNDLE_TYPE, PAYLOAD_TYPE):
        refuse_receipt(f"the file is no bundle: its types are {bundle.media_type!r} and {payload_type!r}")
    texts = [bundle.envelope.payload, *(each.sig for each in bundle.envelope.signatures)]
    if dump_json(_dump(bundle)) + b"\n" != data or not all(map(_is_plain_base64, texts)):
        refuse_receipt("the bundle is not spelled as canonical JSON")
    statement = _parse(STATEMENT, payload, "the signed statement is no receipt")
    if statement.predicate_type != MODEL_TYPE:
        refuse_receipt(f"the signed statement is no receipt: its type is {statement.predicate_type!r}")
    predicate = statement.predicate
    files = {each.name: each.digest for each in predicate.resources}
    if not _is_spelled(statement.subject[0].name, files, predicate.chain, payload):
        refuse_receipt("the signed statement is not spelled as a receipt is, in canonical JSON")
    return Receipt(key_id, files, predicate.chain)


def list_own_files(commit: Commit) -> dict[str, str]:
    """Return the SHA-256 of each file of a commit's checkpoint, by its name in the checkpoint's folder."""
    return {file.name: file.sha256 for file in commit.files}


def find_others(journal: Journal, commit: Commit, files: dict[str, str], part: str) -> list[str] | None:
    """Return the names of the given files that `export` doesn't write for a commit; None if no file has the weights.

    Raises:
        CheckpointDamaged: a file of the checkpoint is missing or differs from its commit.
        ConfigError: there is no such part.
    """
    weights, configs = hash_export(journal, commit, part)
    if weights not in files.values():
        return None
    return [name for name, sha256 in files.items() if sha256 not in {weights, *configs}]


def refuse_receipt(problem: str) -> NoReturn:
    """Raise NotTrusted, with the reason why a receipt can't be trusted."""
    raise NotTrusted(
        f"the receipt can't be trusted: {problem}",
        hint="don't trust this checkpoint; ask the person who signed the receipt",
    )


def _state(name: str, files: dict[str, str], chain: Chain) -> bytes:
    try:
        return dump_json(state_model(name, files, **{CHAIN_TYPE: chain.model_dump(mode="json")}))
    except rfc8785.CanonicalizationError as error:
        raise RecordDamaged(
            f"no receipt can be written, because the run's records contain an impossible value: {error}"
        ) from None


def _is_plain_base64(text: str) -> bool:
    """Return whether a text is standard base64, in the only spelling of its bytes. `open_envelope` accepts more."""
    with contextlib.suppress(ValueError):
        return base64.b64encode(base64.b64decode(text, validate=True)).decode() == text
    return False


def _is_spelled(name: str, files: dict[str, str], chain: Chain, payload: bytes) -> bool:
    """Return whether a payload is the canonical JSON of a statement."""
    try:
        return _state(name, files, chain) == payload
    except ValueError:  # a number that canonical JSON can't represent
        return False


def _parse(form: TypeAdapter[Any], data: bytes, problem: str) -> Any:
    try:
        return form.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        refuse_receipt(f"{problem}: {where + ': ' if where else ''}{first['msg']}")


def _dump(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True)
