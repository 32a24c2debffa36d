"""One checkpoint as one file: the same everywhere, read by others, and taken for nothing that it is not."""

import gzip
import hashlib
import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import METRICS, PAYLOAD
from holdfast.errors import Damage, NameTaken, RunUnknown, WrongUse
from holdfast.journal import MAX_RECORD_BYTES, Commit, ConfigRecord, Journal, RunRecord
from holdfast.pack import pack, tar_header, unpack
from holdfast.signature import generate_key, load_signing_key, load_trusted_key
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.verification import verify_run
from tests.support.makers import FILES, IDENTITY, SETTINGS, make_line, train

FLIPS = 200
Members = list[tuple[tarfile.TarInfo, bytes]]

needs_tar = pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one run of three commits."""
    store = LocalStore(str(tmp_path_factory.mktemp("made")))
    line = make_line(store)
    for _ in range(3):
        train(line, size_bytes=320)
    return store.root


@pytest.fixture(scope="module")
def good(made: Path) -> bytes:
    """The newest commit, packed."""
    return packed(Journal(LocalStore(str(made)), "run"))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Empty, and in a folder of its own."""
    (tmp_path / "store").mkdir()
    return LocalStore(str(tmp_path / "store"))


def packed(journal: Journal, number: int = 0) -> bytes:
    out = io.BytesIO()
    commit = journal.read_commit(number) if number else journal.newest()
    assert commit
    assert pack(journal, commit, out) == hashlib.sha256(out.getvalue()).hexdigest()
    return out.getvalue()


def unpacked(data: bytes, store: LocalStore) -> Journal:
    return unpack(io.BytesIO(data), store)


def members(data: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(member, opened.read() if (opened := tar.extractfile(member)) else b"") for member in tar]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- packing


def copy_in_any_order(made: Path, folder: Path) -> None:
    """The run by its bytes alone: what a copy may change is changed."""
    paths = [path for path in made.rglob("*") if path.is_file()]
    random.Random(str(folder)).shuffle(paths)
    for path in paths:
        copy = folder / path.relative_to(made)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
        os.utime(copy, (1, 1))


def test_a_checkpoint_is_packed_into_the_same_bytes_wherever_it_is(made: Path, good: bytes, tmp_path: Path) -> None:
    journals = []
    for name in ("a", "another/folder"):
        copy_in_any_order(made, tmp_path / name)
        journals.append(Journal(LocalStore(str(tmp_path / name)), "run"))
    memory = MemoryStore(str(tmp_path))
    for name, data in reversed(contents(made).items()):
        memory.create(name, data)
    journals.append(Journal(memory, "run"))
    assert {packed(journal) for journal in journals} == {good}


def test_what_others_see_in_it(good: bytes) -> None:
    found = [member for member, _ in members(good)]
    assert [member.name for member in found] == [
        "run/commits/00000003.json", f"run/configs/{SETTINGS}.json",
        f"run/epoch-0003/{PAYLOAD}", "run/epoch-0003/metadata.json", f"run/epoch-0003/{METRICS}", "run/run.json",
    ]  # fmt: skip
    for member in found:
        assert member.isreg()
        assert (member.mode, member.uid, member.gid, member.uname, member.gname) == (0o644, 0, 0, "", "")
        assert member.mtime == 0
    assert len(good) % tarfile.RECORDSIZE == 0


