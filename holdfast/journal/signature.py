"""Optional signatures of commits, which prove who committed a checkpoint.

Hashes reveal damage, but anyone who can write to the store can also write new hashes. A signature proves that a holder
of the key committed this record of this run, with these files. It doesn't prove that no later commit was deleted.

A signature is a DSSE envelope around an in-toto Statement, signed with ECDSA P-256 and SHA-256.

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
from typing import Annotated, Any, NoReturn, NotRequired

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # before Python 3.12 pydantic needs this TypedDict

from holdfast.errors import ConfigError, NotTrusted, WrongUse
from holdfast.provenance.canonical import dump_json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:holdfast:commit:v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_ENVELOPE_BYTES = 2**20
MAX_KEY_BYTES = 2**16
# The number of signatures is bounded, because each is tried with each trusted key: an envelope of 1 MiB full of
# signatures would take minutes.
MAX_SIGNATURES = 16
SHOWN_ID_CHARS = 16
SHOWN_FILES = 3

ECDSA_SHA256 = ec.ECDSA(hashes.SHA256())
# The order of the curve's group. With (r, s), (r, ORDER - s) is a signature of the same message by the same key, which
# anyone can compute. Holdfast writes the one with the lower s. Source: SEC 1, 4.1.3, and RFC 6979, for the order.
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# Matches a private key that a user gave instead of the name of its file. An error message must not show the key.
KEY_LIKE = re.compile(r"-----|\n|[A-Za-z0-9+=]{44,}")
SOURCE_HINT = "give the path of a PEM file, or env:NAME for a variable that holds the PEM"
P256_HINT = "holdfast keygen makes such a key"
CHANGED_HINT = "don't load this checkpoint; continue from a commit with a valid signature"
UNKNOWN_KEY_HINT = "if you know whose key signed it, add the public key to the trusted keys"


@dataclass(frozen=True)
class TrustedKey:
    """The public half of a key. ``key_id`` is the SHA-256 (hex) of its DER SubjectPublicKeyInfo."""

    key_id: str
    _public: ec.EllipticCurvePublicKey = field(repr=False)

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Return whether ``signature`` (DER) is this key's signature of ``message``."""
        try:
            self._public.verify(signature, message, ECDSA_SHA256)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class SigningKey:
    """A private key. ``key_id`` is the id of its public key."""

    key_id: str
    _private: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def trusted(self) -> TrustedKey:
        """The public half of this key."""
        return TrustedKey(self.key_id, self._private.public_key())

    def sign(self, run: str, record_name: str, record: bytes, files: Mapping[str, str]) -> bytes:
        """Sign a commit's record and files. Return the envelope, which `verify_signature` checks.

        Args:
            record_name: the record's name in the run's folder, such as ``commits/00000007.json``.
            record: the record's bytes.
            files: the SHA-256 (hex) of each file of the checkpoint, by its name in the run's folder.

        Raises:
            WrongUse: the checkpoint has too many files for an envelope of 1 MiB.
        """
        subjects = _subjects(record_name, record, files)
        statement = dump_json({
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in subjects],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"run": run},
        })  # fmt: skip
        envelope = dump_json(self.seal(statement)) + b"\n"
        if len(envelope) > MAX_ENVELOPE_BYTES:
            raise WrongUse(
                f"the checkpoint has {len(files)} files: their list is over 1 MiB and can't be signed",
                hint="raise checkpoint.part_bytes, so that checkpoints have fewer files",
            )
        return envelope

    def seal(self, statement: bytes) -> dict[str, Any]:
        """Sign an in-toto statement, given as JSON. Return a DSSE envelope's fields, which `open_envelope` reads."""
        signature = _lower(self._private.sign(pae(PAYLOAD_TYPE, statement), ECDSA_SHA256))
        return {
            "payload": base64.b64encode(statement).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"keyid": self.key_id, "sig": base64.b64encode(signature).decode()}],
        }

    @property
    def public_pem(self) -> bytes:
        """The public key in the PEM format."""
        return _to_pem(self._private.public_key())


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
    """Write a new private key to ``path``, readable by its owner alone, and the public key to ``path`` + ".pub".

    Returns:
        The key's id.

    Raises:
        ConfigError: one of the two files already exists, or can't be written.
    """
    private = ec.generate_private_key(ec.SECP256R1())
    secret = private.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    shared = _to_pem(private.public_key())
    _create(path, secret, mode=0o600)
    try:
        _create(path.with_name(path.name + ".pub"), shared, mode=0o644)
    except BaseException:
        path.unlink()
        raise
    return _key_id(private.public_key())


def load_signing_key(source: str) -> SigningKey:
    """Load the private key from the file ``source``, or for ``env:NAME`` from the environment variable NAME.

    Raises:
        ConfigError: the key is missing, or is not an unencrypted ECDSA P-256 key. The message shows no part of it.
    """
    name, data = _read_source(source, "signing key")
    try:
        key = pem.load_pem_private_key(data, password=None)
    except TypeError:
        raise ConfigError(f"{name} is encrypted", hint="give the key without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{name} is not a private key in PEM", hint=SOURCE_HINT) from None
    if not (isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1)):
        raise ConfigError(f"{name} is not an ECDSA P-256 key", hint=P256_HINT)
    return SigningKey(_key_id(key.public_key()), key)


def load_trusted_key(source: str) -> TrustedKey:
    """Load the public key from the file ``source``, or for ``env:NAME`` from the environment variable NAME.

    Raises:
        ConfigError: the key is missing, or is not an ECDSA P-256 public key.
    """
    name, data = _read_source(source, "trusted key")
    if b"PRIVATE KEY" in data:
        raise ConfigError(
            f"{name} is a private key", hint="give the public key: the file of the same name that ends in .pub"
        )
    try:
        key = pem.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{name} is not a public key in PEM", hint=SOURCE_HINT) from None
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)):
        raise ConfigError(f"{name} is not an ECDSA P-256 key", hint=P256_HINT)
    return TrustedKey(_key_id(key), key)


