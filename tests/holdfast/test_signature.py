"""Who committed a checkpoint: what a signature is good for, and that nothing else passes for one."""

import base64
import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import example, given
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from holdfast.errors import ConfigError, NotTrusted, WrongUse
from holdfast.signature import (
    MAX_ENVELOPE_BYTES,
    SigningKey,
    TrustedKey,
    generate_key,
    load_signing_key,
    load_trusted_key,
    pae,
    verify_signature,
)

RUN = "run"
NAME = "commits/00000007.json"
RECORD = b'{"number": 7}\n'
FILES = {"epoch-0004/rng.json": "22" * 32, "epoch-0004/checkpoint.safetensors": "11" * 32}

# Written by hand from the specification, so that the other implementations don't lean on ours.
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

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")


def pair(number: int) -> tuple[SigningKey, TrustedKey, ec.EllipticCurvePrivateKey]:
    private = ec.derive_private_key(number, ec.SECP256R1())
    public = private.public_key()
    der = public.public_bytes(pem.Encoding.DER, pem.PublicFormat.SubjectPublicKeyInfo)
    key_id = hashlib.sha256(der).hexdigest()
    return SigningKey(key_id, private), TrustedKey(key_id, public), private


SIGNING, TRUSTED, PRIVATE = pair(2**255 + 7)
OTHER_SIGNING, OTHER_TRUSTED, _ = pair(2**255 + 8)
GOOD = SIGNING.sign(RUN, NAME, RECORD, FILES)


def verify(envelope: bytes, **changed: Any) -> str:
    arguments = {"run": RUN, "record_name": NAME, "record": RECORD, "files": FILES, "trusted": [TRUSTED]}
    return verify_signature(envelope, **(arguments | changed))


def sealed(statement: object, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """An envelope, made by the independent implementation, that the trusted key has signed."""
    payload = statement if isinstance(statement, bytes) else json.dumps(statement, indent=1).encode()
    envelope = Envelope(payload, payload_type, {})
    envelope.sign(CryptoSigner(PRIVATE))
    return json.dumps(envelope.to_dict()).encode()


def decoded(envelope: bytes) -> tuple[object, ...]:
    fields = json.loads(envelope)
    signatures = [urlsafe(signature["sig"]) for signature in fields["signatures"]]
    return urlsafe(fields["payload"]), fields["payloadType"], signatures


def urlsafe(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.replace("+", "-").replace("/", "_"))


def private_pem(key: Any, password: bytes | None = None) -> bytes:
    encryption = pem.BestAvailableEncryption(password) if password else pem.NoEncryption()
    return key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, encryption)


def public_pem(key: Any) -> bytes:
    return key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)


# ---- what a signature says


def test_the_id_of_the_key_that_signed_is_returned() -> None:
    assert verify(GOOD, trusted=[OTHER_TRUSTED, TRUSTED]) == TRUSTED.key_id


