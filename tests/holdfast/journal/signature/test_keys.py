"""Making and loading keys: two files, protected from other users, and never shown."""

import base64
import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from holdfast.errors import ConfigError
from holdfast.journal.signature import generate_key, load_signing_key, load_trusted_key
from tests.support.signing import FILES, NAME, PRIVATE, RECORD, RUN, SIGNING, TRUSTED, verify


def private_pem(key: Any, password: bytes | None = None) -> bytes:
    encryption = pem.BestAvailableEncryption(password) if password else pem.NoEncryption()
    return key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, encryption)


def public_pem(key: Any) -> bytes:
    return key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)


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
    with pytest.raises(ConfigError, match=f"{there} exists, and keygen never overwrites a key") as caught:
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
def test_a_source_that_is_no_key_is_refused(
    load: Callable[[str], object], key: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_bytes(KEYS[key])
    assert message in refused(load, str(tmp_path / "key"))
    monkeypatch.setenv("KEY", os.fsdecode(KEYS[key].replace(b"\x00", b"")))
    assert message in refused(load, "env:KEY")


def refused(load: Callable[[str], object], source: str) -> str:
    """Return the message of the refusal; check that it is one line with a hint and shows nothing of the private key."""
    with pytest.raises(ConfigError) as caught:
        load(source)
    error = caught.value
    assert error.hint
    assert "\n" not in str(error)
    said = f"{error!r} {error.hint} {error.data}"
    assert not any(BODY[at : at + 16] in said for at in range(48, len(BODY) - 16))
    return str(error)


@pytest.mark.parametrize("load", [load_signing_key, load_trusted_key])
def test_a_missing_key_is_named(load: Callable[[str], object], tmp_path: Path) -> None:
    assert f"'{tmp_path}/key' can't be read: No such file or directory" in refused(load, f"{tmp_path}/key")
    assert "can't be read: Is a directory" in refused(load, str(tmp_path))
    assert "'env:HOLDFAST_NO_SUCH' is not set in the environment" in refused(load, "env:HOLDFAST_NO_SUCH")
    assert "not a file's name" in refused(load, "a\0b")


@pytest.mark.parametrize("load", [load_signing_key, load_trusted_key])
def test_a_key_given_in_place_of_a_path_is_not_shown(load: Callable[[str], object]) -> None:
    whole, headless = PEM.decode(), PEM.decode()[28:]
    for source in (whole, headless, BODY, f"env:{whole}", f"env:{BODY}", "-----BEGIN", "two\nlines"):
        assert "(not shown)" in refused(load, source)


def test_no_key_is_shown() -> None:
    assert repr(SIGNING) == f"SigningKey(key_id='{SIGNING.key_id}')"
    assert repr(TRUSTED) == f"TrustedKey(key_id='{TRUSTED.key_id}')"
