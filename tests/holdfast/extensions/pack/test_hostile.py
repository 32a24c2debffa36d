"""Unpacking refuses a file that was made to do harm."""

import io
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.checkpoint import METRICS, PAYLOAD
from holdfast.errors import Damage, WrongUse
from holdfast.extensions.pack.pack import tar_header
from holdfast.journal import MAX_RECORD_BYTES, Commit, ConfigRecord, Journal, RunRecord
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from tests.support.makers import IDENTITY, SETTINGS
from tests.support.packing import Members, members, unpacked


def file(name: str, data: bytes = b"evil", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def special(name: str, kind: bytes, **fields: Any) -> Callable[[Members], Members]:
    """Return a change that adds a member which is no plain file."""
    return lambda found: [found[0], file(name, b"", type=kind, **fields), *found[1:]]


def added(name: str, data: bytes = b"evil", **fields: Any) -> Callable[[Members], Members]:
    return lambda found: [found[0], file(name, data, **fields), *found[1:]]


def renamed(name: str, to: str) -> Callable[[Members], Members]:
    return lambda found: [file(to if member.name == name else member.name, data) for member, data in found]


def without(name: str) -> Callable[[Members], Members]:
    return lambda found: [(member, data) for member, data in found if member.name != name]


def replaced(name: str, change: Callable[[bytes], bytes]) -> Callable[[Members], Members]:
    return lambda found: [
        file(member.name, change(data) if member.name == name else data) for member, data in found
    ]  # fmt: skip


def first(to: Callable[[bytes], bytes]) -> Callable[[Members], Members]:
    return lambda found: [file(found[0][0].name, to(found[0][1])), *found[1:]]


def recommitted(**fields: Any) -> Callable[[Members], Members]:
    """Return a change of the commit's fields that corrects the record's hash."""
    return first(lambda data: Commit.from_bytes(data, "").model_copy(update=fields).to_bytes())


def begun(**fields: Any) -> Callable[[Members], Members]:
    return replaced(
        "run/run.json", lambda data: RunRecord.from_bytes(data, "").model_copy(update=fields).to_bytes()
    )  # fmt: skip


CONFIG = f"run/configs/{SETTINGS}.json"
LONG = "run/" + "n" * 99 + "/" + "n" * 99
HOSTILE: dict[str, Callable[[Members], Members]] = {
    "a symbolic link": special("run/link", tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a link in place of the checkpoint": special(f"run/epoch-0003/{PAYLOAD}", tarfile.SYMTYPE, linkname="../../x"),
    "a link in place of its folder": special("run/epoch-0003", tarfile.SYMTYPE, linkname="../../outside"),
    "a hard link": special("run/link", tarfile.LNKTYPE, linkname="run/run.json"),
    "a file that is linked": added("run/run.json", linkname="/etc/passwd"),
    "a character device": special("run/device", tarfile.CHRTYPE, devmajor=1, devminor=3),
    "a block device": special("run/device", tarfile.BLKTYPE),
    "a pipe": special("run/pipe", tarfile.FIFOTYPE),
    "a folder": special("run/epoch-0003", tarfile.DIRTYPE),
    "a sparse file": special("run/sparse", tarfile.GNUTYPE_SPARSE),
    "a file of old": added("run/old", type=tarfile.AREGTYPE),
    "a folder of old": added("run/old/", type=tarfile.AREGTYPE),
    "a type that nobody knows": special("run/odd", b"Z"),
    "an absolute name": added("/tmp/evil"),
    "a way up": added("run/../../outside/evil"),
    "a way up from inside": added(f"run/epoch-0003/../../../outside/{PAYLOAD}"),
    "only a way up": added(".."),
    "a way up as the first": lambda found: [file("../commits/00000003.json", found[0][1]), *found[1:]],
    "a dot": added("./run/run.json"),
    "two slashes": added("run//run.json"),
    "a NUL": added("run/run.json\0.txt"),
    "a line's end": added("run/run.json\n"),
    "no name": added(""),
    "a line's end in a name that is expected": renamed("run/run.json", "run/run.json\n"),
    "something below a name that is expected": renamed("run/run.json", "run/run.json/run.json/run.json"),
    "another run": added("other/run.json"),
    "another run for the checkpoint": renamed(f"run/epoch-0003/{PAYLOAD}", f"other/epoch-0003/{PAYLOAD}"),
    "a file twice": lambda found: [*found, found[2]],
    "the commit twice": lambda found: [found[0], found[0], *found[1:]],
    "one more file": added("run/epoch-0003/evil.py"),
    "one more record": added("run/latest.json"),
    "another signature": added("run/signatures/00000003-00000009.json"),
    "an attempt": added("run/attempts/00000001.json"),
    "no run.json": without("run/run.json"),
    "no checkpoint": without(f"run/epoch-0003/{PAYLOAD}"),
    "no metrics": without(f"run/epoch-0003/{METRICS}"),
    "no commit": lambda found: found[1:],
    "the commit is not first": lambda found: [found[1], found[0], *found[2:]],
    "nothing but the commit": lambda found: found[:1],
    "a long name as GNU writes it": added(LONG),
    "different bytes of the checkpoint": replaced(f"run/epoch-0003/{PAYLOAD}", lambda data: bytes(len(data))),
    "a longer checkpoint": replaced(f"run/epoch-0003/{PAYLOAD}", lambda data: data + b"x"),
    "a commit that is none": first(lambda data: b"[]"),
    "a commit of a different number": recommitted(number=4),
    "a commit under the name of another": lambda found: begun(first_commit=4)(recommitted(number=4)(found)),
    "a commit elsewhere": recommitted(path="epoch-0009"),
    "a commit without files": recommitted(files=[]),
    "a commit of a different content id": recommitted(checkpoint_sha256="f" * 64),
    "other settings": replaced(CONFIG, lambda data: ConfigRecord.from_bytes(data, "").model_copy(
        update={"identity": IDENTITY | {"seed": 1}}).to_bytes()),
    "settings of another fingerprint": replaced(
        CONFIG, lambda data: ConfigRecord(fingerprint="f" * 64, identity=IDENTITY, config={}).to_bytes()),
    "settings that can't be read": replaced(CONFIG, lambda data: b"{}"),
    "a run.json of another run": begun(run="other"),
    "a run.json that promises more": begun(first_commit=1),
    "a run.json that promises less": begun(first_commit=4),
    "a run.json that can't be read": replaced("run/run.json", lambda data: data[:-3]),
}  # fmt: skip


def rebuilt(good: bytes, change: Callable[[Members], Members], form: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, data in change(members(good)):
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def assert_refused(data: bytes, store: LocalStore) -> str:
    """Check that unpacking raises `Damage`, with a message of one line, and leaves no file; return the message."""
    outside = store.root.parent / "outside"
    outside.mkdir()
    with pytest.raises(Damage) as caught:
        unpacked(data, store)
    assert "\n" not in str(caught.value)
    assert sorted(store.root.parent.rglob("*")) == [outside, store.root]
    return str(caught.value)


def test_a_file_that_is_rebuilt_unchanged_is_accepted(good: bytes, store: LocalStore) -> None:
    """Otherwise the tests below would pass for the wrong reason."""
    unpacked(rebuilt(good, lambda found: found), store)
    assert verify_run(Journal(store, "run"), deep=True).ok


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(good: bytes, store: LocalStore, case: str) -> None:
    assert_refused(rebuilt(good, HOSTILE[case]), store)


KINDS = {name: getattr(tarfile, name) for name in dir(tarfile) if name.endswith("TYPE")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["run/commits/00000003.json", f"run/epoch-0003/{PAYLOAD}", "run/run.json"])
def test_only_plain_files_are_accepted(good: bytes, store: LocalStore, kind: str, name: str) -> None:
    """Every other type of member is refused, even with the right name and bytes."""
    change = retyped(name, type=KINDS[kind])
    if kind == "REGTYPE":
        unpacked(rebuilt(good, change), store)
    else:
        assert_refused(rebuilt(good, change), store)


def test_a_plain_file_that_names_a_link_is_refused(good: bytes, store: LocalStore) -> None:
    assert_refused(rebuilt(good, retyped("run/run.json", linkname="/etc/passwd")), store)


def retyped(name: str, **fields: Any) -> Callable[[Members], Members]:
    return lambda found: [file(m.name, data, **fields if m.name == name else {}) for m, data in found]


@pytest.mark.parametrize("position", [0, 1])
def test_extended_headers_are_refused(good: bytes, store: LocalStore, position: int) -> None:
    """An extended header could change the name and size of the member after it."""

    def extended(found: Members) -> Members:
        info, _ = found[position]
        info.pax_headers = {"path": "../outside/evil"}
        return found

    assert_refused(rebuilt(good, extended, tarfile.PAX_FORMAT), store)


def claimed(good: bytes, name: str, size_bytes: int) -> bytes:
    """Return the packed file with a different size in the header of a member."""
    (info,) = (member for member, _ in members(good) if member.name == name)
    return good[: info.offset] + tar_header(name, size_bytes) + good[info.offset_data :]


@pytest.mark.parametrize("name", ["run/commits/00000003.json", CONFIG, f"run/epoch-0003/{PAYLOAD}", "run/run.json"])
@pytest.mark.parametrize("size_bytes", [0, MAX_RECORD_BYTES + 1, 2**60, 2**87])
def test_claimed_sizes_are_not_believed(good: bytes, store: LocalStore, name: str, size_bytes: int) -> None:
    said = assert_refused(claimed(good, name, size_bytes), store)
    if size_bytes:
        assert f"{size_bytes} bytes" in said


def test_a_negative_size_is_refused(good: bytes, store: LocalStore) -> None:
    block = bytearray(tar_header("run/commits/00000003.json", 0))
    block[124:136] = b"\xff" * 12
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert "is not a file of a run" in assert_refused(bytes(block) + good[512:], store)


def test_a_later_format_is_refused(good: bytes, store: LocalStore) -> None:
    with pytest.raises(WrongUse, match="is stored in format 2"):
        unpacked(rebuilt(good, begun(format=2)), store)
    assert store.list() == []