def test_the_envelope_is_canonical_json_around_the_statement() -> None:
    assert GOOD.endswith(b"}\n")
    fields = json.loads(GOOD)
    assert json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n" == GOOD
    payload = base64.b64decode(fields["payload"])
    assert json.loads(payload) == STATEMENT
    assert payload == json.dumps(STATEMENT, sort_keys=True, separators=(",", ":")).encode()
    assert fields["payloadType"] == PAYLOAD_TYPE
    assert [signature["keyid"] for signature in fields["signatures"]] == [SIGNING.key_id]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"run": "other"}, "was made for run 'run', not 'other'"),
        ({"record_name": "commits/00000008.json"}, "was made for 'commits/00000007.json'"),
        ({"record": RECORD + b" "}, "was made for other bytes"),
        ({"files": FILES | {"epoch-0004/rng.json": "33" * 32}}, "was made for other files: 'epoch-0004/rng.json'"),
        ({"files": FILES | {"epoch-0004/more": "33" * 32}}, "was made for other files: 'epoch-0004/more'"),
        ({"files": {"epoch-0004/rng.json": "22" * 32}}, "other files: 'epoch-0004/checkpoint.safetensors'"),
        ({"files": {}}, "was made for other files"),
        ({"trusted": [OTHER_TRUSTED]}, f"not by a trusted key; it names '{TRUSTED.key_id[:16]}'"),
        ({"trusted": []}, "not by a trusted key"),
    ],
)
def test_it_is_good_for_nothing_else(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(NotTrusted, match=message) as caught:
        verify(GOOD, **changed)
    assert caught.value.hint


def test_swapped_digests_are_refused() -> None:
    first, second = FILES
    with pytest.raises(NotTrusted, match="other files"):
        verify(GOOD, files={first: FILES[second], second: FILES[first]})


def test_a_file_is_no_stand_in_for_the_record() -> None:
    """The same names and digests, with the record and a file in each other's place."""
    content = b"a file"
    envelope = SIGNING.sign(RUN, "a", content, {NAME: hashlib.sha256(RECORD).hexdigest()})
    with pytest.raises(NotTrusted, match="was made for 'a'"):
        verify(envelope, files={"a": hashlib.sha256(content).hexdigest()})


def test_a_payload_of_another_commit_under_a_good_signature_is_refused() -> None:
    fields = json.loads(GOOD)
    fields["payload"] = json.loads(SIGNING.sign(RUN, "commits/00000008.json", RECORD, FILES))["payload"]
    with pytest.raises(NotTrusted, match="doesn't match what it signs"):
        verify(json.dumps(fields).encode(), record_name="commits/00000008.json")


def test_the_key_id_in_the_envelope_decides_nothing() -> None:
    forged = json.loads(OTHER_SIGNING.sign(RUN, NAME, RECORD, FILES))
    forged["signatures"][0]["keyid"] = TRUSTED.key_id
    with pytest.raises(NotTrusted, match="doesn't match what it signs"):
        verify(json.dumps(forged).encode())

    unnamed = json.loads(GOOD)
    del unnamed["signatures"][0]["keyid"]
    assert verify(json.dumps(unnamed).encode()) == TRUSTED.key_id
    with pytest.raises(NotTrusted, match="not by a trusted key"):
        verify(json.dumps(unnamed).encode(), trusted=[OTHER_TRUSTED])


def test_any_of_several_signatures_is_enough() -> None:
    fields, other = json.loads(GOOD), json.loads(OTHER_SIGNING.sign(RUN, NAME, RECORD, FILES))
    fields["signatures"] = other["signatures"] * 15 + fields["signatures"]
    assert verify(json.dumps(fields).encode()) == TRUSTED.key_id
    fields["signatures"] *= 2
    with pytest.raises(NotTrusted, match="not a DSSE envelope of up to 16 signatures"):
        verify(json.dumps(fields).encode())
    fields["signatures"] = []
    with pytest.raises(NotTrusted, match="it names no key"):
        verify(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("statement", "payload_type", "message"),
    [
        (STATEMENT | {"_type": "https://in-toto.io/Statement/v0.1"}, PAYLOAD_TYPE, "Statement/v0.1"),
        (STATEMENT | {"predicateType": "https://slsa.dev/provenance/v1"}, PAYLOAD_TYPE, "slsa.dev"),
        (STATEMENT, "application/json", "'application/json'"),
        (STATEMENT | {"subject": []}, PAYLOAD_TYPE, "was made for 'nothing'"),
        (STATEMENT | {"subject": [*STATEMENT["subject"], STATEMENT["subject"][1]]}, PAYLOAD_TYPE, "other files"),
        (STATEMENT | {"subject": [{"name": NAME, "digest": {"sha512": ""}}]}, PAYLOAD_TYPE, "other bytes"),
        (STATEMENT | {"predicate": {}}, PAYLOAD_TYPE, "not over a statement about a commit"),
        (b"\xff", PAYLOAD_TYPE, "not over a statement about a commit"),
        (b"[" * 100_000, PAYLOAD_TYPE, "not over a statement about a commit"),
    ],
)
def test_other_things_that_the_key_signed_are_refused(statement: object, payload_type: str, message: str) -> None:
    with pytest.raises(NotTrusted, match=message):
        verify(sealed(statement, payload_type))


# ---- other implementations


def test_what_another_implementation_signed_is_good() -> None:
    assert verify(sealed(STATEMENT)) == TRUSTED.key_id
    assert verify(sealed(STATEMENT | {"later": 1})) == TRUSTED.key_id


def test_another_implementation_finds_ours_good() -> None:
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
def test_openssl_finds_ours_good(tmp_path: Path) -> None:
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


# ---- whatever bytes there are


def same_or_refused(envelope: bytes) -> None:
    try:
        verify(envelope)
    except NotTrusted:
        return
    assert decoded(envelope) == decoded(GOOD)


def test_every_flipped_bit_is_refused_or_changes_nothing() -> None:
    for place in range(len(GOOD)):
        for bit in range(8):
            same_or_refused(GOOD[:place] + bytes([GOOD[place] ^ 1 << bit]) + GOOD[place + 1 :])


@given(place=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), cut=st.integers(0, 2))
def test_a_byte_put_in_replaced_or_taken_out_is_refused_or_changes_nothing(place: int, byte: int, cut: int) -> None:
    same_or_refused(GOOD[:place] + bytes([byte]) * (cut < 2) + GOOD[place + (cut > 0) :])


