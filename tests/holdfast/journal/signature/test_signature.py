"""The signature of a commit: it verifies for one run, record and files, and for nothing else."""

import base64
import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest

from holdfast.errors import NotTrusted
from tests.support.signing import (
    FILES,
    GOOD,
    NAME,
    OTHER_SIGNING,
    OTHER_TRUSTED,
    PAYLOAD_TYPE,
    RECORD,
    RUN,
    SIGNING,
    STATEMENT,
    TRUSTED,
    sealed,
    verify,
)


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
        ({"record": RECORD + b" "}, "was made for different bytes"),
        ({"files": FILES | {"epoch-0004/rng.json": "33" * 32}}, "was made for other files: 'epoch-0004/rng.json'"),
        ({"files": FILES | {"epoch-0004/more": "33" * 32}}, "was made for other files: 'epoch-0004/more'"),
        ({"files": {"epoch-0004/rng.json": "22" * 32}}, "other files: 'epoch-0004/checkpoint.safetensors'"),
        ({"files": {}}, "was made for other files"),
        ({"trusted": [OTHER_TRUSTED]}, f"not made with a trusted key; it names '{TRUSTED.key_id[:16]}'"),
        ({"trusted": []}, "not made with a trusted key"),
    ],
)
def test_a_signature_verifies_for_nothing_else(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(NotTrusted, match=message) as caught:
        verify(GOOD, **changed)
    assert caught.value.hint


def test_swapped_digests_are_refused() -> None:
    first, second = FILES
    with pytest.raises(NotTrusted, match="other files"):
        verify(GOOD, files={first: FILES[second], second: FILES[first]})


def test_a_signed_file_does_not_pass_for_the_record() -> None:
    """The statement has the same names and digests, but the record and a file have changed places."""
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
    with pytest.raises(NotTrusted, match="not made with a trusted key"):
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
        (STATEMENT | {"subject": [{"name": NAME, "digest": {"sha512": ""}}]}, PAYLOAD_TYPE, "different bytes"),
        (STATEMENT | {"predicate": {}}, PAYLOAD_TYPE, "not over a statement about a commit"),
        (b"\xff", PAYLOAD_TYPE, "not over a statement about a commit"),
        (b"[" * 100_000, PAYLOAD_TYPE, "not over a statement about a commit"),
    ],
)
def test_other_things_that_the_key_signed_are_refused(statement: object, payload_type: str, message: str) -> None:
    with pytest.raises(NotTrusted, match=message):
        verify(sealed(statement, payload_type))


def test_importing_holdfast_does_not_import_cryptography() -> None:
    code = """
import sys, holdfast
assert "cryptography" not in sys.modules
import holdfast.journal.signature
assert not {"torch", "prefect"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
