"""A walk over every leaf of every record of a run: openers replace it, and the commands that read the run follow.

An opener is a text that names something to open: a path, a URL, a class, a module, a folder with code. Each contains
the word `WORD`. An audit hook of Python watches what the process, and the ranks that are forked from it, open.
"""

import contextlib
import hashlib
import importlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import holdfast.cli
from holdfast.config.steps import Steps
from holdfast.errors import HoldfastError
from holdfast.extensions.doctor import command as doctor
from holdfast.extensions.quarantine.records import MachineRecord
from holdfast.extensions.receipt.signed import describe_commit, seal_receipt
from holdfast.journal import AuditRecord, Journal, RehearsalRecord, now
from holdfast.journal.answers import record_answer
from holdfast.journal.audits import record_audit
from holdfast.journal.records import SEAL
from holdfast.journal.signature import SigningKey
from holdfast.journal.skips import write_skips
from holdfast.provenance.fingerprint import fingerprint
from holdfast.store import open_store
from tests.support.forked import OPENING, fork_ranks
from tests.support.lives import Lives
from tests.support.makers import make_key

WORD = "planted_word"
OPENERS = (
    f"PLACE/{WORD}/data.txt", f"../../{WORD}/data.txt", f"PLACE/{WORD}", f"../../../{WORD}", f"~/{WORD}", WORD,
    f"{WORD}.py", f"{WORD}:Evil", f"PLACE/{WORD}/{WORD}.py:toy", f"{WORD}.inner:toy", f"*{WORD}*", f"$HOME/{WORD}",
    *(f"{scheme}://{WORD}.invalid:7/x" for scheme in (
        "http", "https", "ftp", "s3", "s3a", "gs", "gcs", "az", "abfs", "hf", "github", "sftp", "grpc", "otlp:http",
    )),
    f"file://PLACE/{WORD}/data.txt", f"local://PLACE/{WORD}/data.txt", f"memory://{WORD}", f"dir://PLACE/{WORD}",
    f"simplecache::file://PLACE/{WORD}/data.txt", f"reference://*::file://PLACE/{WORD}/data.txt",
    f"zip://data.txt::file://PLACE/{WORD}/data.txt", f"s3://{WORD}::file://PLACE/{WORD}/data.txt",
    f"{WORD}:Evil://x", f"{WORD}.invalid:7", f"//{WORD}.invalid/x", f"env:{WORD}", f"holdfast.recipes.texts:{WORD}",
)  # fmt: skip
CONNECTING = ("socket.connect", "socket.getaddrinfo", "subprocess.", "os.exec", "os.system", "os.posix_spawn")
CHANGING = ("os.remove", "os.rename", "os.link", "os.symlink", "os.rmdir", "os.truncate", "os.chmod", "shutil.")
ENDS_WITHIN_S, WATCHED_S = 300, 2
# The commands that read a run, by their arguments. The last ones change it.
READING = (
    "show RUN", "show RUN --json", "show --store STORE", "show RUN --save OUT/shown", "verify RUN --all --deep",
    "verify RUN --key PLACE/key.pub", "watch RUN --every 0.2", "report RUN -o OUT/a.html",
    "report STORE -o OUT/a.html", "report RUN RUN -o OUT/a.html", "goodput RUN", "diff RUN", "plan RUN",
    "plan RUN --audit-share 0.1", "compare RUN OTHER", "prune RUN --dry-run", "export RUN OUT/model",
    "export RUN OUT/folder --form dcp", "pack RUN OUT/run.tar", "unpack OUT/run.tar OUT/unpacked",
    "receipt RUN OUT/receipt.json --signing-key PLACE/key", "pin RUN best", "pin RUN best --off", "skip RUN 15",
    "quarantine RUN best reason", "release RUN --rollback", "release RUN --reason reason", "prune RUN",
)  # fmt: skip
TRAINING = (
    "audit RUN", "evaluate RUN", "explain RUN 9", "compare RUN OTHER --replay", "audit RUN --rank 0", "doctor RUN",
    "audit RUN --receipt PLACE/receipt.json --key PLACE/key.pub", "audit PLACE/project/own.toml",
    "diff RUN PLACE/project/own.toml", "train PLACE/project/own.toml",
    "prove PLACE/project/own.toml --steps 4 --kills 0",
)  # fmt: skip
# Flows of a store, as a schedule starts them, with their parameters.
FLOWS = ("flow audit store=STORE", "flow evaluate store=STORE run=toy", "flow prune store=STORE")
COMMANDS = {"reading": READING, "training": TRAINING, "flows": FLOWS}
CONFIG = """
recipe = "tests.support.showing:painted"
run = "toy"
store = "{place}/project/runs"
signing_key = "{place}/key"
epochs = {epochs}
[chunk]
steps = 3
[retention]
keep_last = 4
keep_best = {{metric = "avg_loss"}}
[log]
folder = "{place}/logs"
"""
Leaf = tuple[str, tuple[Any, ...], bool]  # a file's name, the path of a value in it, and whether its key is meant