@given(st.binary())
@example(b"")
@example(b"{}")
@example(b"null")
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"9" * 100_000)
@example(b"\xff\xfe{\x00}\x00")
@example(GOOD[:-2])
@example(GOOD + GOOD)
@example(GOOD.replace(b'"payload"', b'"unknown"'))
@example(GOOD.replace(b'"payloadType"', b'"unknown"'))
@example(GOOD.replace(b'"signatures"', b'"unknown"'))
@example(GOOD.replace(b'"sig"', b'"unknown"'))
@example(GOOD.replace(b'"sig":"', b'"sig":"='))
@example(GOOD.replace(b'"sig":"', b'"sig":"\\u00e9'))
@example(GOOD.replace(b"application", b"\\ud800"))
def test_anything_else_is_refused(envelope: bytes) -> None:
    with pytest.raises(NotTrusted):
        verify(envelope)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(["payload", "payloadType", "signatures", "keyid", "sig"]), JSON)
def test_a_value_of_another_type_is_refused_or_changes_nothing(name: str, value: object) -> None:
    fields = json.loads(GOOD)
    (fields if name in fields else fields["signatures"][0])[name] = value
    same_or_refused(json.dumps(fields).encode())


@given(st.sampled_from([*STATEMENT, "run", "subject.0", "name", "digest", "sha256"]), JSON)
def test_a_signed_statement_with_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    statement = json.loads(json.dumps(STATEMENT))
    first = statement["subject"][0]
    places = {"run": statement["predicate"], "name": first, "digest": first, "sha256": first["digest"]}
    if name == "subject.0":
        statement["subject"][0] = value
    else:
        places.get(name, statement)[name] = value
    with pytest.raises(NotTrusted):
        verify(sealed(statement))


def test_an_envelope_is_bounded() -> None:
    filled = GOOD + b" " * (MAX_ENVELOPE_BYTES - len(GOOD))
    assert verify(filled) == TRUSTED.key_id
    with pytest.raises(NotTrusted, match="over 1048576 bytes"):
        verify(filled + b" ")


def test_what_can_be_signed_can_be_verified() -> None:
    def files(count: int) -> dict[str, str]:
        return {f"epoch-0004/{number:08d}": "00" * 32 for number in range(count)}

    with pytest.raises(WrongUse, match="a checkpoint of 7000 files is too large to sign"):
        SIGNING.sign(RUN, NAME, RECORD, files(7000))
    assert verify(SIGNING.sign(RUN, NAME, RECORD, files(6000)), files=files(6000)) == TRUSTED.key_id


# ---- keys


@pytest.mark.parametrize(("mask", "modes"), [(0o022, [0o600, 0o644]), (0o077, [0o600, 0o600])])
def test_a_new_key_is_two_files(tmp_path: Path, mask: int, modes: list[int]) -> None:
    usual = os.umask(mask)
    try:
        key_id = generate_key(tmp_path / "signing.key")
    finally:
        os.umask(usual)
    private, public = tmp_path / "signing.key", tmp_path / "signing.key.pub"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (private, public)] == modes
    assert private.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----\n")
    assert public.read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----\n")
    assert load_signing_key(str(private)).key_id == load_trusted_key(str(public)).key_id == key_id
    der = base64.b64decode(b"".join(public.read_bytes().splitlines()[1:-1]))
    assert hashlib.sha256(der).hexdigest() == key_id


@pytest.mark.parametrize("there", ["key", "key.pub"])
def test_a_key_is_never_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_bytes(b"precious")
    with pytest.raises(ConfigError, match=f"{there} exists; a key is never overwritten") as caught:
        generate_key(tmp_path / "key")
    assert caught.value.hint
    assert os.listdir(tmp_path) == [there]
    assert (tmp_path / there).read_bytes() == b"precious"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="exists"):
        generate_key(tmp_path / "key")
    assert not (tmp_path / "elsewhere").exists()


def test_half_a_key_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(ConfigError, match="can't be written: No space left on device"):
            generate_key(tmp_path / "key")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="can't be written: No such file"):
        generate_key(tmp_path / "nowhere" / "key")


def test_both_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    generate_key(tmp_path / "key")
    files = [tmp_path / "key", tmp_path / "key.pub"]
    assert [(each.st_ino, each.st_size) for each in synced] == [(f.stat().st_ino, f.stat().st_size) for f in files]