def verify_signature(
    envelope: bytes, run: str, record_name: str, record: bytes, files: Mapping[str, str],
    trusted: Sequence[TrustedKey], *, is_lower: bool = False,
) -> str:  # fmt: skip
    """Check that a trusted key signed exactly this run, record and these files; return the key's id.

    The other arguments are those of `SigningKey.sign`. The key ids in the envelope are unsigned, so the check ignores
    them.

    Args:
        is_lower: see `open_envelope`.

    Raises:
        NotTrusted: no trusted key signed this record with these files, or ``envelope`` is not an envelope.
    """
    about = f"the signature of {record_name}"
    if len(envelope) > MAX_ENVELOPE_BYTES:
        _refuse(f"{about} is over {MAX_ENVELOPE_BYTES} bytes")
    key_id, payload_type, payload = open_envelope(envelope, trusted, about, is_lower=is_lower)
    try:
        statement = STATEMENT.validate_json(payload)
    except ValueError:
        _refuse(f"{about} is not over a statement about a commit")
    types = (payload_type, statement["_type"], statement["predicateType"])
    if types != (PAYLOAD_TYPE, STATEMENT_TYPE, PREDICATE_TYPE):
        _refuse(f"{about} is not over a statement about a commit: its types are {types}")
    signed_run = statement["predicate"]["run"]
    if signed_run != run:
        _refuse(f"{about} was made for run {signed_run!r}, not {run!r}")

    wanted = _subjects(record_name, record, files)
    signed = [(subject["name"], subject["digest"].get("sha256", "")) for subject in statement["subject"]]
    if signed[:1] != wanted[:1]:
        other = signed[0][0] if signed else "nothing"
        _refuse(f"{about} was made for different bytes" if other == record_name else f"{about} was made for {other!r}")
    if sorted(signed[1:]) != sorted(wanted[1:]):
        names = sorted({name for name, _ in set(signed) ^ set(wanted)})
        _refuse(f"{about} was made for other files: {', '.join(map(repr, names[:SHOWN_FILES]))}", files=names)
    return key_id


def open_envelope(
    envelope: bytes, trusted: Sequence[TrustedKey], about: str, *, is_lower: bool
) -> tuple[str, str, bytes]:
    """Return the id of the trusted key that signed a DSSE envelope, the payload's type and the payload.

    Args:
        about: the name of the signature, for an error.
        is_lower: whether to refuse a signature with the higher s. `SigningKey` never writes it, but earlier versions
            did.

    Raises:
        NotTrusted: no trusted key signed the payload, or ``envelope`` is not an envelope.
    """
    try:
        read = ENVELOPE.validate_json(envelope)
        payload = _from_base64(read["payload"])
        signatures = [_from_base64(signature["sig"]) for signature in read["signatures"]]
    except ValueError:
        _refuse(f"{about} is not a DSSE envelope of up to {MAX_SIGNATURES} signatures")
    if is_lower and any(each != _lower(each) for each in signatures):
        _refuse(f"{about} is not spelled as Holdfast spells it: of its two forms it is the one with the higher s")
    message = pae(read["payloadType"], payload)
    signer = next((key for key in trusted if any(key.has_signed(message, each) for each in signatures)), None)
    if signer is None:
        said = sorted({signature.get("keyid", "") for signature in read["signatures"]})
        if any(key.key_id in said for key in trusted):
            _refuse(f"{about} doesn't match what it signs: one of the two was changed")
        shown = ", ".join(repr(key_id[:SHOWN_ID_CHARS]) for key_id in said)
        _refuse(
            f"{about} was not made with a trusted key; it names {shown or 'no key'}", UNKNOWN_KEY_HINT, key_ids=said
        )
    return signer.key_id, read["payloadType"], payload


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes over which a DSSE signature is made (DSSE's pre-authentication encoding)."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _lower(signature: bytes) -> bytes:
    """Return the form of a DER signature that has the lower s. Return bytes that aren't such a signature unchanged."""
    try:
        r, s = decode_dss_signature(signature)
    except ValueError:
        return signature
    return encode_dss_signature(r, min(s, ORDER - s)) if 0 < s < ORDER else signature


def _subjects(record_name: str, record: bytes, files: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(record_name, hashlib.sha256(record).hexdigest()), *sorted(files.items())]


def _from_base64(text: str) -> bytes:
    # DSSE requires verifiers to accept both the standard and the URL-safe alphabet.
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)


def _refuse(message: str, hint: str = CHANGED_HINT, **data: object) -> NoReturn:
    raise NotTrusted(message, hint=hint, **data)


def _to_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)


def _key_id(key: ec.EllipticCurvePublicKey) -> str:
    der = key.public_bytes(pem.Encoding.DER, pem.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _read_source(source: str, kind: str) -> tuple[str, bytes]:
    name = f"the {kind} {'(not shown)' if KEY_LIKE.search(source) else repr(source)}"
    try:
        if source.startswith("env:"):
            return name, os.environ[source.removeprefix("env:")].encode(errors="surrogateescape")
        with Path(source).open("rb") as file:
            return name, file.read(MAX_KEY_BYTES)  # bounded, because reading a device may never end
    except KeyError:
        raise ConfigError(f"{name} is not set in the environment", hint=SOURCE_HINT) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a file's name"
        raise ConfigError(f"{name} can't be read: {reason}", hint=SOURCE_HINT) from None


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise ConfigError(
            f"the key file {path} exists, and keygen never overwrites a key", hint="choose another name"
        ) from None
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