# ---- the run


def make_run(place: Path, nursery: Lives) -> None:
    """Train a signed run in three attempts, in the reader's project, and add each kind of record that a run can have.

    One of its commits is quarantined, and audits of another one differ.
    """
    project = place / "project"
    project.mkdir(parents=True)
    signing, _ = make_key(place / "key")
    config, store = project / "own.toml", open_store(f"{project}/runs")
    journal = Journal(store, "toy")
    for attempt, epochs in enumerate((6, 9, 9)):
        config.write_text(CONFIG.format(place=place, epochs=epochs))
        if attempt == 2:
            journal.quarantine(journal.newest_number(), "damaged", attempt)
        done = nursery.call("tests.support.forked:train", str(config), [])
        assert done.returncode == 0, done.stderr
    config.write_text(CONFIG.format(place=place, epochs=10).replace("/runs", "/copies"))
    _add_records(journal, signing)
    store.create("_machines/node-9/00000001.json", MachineRecord(
        number=1, host="node-9", gpus=["GPU-1"], is_quarantined=True, reason="a reason", run="toy", commit=5,
        deviating=1, created_at=now(),
    ).to_bytes())  # fmt: skip
    shutil.copytree(project / "runs" / "toy", project / "others" / "toy")
    newest = journal.newest()
    assert newest
    (place / "receipt.json").write_bytes(seal_receipt(describe_commit(journal, newest), signing))


def _add_records(journal: Journal, signing: SigningKey) -> None:
    newest = journal.newest_number()
    journal.pin(newest - 2)
    journal.record_rehearsal(RehearsalRecord(attempt=3, commit=newest, lines=[], difference="", created_at=now()))
    for number, host in ((newest - 3, "b"), (newest - 2, "b"), (newest - 2, "c"), (newest, "b")):
        commit = journal.read_commit(number)
        record_audit(journal, AuditRecord(
            commit=number, number=1 + (host == "c"), from_commit=number - 1, host=host,
            notes=[] if number == newest - 2 else ["a note"],
            checkpoint_sha256="0" * 64 if number == newest - 2 else commit.checkpoint_sha256,
            environment={}, created_at=now(),
        ))  # fmt: skip
    record_answer(journal, newest - 2, "a person")
    write_skips(journal, 1, Steps.parse("99"), Steps.parse("99"), newest + 1, signing, reason="a reason")
    told = {"id": "a", "step": 10, "attempt": 1, "created_at": now()}
    journal.store.replace("sinks/wandb.json", json.dumps(told).encode())


# ---- the files


def read_files(run: Path) -> dict[str, bytes]:
    """Return the bytes of each file of a run, by name."""
    files = (path for path in sorted(run.rglob("*")) if path.is_file())
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in files}


def parse(data: bytes) -> Any:
    """Return the JSON of a file: an object, a list for each line, or a checkpoint's header with its state as JSON."""
    with contextlib.suppress(ValueError):
        return json.loads(data)
    with contextlib.suppress(ValueError):
        return [json.loads(line) for line in data.splitlines()]
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["holdfast"] = json.loads(header["__metadata__"]["holdfast"])
    return header


def spell(value: Any, before: bytes) -> bytes:
    """Return a file of the same form as ``before`` with another JSON; a record gets its own hash."""
    if isinstance(value, list):
        return b"".join(json.dumps(each).encode() + b"\n" for each in value)
    if before[:1] != b"{":
        size = int.from_bytes(before[:8], "little")
        state = json.dumps(value["__metadata__"]["holdfast"], separators=(",", ":"))
        header = json.dumps(value | {"__metadata__": {"holdfast": state}}).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + before[8 + size :]
    if SEAL in value:
        fields = {name: each for name, each in value.items() if name != SEAL}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        value = fields | {SEAL: hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(value, indent=2).encode() + b"\n"


def choose_files(files: dict[str, bytes]) -> list[str]:
    """Return the newest file of each kind, of commits and checkpoints the one before, too, and all settings."""
    kinds: dict[str, list[str]] = {}
    for name in files:
        folder, _, last = name.rpartition("/")
        kinds.setdefault(last if "/epoch-" in folder else folder, []).append(name)
    few = {"toy": 9, "toy/commits": 2, "checkpoint.safetensors": 2, "metadata.json": 2, "toy/configs": 9}
    return [name for kind, names in kinds.items() for name in sorted(names)[-few.get(kind, 1) :]]


def list_leaves(name: str, data: bytes) -> Iterator[Leaf]:
    """Yield each value of a file that contains no others, and the keys of its inner objects."""
    if name.endswith((".html", ".tar")):
        return
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), parse(data))]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [((*path, key), each) for key, each in value.items()]
            yield from ((name, (*path, key), True) for key in value if path)
        elif isinstance(value, list) and value:
            waiting += [((*path, number), each) for number, each in enumerate(value[:2])]
        elif path != (SEAL,):
            yield name, path, False