def test_what_others_extract_is_a_run(good: bytes, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(good)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian 12's Python 3.11.2 has none
        tar.extractall(tmp_path)
    report = verify_run(Journal(LocalStore(str(tmp_path)), "run"), everything=True, deep=True)
    assert report.problems == []
    assert [entry.commit for entry in report.checkpoints] == [3]


@needs_tar
@pytest.mark.parametrize("run", ["run", "r" * 100])
def test_tar_reads_it(tmp_path: Path, store: LocalStore, run: str) -> None:
    line = make_line(store, run)
    train(line)
    path = tmp_path / "packed.tar"
    path.write_bytes(packed(line.journal))
    listed = subprocess.run(["tar", "tvf", path], capture_output=True, text=True, check=True)
    assert [row.split()[-1] for row in listed.stdout.splitlines()] == [m.name for m, _ in members(path.read_bytes())]
    assert listed.stderr == ""
    (tmp_path / "extracted").mkdir()
    subprocess.run(["tar", "xf", path, "-C", tmp_path / "extracted"], check=True)
    assert verify_run(Journal(LocalStore(str(tmp_path / "extracted")), run)).ok


@pytest.mark.parametrize("name", ["run/a", f"{'r' * 100}/epoch-0001-step-000000000001.123456/{PAYLOAD}"])
@pytest.mark.parametrize("size_bytes", [0, 2**33 - 1, 2**33, 2**50])
def test_any_size_and_name_fit_into_a_header(name: str, size_bytes: int) -> None:
    block = tar_header(name, size_bytes)
    assert len(block) == tarfile.BLOCKSIZE
    info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    assert (info.name, info.size, info.type) == (name, size_bytes, tarfile.REGTYPE)
    if shutil.which("tar"):
        listed = subprocess.run(["tar", "tvf", "-"], input=block, capture_output=True, check=False)
        assert listed.stdout.decode().split()[2::3] == [str(size_bytes), name]


def change(path: Path, data: bytes | None) -> None:
    path.unlink() if data is None else path.write_bytes(data)


@pytest.mark.parametrize("name", [*(f"epoch-0003/{name}" for name in FILES), f"configs/{SETTINGS}.json", "run.json"])
@pytest.mark.parametrize("how", ["flipped", "shorter", "longer", "gone"])
def test_what_is_damaged_is_not_packed(made: Path, tmp_path: Path, name: str, how: str) -> None:
    shutil.copytree(made, tmp_path / "copy")
    path = tmp_path / "copy" / "run" / name
    data = path.read_bytes()
    changed = {"flipped": bytes([data[0] ^ 1]) + data[1:], "shorter": data[:-2], "longer": data + b"{", "gone": None}
    change(path, changed[how])
    journal = Journal(LocalStore(str(tmp_path / "copy")), "run")
    out = LocalStore(str(tmp_path / "out"))
    if how == "gone" and name.startswith("configs"):  # a checkpoint is good without
        unpack(io.BytesIO(packed(journal)), out)
        return
    # Without run.json there is no run.
    expected = RunUnknown if (how, name) == ("gone", "run.json") else Damage
    with pytest.raises(expected) as caught, out.creating("packed.tar") as writer:
        pack(journal, journal.read_commit(3), writer)
    assert expected is RunUnknown or name in str(caught.value)
    assert out.list() == []


# ---- unpacking


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_is_unpacked_is_a_run_that_can_go_on(made: Path, store: LocalStore, number: int) -> None:
    journal = Journal(LocalStore(str(made)), "run")
    there = unpacked(packed(journal, number), store)
    assert there.newest() == journal.read_commit(number)
    assert packed(there) == packed(journal, number)
    line = make_line(store)
    assert line.head == journal.read_commit(number)
    after = train(line)
    assert (after.number, after.parent) == (number + 1, number)
    report = verify_run(Journal(store, "run"), everything=True, deep=True)
    assert (report.problems, report.notes) == ([], [])
    assert [entry.commit for entry in report.checkpoints] == [number + 1, number]


def test_a_run_that_goes_on_trains_the_same_as_where_it_came_from(made: Path, store: LocalStore) -> None:
    journal = Journal(LocalStore(str(made)), "run")
    unpacked(packed(journal, 2), store)
    assert train(make_line(store), size_bytes=320).checkpoint_sha256 == journal.read_commit(3).checkpoint_sha256


def test_a_name_as_long_as_a_run_may_have_travels(store: LocalStore, tmp_path: Path) -> None:
    line = make_line(store, "r" * 100)
    train(line, 3)
    other = LocalStore(str(tmp_path / "other"))
    assert unpacked(packed(line.journal), other).newest() == line.head


def test_the_signature_travels(store: LocalStore, tmp_path: Path) -> None:
    generate_key(tmp_path / "key")
    line = make_line(store, signing_key=load_signing_key(str(tmp_path / "key")))
    train(line)
    trusted = load_trusted_key(f"{tmp_path}/key.pub")
    there = unpacked(packed(line.journal), LocalStore(str(tmp_path / "other")))
    assert verify_run(there, trusted_keys=[trusted]).ok
    assert make_line(LocalStore(str(tmp_path / "other")), trusted_keys=[trusted]).head == line.head


@pytest.mark.parametrize("name", ["run.json", "a file", "epoch-0001/checkpoint.safetensors"])
def test_a_folder_of_this_name_is_not_touched(good: bytes, store: LocalStore, name: str) -> None:
    store.create(f"run/{name}", b"mine")
    with pytest.raises(WrongUse, match="there is a folder run in"):
        unpacked(good, store)
    assert contents(store.root) == {f"run/{name}": b"mine"}


class Meanwhile(io.BytesIO):
    """Something happens once, in the midst of being read."""

    def __init__(self, data: bytes, happen: Callable[[], object]) -> None:
        super().__init__(data)
        self.happen: Callable[[], object] | None = happen

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > 4 * tarfile.BLOCKSIZE and self.happen:
            happen, self.happen = self.happen, None
            happen()
        return super().read(size)


@pytest.mark.parametrize("number", [2, 3])
def test_two_who_unpack_at_once_leave_one_whole_run(made: Path, good: bytes, store: LocalStore, number: int) -> None:
    """The one that is late takes back what it has written, and nothing of the other's."""
    other = packed(Journal(LocalStore(str(made)), "run"), number)
    with pytest.raises(NameTaken):
        unpack(Meanwhile(good, lambda: unpacked(other, store)), store)
    assert contents(store.root).keys() == {member.name for member, _ in members(other)}
    assert verify_run(Journal(store, "run"), everything=True, deep=True).ok


def test_it_is_a_run_once_it_is_whole(good: bytes, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LocalStore.create
    created: list[str] = []

    def noted(store: LocalStore, name: str, data: bytes) -> None:
        created.append(name)
        assert name != "run.json" or len(contents(store.root)) == len(members(good)) - 1
        create(store, name, data)

    monkeypatch.setattr(LocalStore, "create", noted)
    unpacked(good, store)
    assert created[-1] == "run.json"


def test_a_run_that_began_meanwhile_stays(good: bytes, store: LocalStore) -> None:
    with pytest.raises(NameTaken):
        unpack(Meanwhile(good, lambda: Journal(store, "run").begin("m:f")), store)
    assert contents(store.root).keys() == {"run/run.json"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_what_was_interrupted_leaves_no_run(good: bytes, store: LocalStore, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        unpack(Meanwhile(good, fail), store)
    assert store.list() == []
    unpacked(good, store)


# ---- damage


def parts(data: bytes) -> dict[str, list[int]]:
    """Every byte of the file, by what it belongs to."""
    found: dict[str, list[int]] = {"header": [], "record": [], "payload": [], "padding": []}
    at = 0
    for member, _ in members(data):
        found["header"] += range(member.offset, member.offset_data)
        end = member.offset_data + member.size
        found["payload" if member.name.endswith(PAYLOAD) else "record"] += range(member.offset_data, end)
        at = -(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        found["padding"] += range(end, at)
    found["padding"] += range(at, len(data))
    assert sum(map(len, found.values())) == len(data)
    return found


def test_any_bit_may_flip(good: bytes, store: LocalStore) -> None:
    """It is refused and leaves no run, or else the bit is one that says nothing."""
    unpacked(good, store)
    expected = contents(store.root)
    chosen = random.Random(20)
    outcomes: dict[str, list[bool]] = {}
    for count in range(FLIPS):
        shutil.rmtree(store.root / "run", ignore_errors=True)
        part, positions = [*parts(good).items()][count % 4]
        position = chosen.choice(positions)
        data = bytearray(good)
        data[position] ^= 1 << chosen.randrange(8)
        try:
            unpacked(bytes(data), store)
        except Damage:
            assert store.list() == [], (part, position)
            outcomes.setdefault(part, []).append(False)
        else:
            assert contents(store.root) == expected, (part, position)
            assert verify_run(Journal(store, "run"), deep=True).ok
            outcomes.setdefault(part, []).append(True)
    assert not any(outcomes["record"])
    assert not any(outcomes["payload"])
    assert outcomes["header"].count(True) < FLIPS / 40  # the checksum's last byte means nothing
    assert any(outcomes["padding"])


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [(0, "not a packed checkpoint"), (511, "not a packed checkpoint"), (600, "the file ends within")],
)
def test_what_was_cut_off_is_refused(good: bytes, store: LocalStore, size_bytes: int, said: str) -> None:
    with pytest.raises(Damage, match=said):
        unpacked(good[:size_bytes], store)
    assert store.list() == []


def test_wherever_it_was_cut_off_it_is_refused_or_whole(good: bytes, store: LocalStore) -> None:
    end = max(member.offset_data + member.size for member, _ in members(good))
    for size_bytes in range(0, len(good), 500):
        shutil.rmtree(store.root / "run", ignore_errors=True)
        try:
            unpacked(good[:size_bytes], store)
        except Damage:
            assert store.list() == []
        else:
            assert size_bytes > end
            assert verify_run(Journal(store, "run"), deep=True).ok


NO_TARS = {
    "empty": b"",
    "zeros": bytes(tarfile.RECORDSIZE),
    "JSON": b"{}",
    "text": b"x" * tarfile.RECORDSIZE,
    "gzip": gzip.compress(bytes(tarfile.RECORDSIZE)),
    "all bits": b"\xff" * tarfile.RECORDSIZE,
}


@pytest.mark.parametrize("case", NO_TARS)
def test_what_is_no_tar_is_refused(store: LocalStore, case: str) -> None:
    with pytest.raises(Damage, match="the file is not a packed checkpoint"):
        unpacked(NO_TARS[case], store)
    assert store.list() == []


# ---- malice


def file(name: str, data: bytes = b"evil", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def special(name: str, kind: bytes, **fields: Any) -> Callable[[Members], Members]:
    """One more member, which is no plain file."""
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
    """The commit says something else, under a hash of its own that is right."""
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
    "other bytes of the checkpoint": replaced(f"run/epoch-0003/{PAYLOAD}", lambda data: bytes(len(data))),
    "a longer checkpoint": replaced(f"run/epoch-0003/{PAYLOAD}", lambda data: data + b"x"),
    "a commit that is none": first(lambda data: b"[]"),
    "a commit of another number": recommitted(number=4),
    "a commit under the name of another": lambda found: begun(first_commit=4)(recommitted(number=4)(found)),
    "a commit elsewhere": recommitted(path="epoch-0009"),
    "a commit without files": recommitted(files=[]),
    "a commit of another content id": recommitted(checkpoint_sha256="f" * 64),
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
    """With one line, nothing written outside of the run's folder, and that one gone; says how."""
    outside = store.root.parent / "outside"
    outside.mkdir()
    with pytest.raises(Damage) as caught:
        unpacked(data, store)
    assert "\n" not in str(caught.value)
    assert sorted(store.root.parent.rglob("*")) == [outside, store.root]
    return str(caught.value)


def test_what_is_rebuilt_unchanged_is_taken(good: bytes, store: LocalStore) -> None:
    """Or else the tests below would prove nothing."""
    unpacked(rebuilt(good, lambda found: found), store)
    assert verify_run(Journal(store, "run"), deep=True).ok


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(good: bytes, store: LocalStore, case: str) -> None:
    assert_refused(rebuilt(good, HOSTILE[case]), store)


KINDS = {name: getattr(tarfile, name) for name in dir(tarfile) if name.endswith("TYPE")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["run/commits/00000003.json", f"run/epoch-0003/{PAYLOAD}", "run/run.json"])
def test_only_plain_files_are_taken(good: bytes, store: LocalStore, kind: str, name: str) -> None:
    """Though all else of them is as it should be, their bytes too."""
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
    """They could give any name and size to the member after them."""

    def extended(found: Members) -> Members:
        info, _ = found[position]
        info.pax_headers = {"path": "../outside/evil"}
        return found

    assert_refused(rebuilt(good, extended, tarfile.PAX_FORMAT), store)


def claimed(good: bytes, name: str, size_bytes: int) -> bytes:
    """The header of a member says another size than its bytes have."""
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
    with pytest.raises(WrongUse, match="has format 2"):
        unpacked(rebuilt(good, begun(format=2)), store)
    assert store.list() == []
