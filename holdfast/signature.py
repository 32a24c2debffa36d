"""Optional: who committed a checkpoint. Sign and verify commit records.

Hashes show damage, but whoever may write to the store can make new ones. A signature shows that a holder of the key
committed this record of this run, with these files. It doesn't show that no later commit was taken away.

It is a DSSE envelope around an in-toto Statement, signed with ECDSA P-256 and SHA-256.

Sources: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md,
https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md.
"""

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NoReturn, NotRequired

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # the one that pydantic reads before Python 3.12

from holdfast.canonical import dump_json
from holdfast.errors import ConfigError, NotTrusted, WrongUse

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:holdfast:commit:v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_ENVELOPE_BYTES = 2**20
MAX_KEY_BYTES = 2**16
# Each is tried with each trusted key, so an envelope that is full of them would take minutes.
MAX_SIGNATURES = 16
SHOWN_ID_CHARS = 16
SHOWN_FILES = 3

ECDSA_SHA256 = ec.ECDSA(hashes.SHA256())
# A key that was put where its file's name belongs must not be repeated in an error.
KEY_LIKE = re.compile(r"-----|\n|[A-Za-z0-9+=]{44,}")
SOURCE_HINT = "give the path of a PEM file, or env:NAME for a variable that holds the PEM"
P256_HINT = "holdfast keygen makes one"
CHANGED_HINT = "don't load this checkpoint; continue from a commit whose signature is good"
UNKNOWN_KEY_HINT = "if you know whose key it is, add the public one to the trusted keys"


@dataclass(frozen=True)
class TrustedKey:
    """The public half of a key. ``key_id`` is the SHA-256 (hex) of its DER SubjectPublicKeyInfo."""

    key_id: str
    _public: ec.EllipticCurvePublicKey = field(repr=False)

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether ``signature`` (DER) is this key's over ``message``."""
        try:
            self._public.verify(signature, message, ECDSA_SHA256)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class SigningKey:
    """A private key. ``key_id`` is that of its public half."""

    key_id: str
    _private: ec.EllipticCurvePrivateKey = field(repr=False)

    def sign(self, run: str, record_name: str, record: bytes, files: Mapping[str, str]) -> bytes:
        """The envelope that `verify_signature` accepts for the same arguments and this key.

        Args:
            record_name: as in the run's folder, ``commits/00000007.json``.
            files: SHA-256 (hex) of each file of the checkpoint, by its name in the run's folder.

        Raises:
            WrongUse: there are too many files for an envelope of 1 MiB.
        """
        subjects = _subjects(record_name, record, files)
        statement = dump_json({
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in subjects],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"run": run},
        })  # fmt: skip
        signature = self._private.sign(pae(PAYLOAD_TYPE, statement), ECDSA_SHA256)
        envelope = dump_json({
            "payload": base64.b64encode(statement).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"keyid": self.key_id, "sig": base64.b64encode(signature).decode()}],
        })  # fmt: skip
        if len(envelope) >= MAX_ENVELOPE_BYTES:
            raise WrongUse(f"a checkpoint of {len(files)} files is too large to sign", hint="save it as fewer files")
        return envelope + b"\n"


class _Signature(TypedDict):
    keyid: NotRequired[str]
    sig: str


class _Envelope(TypedDict):
    payload: str
    payloadType: str
    signatures: Annotated[list[_Signature], Field(max_length=MAX_SIGNATURES)]


class _Subject(TypedDict):
    name: str
    digest: dict[str, str]


class _Predicate(TypedDict):
    run: str


class _Statement(TypedDict):
    _type: str
    subject: list[_Subject]
    predicateType: str
    predicate: _Predicate


ENVELOPE = TypeAdapter(_Envelope)
STATEMENT = TypeAdapter(_Statement)


def generate_key(path: Path) -> str:
    """``path`` has a new private key that only its owner may read, ``path`` + ".pub" the public one. Returns its id.

    Raises:
        ConfigError: one of the two files exists, or can't be written.
    """
    private = ec.generate_private_key(ec.SECP256R1())
    secret = private.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    shared = private.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    _create(path, secret, mode=0o600)
    try:
        _create(path.with_name(path.name + ".pub"), shared, mode=0o644)
    except BaseException:
        path.unlink()
        raise
    return _key_id(private.public_key())


def load_signing_key(source: str) -> SigningKey:
    """The private key in the file ``source``, or in the environment variable NAME where it is ``env:NAME``.

    Raises:
        ConfigError: there is none, or it is not an unencrypted ECDSA P-256 key. No part of it is in the message.
    """
    name, data = _read_source(source, "signing key")
    try:
        key = pem.load_pem_private_key(data, password=None)
    except TypeError:
        raise ConfigError(f"{name} is encrypted", hint="give it without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{name} is not a private key in PEM", hint=SOURCE_HINT) from None
    if not (isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1)):
        raise ConfigError(f"{name} is not an ECDSA P-256 key", hint=P256_HINT)
    return SigningKey(_key_id(key.public_key()), key)