def put(value: Any, path: Sequence[Any], new: Any, *, is_key: bool) -> None:
    """Replace a leaf, or its key; an empty list or object gets an item."""
    *outer, last = path
    for each in outer:
        value = value[each]
    if is_key:
        value[new] = value.pop(last)
    else:
        value[last] = [new] if isinstance(value[last], list) else {new: new} if isinstance(value[last], dict) else new


def forge(files: dict[str, bytes], leaf: Leaf, new: str) -> dict[str, bytes]:
    """Return the files of a run with a different value in a leaf, and all hashes made consistent with it."""
    name, path, is_key = leaf
    value = parse(files[name])
    put(value, path, new, is_key=is_key)
    if name.startswith("toy/config") and path[0] in ("config", "identity"):  # both have to say the same
        with contextlib.suppress(KeyError, IndexError, TypeError):
            put(value["identity" if path[0] == "config" else "config"], path[1:], new, is_key=is_key)
    todo = {each: spell(value, data) for each, data in files.items() if data == files[name]}  # and its copies
    files = dict(files)
    while todo:
        changed, data = todo.popitem()
        before, files[changed] = files[changed], data
        renamed = _list_hashes(before, data)
        for each, content in list(files.items()):
            found = _rename(todo.get(each, content), renamed)
            if each != changed and found != todo.get(each, content):
                todo[each] = spell(json.loads(found), found) if SEAL.encode() in found[-200:] else found
            if (other := _rename(each.encode(), renamed).decode()) != each:
                files[other] = files.pop(each)
                todo |= {other: todo.pop(each)} if each in todo else {}
    return files


def _rename(data: bytes, hashes: dict[bytes, bytes]) -> bytes:
    for old, new in hashes.items():
        data = data.replace(old, new)
    return data


def _list_hashes(before: bytes, after: bytes) -> dict[bytes, bytes]:
    """Return which hashes of a file others may name, each with the hash that takes its place."""
    pairs = {hashlib.sha256(before).hexdigest(): hashlib.sha256(after).hexdigest()}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        old, new = json.loads(before), json.loads(after)
        pairs[old[SEAL]] = new[SEAL]
        if "identity" in new:
            pairs[old["fingerprint"]] = fingerprint(new["identity"])
    return {old.encode(): new.encode() for old, new in pairs.items() if old != new}


# ---- the commands