def test_a_key_may_be_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNING", private_pem(PRIVATE).decode())
    monkeypatch.setenv("TRUSTED", public_pem(PRIVATE).decode())
    signing, trusted = load_signing_key("env:SIGNING"), load_trusted_key("env:TRUSTED")
    assert signing.key_id == trusted.key_id == TRUSTED.key_id
    assert verify(signing.sign(RUN, NAME, RECORD, FILES), trusted=[trusted]) == TRUSTED.key_id


P384 = ec.generate_private_key(ec.SECP384R1())
ED25519 = ed25519.Ed25519PrivateKey.generate()
PEM = private_pem(PRIVATE)
BODY = b"".join(PEM.splitlines()[1:-1]).decode()
KEYS = {
    "empty": b"",
    "binary": b"\xff\x00",
    "cut": PEM[:-60],
    "body": BODY.encode(),
    "private": PEM,
    "public": public_pem(PRIVATE),
    "encrypted": private_pem(PRIVATE, b"pass"),
    "p384": private_pem(P384),
    "p384.pub": public_pem(P384),
    "ed25519": private_pem(ED25519),
    "ed25519.pub": public_pem(ED25519),
}


@pytest.mark.parametrize(
    ("load", "key", "message"),
    [
        (load_signing_key, "empty", "is not a private key in PEM"),
        (load_signing_key, "binary", "is not a private key in PEM"),
        (load_signing_key, "cut", "is not a private key in PEM"),
        (load_signing_key, "body", "is not a private key in PEM"),
        (load_signing_key, "public", "is not a private key in PEM"),
        (load_signing_key, "encrypted", "is encrypted"),
        (load_signing_key, "p384", "is not an ECDSA P-256 key"),
        (load_signing_key, "ed25519", "is not an ECDSA P-256 key"),
        (load_trusted_key, "empty", "is not a public key in PEM"),
        (load_trusted_key, "binary", "is not a public key in PEM"),
        (load_trusted_key, "private", "is a private key"),
        (load_trusted_key, "encrypted", "is a private key"),
        (load_trusted_key, "p384.pub", "is not an ECDSA P-256 key"),
        (load_trusted_key, "ed25519.pub", "is not an ECDSA P-256 key"),
    ],
)
def test_what_is_no_key_is_refused(
    load: Callable[[str], object], key: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_bytes(KEYS[key])
    assert message in refused(load, str(tmp_path / "key"))
    monkeypatch.setenv("KEY", os.fsdecode(KEYS[key].replace(b"\x00", b"")))
    assert message in refused(load, "env:KEY")


def refused(load: Callable[[str], object], source: str) -> str:
    """The message; it is one line, has a hint, and nothing of the private key is in it or in its data."""
    with pytest.raises(ConfigError) as caught:
        load(source)
    error = caught.value
    assert error.hint
    assert "\n" not in str(error)
    said = f"{error!r} {error.hint} {error.data}"
    assert not any(BODY[at : at + 16] in said for at in range(48, len(BODY) - 16))
    return str(error)


@pytest.mark.parametrize("load", [load_signing_key, load_trusted_key])
def test_a_key_that_is_not_there_is_named(load: Callable[[str], object], tmp_path: Path) -> None:
    assert f"'{tmp_path}/key' can't be read: No such file or directory" in refused(load, f"{tmp_path}/key")
    assert "can't be read: Is a directory" in refused(load, str(tmp_path))
    assert "'env:HOLDFAST_NO_SUCH' is not set in the environment" in refused(load, "env:HOLDFAST_NO_SUCH")
    assert "not a file's name" in refused(load, "a\0b")


@pytest.mark.parametrize("load", [load_signing_key, load_trusted_key])
def test_a_key_in_place_of_its_name_is_not_repeated(load: Callable[[str], object]) -> None:
    whole, headless = PEM.decode(), PEM.decode()[28:]
    for source in (whole, headless, BODY, f"env:{whole}", f"env:{BODY}", "-----BEGIN", "two\nlines"):
        assert "(not shown)" in refused(load, source)


def test_no_key_is_shown() -> None:
    assert repr(SIGNING) == f"SigningKey(key_id='{SIGNING.key_id}')"
    assert repr(TRUSTED) == f"TrustedKey(key_id='{TRUSTED.key_id}')"


def test_it_costs_nothing_unless_it_is_used() -> None:
    code = """
import sys, holdfast
assert "cryptography" not in sys.modules
import holdfast.signature
assert not {"torch", "prefect"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
