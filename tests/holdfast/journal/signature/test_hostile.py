"""Malformed and changed envelopes are never accepted as signatures."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.errors import NotTrusted, WrongUse
from holdfast.journal.signature import MAX_ENVELOPE_BYTES
from tests.support.signing import GOOD, NAME, RECORD, RUN, SIGNING, STATEMENT, TRUSTED, sealed, urlsafe, verify


def decoded(envelope: bytes) -> tuple[object, ...]:
    fields = json.loads(envelope)
    signatures = [urlsafe(signature["sig"]) for signature in fields["signatures"]]
    return urlsafe(fields["payload"]), fields["payloadType"], signatures


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
def test_arbitrary_bytes_are_refused(envelope: bytes) -> None:
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


def test_every_envelope_that_can_be_made_can_be_verified() -> None:
    def files(count: int) -> dict[str, str]:
        return {f"epoch-0004/{number:08d}": "00" * 32 for number in range(count)}

    with pytest.raises(WrongUse, match="the checkpoint has 7000 files: their list is over 1 MiB and can't be signed"):
        SIGNING.sign(RUN, NAME, RECORD, files(7000))
    assert verify(SIGNING.sign(RUN, NAME, RECORD, files(6000)), files=files(6000)) == TRUSTED.key_id