class Watch:
    """The audit hook of this process and its children: what they open of a planted word, outside of the run.

    Attributes:
        knows: whether the commands have run on the run as it was: from then on each new connection or process is wrong.
    """

    def __init__(self, run: Path, mark: Path) -> None:
        self.knows = False
        self._usual: set[str] = set()
        self._run, self._mark = f"{os.path.realpath(run)}/", os.open(mark, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        sys.addaudithook(self._note)

    def take(self) -> list[str]:
        """Return what was found since the last call."""
        data = os.pread(self._mark, os.fstat(self._mark).st_size, 0)
        os.ftruncate(self._mark, 0)
        return data.decode().splitlines()

    def _note(self, event: str, values: tuple[object, ...]) -> None:
        connects = event.startswith(CONNECTING)
        if not (connects or event in OPENING or event.startswith(CHANGING)):
            return
        shown, program = repr(values), f"{event} {values[0]}"
        if connects and not self.knows:
            self._usual.add(program)
        is_new = event.startswith("subprocess.") and program not in self._usual
        if is_new or (WORD in shown and not self._is_inside(values)):
            os.write(self._mark, f"{event} {shown}\n".encode())

    def _is_inside(self, values: tuple[object, ...]) -> bool:
        paths = [each for each in values if isinstance(each, str | bytes) and WORD in os.fsdecode(each)]
        return bool(paths) and all(os.path.realpath(os.fsdecode(path)).startswith(self._run) for path in paths)


class Ended(BaseException):
    """The exception that ends a command after its time."""


def call(command: str, names: dict[str, str]) -> tuple[int, str]:
    """Call a command in this process; return its exit code and its output. -1: it doesn't end; -2: a traceback."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Ended

    arguments, out, is_endless = command.split(), io.StringIO(), command.startswith("watch")
    for name, path in names.items():
        arguments = [each.replace(name, path) for each in arguments]
    signal.signal(signal.SIGALRM, end)
    signal.alarm(WATCHED_S if is_endless else ENDS_WITHIN_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            if arguments[0] == "flow":
                return _call_flow(*arguments[1:]), ""
            return holdfast.cli.run_app(holdfast.cli.app, arguments), out.getvalue()
    except Ended:
        return (0 if is_endless else -1), out.getvalue()
    except SystemExit as ended:
        return (ended.code if isinstance(ended.code, int) else 1), out.getvalue()
    except BaseException as error:
        return -2, f"{out.getvalue()}{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def _call_flow(name: str, *parameters: str) -> int:
    """Call a flow. Its output is left out, because Prefect writes a traceback of each error into it."""
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    try:
        flow(**dict(parameter.split("=", 1) for parameter in parameters))
    except HoldfastError as error:
        return error.exit_code
    return 0


def walk(place: str, kind: str, part: int, parts: int, turn: int) -> int:
    """Walk over every ``parts``-th leaf from ``part`` on, in a random order; print what is wrong. Return 1 for that.

    Args:
        place: the folder of `make_run`.
        kind: which of `COMMANDS` follow.
        turn: which opener each leaf gets: turns from 0 to the number of `OPENERS` plant each of them in each leaf.
    """
    root = Path(place)
    original, store, out = root / "project" / "runs", root / "project" / "copies", root / "out"
    names = {"RUN": f"{store}/toy", "OTHER": f"{root}/project/others/toy", "STORE": str(store), "OUT": str(out)}
    names["PLACE"] = place
    os.environ["HOME"] = place
    os.chdir(root / "project")
    (root / WORD).mkdir(exist_ok=True)
    (root / WORD / "data.txt").write_text("a secret")
    watch = Watch(store, root / "mark")
    if kind == "flows":
        importlib.import_module("tests.support.forked_flows").prepare()
    else:
        fork_ranks()
    _examine_once()
    files = read_files(original)
    lay(original, store, out)
    for command in COMMANDS[kind]:
        code, said = call(command, names)
        assert code >= 0, (command, said)
    watch.take()
    watch.knows = True
    leaves = [leaf for name in choose_files(files) for leaf in list_leaves(name, files[name])]
    random.Random(4).shuffle(leaves)
    counts = {"leaves": 0, "all": len(leaves), "commands": 0, "wrong": 0, "turn": turn}
    for number, leaf in itertools.islice(enumerate(leaves), part % parts, None, parts):
        opener = OPENERS[(number + turn) % len(OPENERS)]
        lay(original, store, out, files, forge(files, leaf, opener.replace("PLACE", place)))
        for command in COMMANDS[kind]:
            code, said = call(command, names)
            wrong = watch.take() + ([f"{code}: {said[-600:]}"] if code < 0 or "Traceback" in said else [])
            counts["commands"] += 1
            counts["wrong"] += bool(wrong)
            if wrong:
                print(json.dumps({"leaf": leaf, "opener": opener, "command": command, "wrong": wrong[:3]}))
        counts["leaves"] += 1
        print(json.dumps(counts), flush=True)
    return int(counts["wrong"] > 0)


def _examine_once() -> None:
    """Let `doctor` measure the machine only once for equal settings: that takes half a minute, and reads no record."""
    room: Any = doctor
    examine, known = room.examine, dict[str, Any]()

    def remember(*settings: Any) -> Any:
        if repr(settings) not in known:
            known[repr(settings)] = examine(*settings)
        return known[repr(settings)]

    room.examine = remember


def lay(
    original: Path,
    store: Path,
    out: Path,
    files: dict[str, bytes] | None = None,
    forged: dict[str, bytes] | None = None,
) -> None:
    """Put the runs as they were into the store, and then those files that are forged."""
    for folder in (store, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, store)
    out.mkdir()
    known, now_there = files or {}, forged or {}
    for name in known.keys() - now_there.keys():
        (store / name).unlink()
    for name, data in now_there.items():
        if known.get(name) != data:
            (store / name).write_bytes(data)
