"""Other implementations verify our signatures, and we verify theirs."""

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey

from holdfast.journal.signature import TrustedKey, generate_key, load_signing_key, load_trusted_key, pae
from tests.support.signing import FILES, GOOD, NAME, PRIVATE, RECORD, RUN, SIGNING, STATEMENT, TRUSTED, sealed, verify

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")


def test_a_signature_by_another_implementation_verifies() -> None:
    assert verify(sealed(STATEMENT)) == TRUSTED.key_id
    assert verify(sealed(STATEMENT | {"later": 1})) == TRUSTED.key_id


def test_another_implementation_verifies_our_signature() -> None:
    key = SSlibKey.from_crypto(PRIVATE.public_key(), keyid=SIGNING.key_id)
    assert list(Envelope.from_dict(json.loads(GOOD)).verify([key], 1)) == [SIGNING.key_id]
    tampered = Envelope.from_dict(json.loads(GOOD))
    tampered.payload += b" "
    with pytest.raises(VerificationError):
        tampered.verify([key], 1)


def test_both_alphabets_of_base64_are_read() -> None:
    fields = json.loads(GOOD)
    while not set(fields["signatures"][0]["sig"]) & set("+/"):
        fields = json.loads(SIGNING.sign(RUN, NAME, RECORD, FILES))
    for signature in fields["signatures"]:
        signature["sig"] = signature["sig"].replace("+", "-").replace("/", "_")
    assert verify(json.dumps(fields).encode()) == TRUSTED.key_id


def test_the_vector_of_the_specification() -> None:
    """Source: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md#test-vectors"""
    message = pae("http://example.com/HelloWorld", b"hello world")
    assert message == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    x = 46950820868899156662930047687818585632848591499744589407958293238635476079160
    y = 5640078356564379163099075877009565129882514886557779369047442380624545832820
    raw = base64.b64decode("A3JqsQGtVsJ2O2xqrI5IcnXip5GToJ3F+FnZ+O88SjtR6rDAajabZKciJTfUiHqJPcIAriEGAHTVeCUjW2JIZA==")
    key = TrustedKey("", ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key())
    assert key.has_signed(message, encode_dss_signature(int.from_bytes(raw[:32]), int.from_bytes(raw[32:])))
    assert not key.has_signed(message, raw)


def test_lengths_are_of_bytes() -> None:
    assert pae("é", "ü".encode()) == b"DSSEv1 2 \xc3\xa9 2 \xc3\xbc"


def openssl(*arguments: object) -> str:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=True)
    return done.stdout


@needs_openssl
def test_openssl_verifies_our_signature(tmp_path: Path) -> None:
    generate_key(tmp_path / "key")
    envelope = json.loads(load_signing_key(str(tmp_path / "key")).sign(RUN, NAME, RECORD, FILES))
    payload = base64.b64decode(envelope["payload"])
    (tmp_path / "pae").write_bytes(b"DSSEv1 28 application/vnd.in-toto+json %d %b" % (len(payload), payload))
    (tmp_path / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    asked = ("dgst", "-sha256", "-verify", tmp_path / "key.pub", "-signature", tmp_path / "sig", tmp_path / "pae")
    assert "Verified OK" in openssl(*asked)
    (tmp_path / "pae").write_bytes(b"DSSEv1 29 application/vnd.in-toto+json %d %b" % (len(payload), payload))
    with pytest.raises(subprocess.CalledProcessError):
        openssl(*asked)


@needs_openssl
def test_a_key_from_openssl_is_a_key(tmp_path: Path) -> None:
    private, public = tmp_path / "key", tmp_path / "key.pub"
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    openssl("pkey", "-in", private, "-pubout", "-outform", "DER", "-out", tmp_path / "der")
    key_id = hashlib.sha256((tmp_path / "der").read_bytes()).hexdigest()
    trusted = load_trusted_key(str(public))
    envelope = load_signing_key(str(private)).sign(RUN, NAME, RECORD, FILES)
    assert verify(envelope, trusted=[trusted]) == trusted.key_id == key_id
