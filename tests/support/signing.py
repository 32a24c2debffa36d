"""A commit signed by Holdfast and by an independent implementation, with the keys."""

import base64
import hashlib
import json
from typing import Any

import rfc8785
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from holdfast.journal.signature import SigningKey, TrustedKey, verify_signature

# The order of the group of P-256. Source: FIPS 186-4, D.1.2.3, in decimal there.
ORDER = 115792089210356248762697446949407573529996955224135760342422259061068512044369
RUN = "run"
NAME = "commits/00000007.json"
RECORD = b'{"number": 7}\n'
FILES = {"epoch-0004/rng.json": "22" * 32, "epoch-0004/checkpoint.safetensors": "11" * 32}
# Written by hand from the specification, so that the tests don't depend on Holdfast's own code.
STATEMENT = {
    "_type": "https://in-toto.io/Statement/v1",
    "subject": [
        {"name": NAME, "digest": {"sha256": hashlib.sha256(RECORD).hexdigest()}},
        {"name": "epoch-0004/checkpoint.safetensors", "digest": {"sha256": "11" * 32}},
        {"name": "epoch-0004/rng.json", "digest": {"sha256": "22" * 32}},
    ],
    "predicateType": "urn:holdfast:commit:v1",
    "predicate": {"run": RUN},
}
PAYLOAD_TYPE = "application/vnd.in-toto+json"


def pair(number: int) -> tuple[SigningKey, TrustedKey, ec.EllipticCurvePrivateKey]:
    """Return the two halves of the key that has this private number, and the number as a key of `cryptography`."""
    private = ec.derive_private_key(number, ec.SECP256R1())
    public = private.public_key()
    der = public.public_bytes(pem.Encoding.DER, pem.PublicFormat.SubjectPublicKeyInfo)
    key_id = hashlib.sha256(der).hexdigest()
    return SigningKey(key_id, private), TrustedKey(key_id, public), private


SIGNING, TRUSTED, PRIVATE = pair(2**255 + 7)
OTHER_SIGNING, OTHER_TRUSTED, OTHER_PRIVATE = pair(2**255 + 8)
GOOD = SIGNING.sign(RUN, NAME, RECORD, FILES)


def verify(envelope: bytes, **changed: Any) -> str:
    """Verify the signature of the commit of this module; `changed` replaces arguments."""
    arguments = {"run": RUN, "record_name": NAME, "record": RECORD, "files": FILES, "trusted": [TRUSTED]}
    return verify_signature(envelope, **(arguments | changed))


def sealed(statement: object, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Sign a statement with the trusted key and the independent implementation; return the envelope."""
    payload = statement if isinstance(statement, bytes) else json.dumps(statement, indent=1).encode()
    envelope = Envelope(payload, payload_type, {})
    envelope.sign(CryptoSigner(PRIVATE))
    return json.dumps(envelope.to_dict()).encode()


def urlsafe(text: str) -> bytes:
    """Decode base64 in either of its alphabets."""
    return base64.urlsafe_b64decode(text.replace("+", "-").replace("/", "_"))


def sealed_bundle(statement: object, private: ec.EllipticCurvePrivateKey = PRIVATE, **changed: Any) -> bytes:
    """Sign a statement with the independent implementation; return it as a canonical bundle.

    Args:
        statement: the statement, or its bytes.
        changed: other fields of the envelope.
    """
    payload = statement if isinstance(statement, bytes) else rfc8785.dumps(statement)  # type: ignore[arg-type]
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(private))
    fields = envelope.to_dict()
    for signature in fields["signatures"]:
        r, s = decode_dss_signature(base64.b64decode(signature["sig"]))
        signature["sig"] = base64.b64encode(encode_dss_signature(r, min(s, ORDER - s))).decode()
    return bundle(fields | changed)


def bundle(envelope: dict[str, Any], **changed: Any) -> bytes:
    """Return a canonical bundle with an envelope; `changed` replaces fields of the bundle."""
    fields = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": ""}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }
    return rfc8785.dumps(fields | changed) + b"\n"