def load_trusted_key(source: str) -> TrustedKey:
    """The public key in the file ``source``, or in the environment variable NAME where it is ``env:NAME``.

    Raises:
        ConfigError: there is none, or it is not an ECDSA P-256 public key.
    """
    name, data = _read_source(source, "trusted key")
    if b"PRIVATE KEY" in data:
        raise ConfigError(f"{name} is a private key", hint="give the public one: the file beside it that ends in .pub")
    try:
        key = pem.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{name} is not a public key in PEM", hint=SOURCE_HINT) from None
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)):
        raise ConfigError(f"{name} is not an ECDSA P-256 key", hint=P256_HINT)
    return TrustedKey(_key_id(key), key)


def verify_signature(
    envelope: bytes, run: str, record_name: str, record: bytes, files: Mapping[str, str], trusted: Sequence[TrustedKey]
) -> str:
    """The id of the trusted key that signed exactly this: the run, the record by its name, the files.

    Arguments are as for `SigningKey.sign`. The key ids in the envelope are not signed, and decide nothing.

    Raises:
        NotTrusted: anything else, whatever bytes ``envelope`` has.
    """
    about = f"the signature of {record_name}"
    if len(envelope) > MAX_ENVELOPE_BYTES:
        _refuse(f"{about} is over {MAX_ENVELOPE_BYTES} bytes")
    try:
        read = ENVELOPE.validate_json(envelope)
        payload = _from_base64(read["payload"])
        signatures = [_from_base64(signature["sig"]) for signature in read["signatures"]]
    except ValueError:
        _refuse(f"{about} is not a DSSE envelope of up to {MAX_SIGNATURES} signatures")

    message = pae(read["payloadType"], payload)
    signer = next((key for key in trusted if any(key.has_signed(message, each) for each in signatures)), None)
    if signer is None:
        said = sorted({signature.get("keyid", "") for signature in read["signatures"]})
        if any(key.key_id in said for key in trusted):
            _refuse(f"{about} doesn't match what it signs: one of the two was changed")
        shown = ", ".join(repr(key_id[:SHOWN_ID_CHARS]) for key_id in said)
        _refuse(f"{about} is not by a trusted key; it names {shown or 'no key'}", UNKNOWN_KEY_HINT, key_ids=said)

    try:
        statement = STATEMENT.validate_json(payload)
    except ValueError:
        _refuse(f"{about} is not over a statement about a commit")
    types = (read["payloadType"], statement["_type"], statement["predicateType"])
    if types != (PAYLOAD_TYPE, STATEMENT_TYPE, PREDICATE_TYPE):
        _refuse(f"{about} is not over a statement about a commit: its types are {types}")
    signed_run = statement["predicate"]["run"]
    if signed_run != run:
        _refuse(f"{about} was made for run {signed_run!r}, not {run!r}")

    wanted = _subjects(record_name, record, files)
    signed = [(subject["name"], subject["digest"].get("sha256", "")) for subject in statement["subject"]]
    if signed[:1] != wanted[:1]:
        other = signed[0][0] if signed else "nothing"
        _refuse(f"{about} was made for other bytes" if other == record_name else f"{about} was made for {other!r}")
    if sorted(signed[1:]) != sorted(wanted[1:]):
        names = sorted({name for name, _ in set(signed) ^ set(wanted)})
        _refuse(f"{about} was made for other files: {', '.join(map(repr, names[:SHOWN_FILES]))}", files=names)
    return signer.key_id


def pae(payload_type: str, payload: bytes) -> bytes:
    """The bytes that a DSSE signature is over."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _subjects(record_name: str, record: bytes, files: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(record_name, hashlib.sha256(record).hexdigest()), *sorted(files.items())]


def _from_base64(text: str) -> bytes:
    # DSSE: verifiers accept the standard and the URL-safe alphabet.
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)


def _refuse(message: str, hint: str = CHANGED_HINT, **data: object) -> NoReturn:
    raise NotTrusted(message, hint=hint, **data)


def _key_id(key: ec.EllipticCurvePublicKey) -> str:
    der = key.public_bytes(pem.Encoding.DER, pem.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _read_source(source: str, what: str) -> tuple[str, bytes]:
    name = f"the {what} {'(not shown)' if KEY_LIKE.search(source) else repr(source)}"
    try:
        if source.startswith("env:"):
            return name, os.environ[source.removeprefix("env:")].encode(errors="surrogateescape")
        with Path(source).open("rb") as file:
            return name, file.read(MAX_KEY_BYTES)  # a device has no end
    except KeyError:
        raise ConfigError(f"{name} is not set in the environment", hint=SOURCE_HINT) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a file's name"
        raise ConfigError(f"{name} can't be read: {reason}", hint=SOURCE_HINT) from None


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise ConfigError(f"{path} exists; a key is never overwritten", hint="choose another name") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", hint="choose another folder") from None
    try:
        with os.fdopen(descriptor, "wb") as writer:
            writer.write(data)
            writer.flush()
            os.fsync(descriptor)
    except OSError as error:
        path.unlink()
        raise ConfigError(f"{path} can't be written: {error.strerror}", hint="choose another folder") from None
