"""The records of a run, as JSON files that carry the hash of their own content."""

import hashlib
import json
from datetime import UTC, datetime
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from holdfast.endings import Ending
from holdfast.errors import RecordDamaged
from holdfast.store import Store

FORMAT_VERSION = 1
SHA256 = r"^[0-9a-f]{64}$"
FILE = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
# A checkpoint's folder, and nothing else that a run's folder has: no way out of it, and none to its records.
FOLDER = r"^epoch-[0-9]{4,9}(-step-[0-9]{8,12})?(\.[0-9]{1,6})?$"
# What is longer was not written by us, and is not read into memory.
MAX_RECORD_BYTES = 64 * 2**20
SEAL = "record_sha256"


def _check_time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its offset from UTC")
    return text


# A point in time as records hold it: ISO 8601 with its offset from UTC.
Time = Annotated[str, AfterValidator(_check_time)]


class Record(BaseModel):
    """A JSON file whose key ``record_sha256`` is the hash of all its other keys, so that no bit of it flips unseen.

    Keys that a later version added are passed over.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True, protected_namespaces=())

    def to_bytes(self) -> bytes:
        fields = json.loads(self.model_dump_json())  # which makes NaN null
        return (json.dumps(fields | {SEAL: _hash_fields(fields)}, indent=2) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """The record that `to_bytes` wrote.

        Raises:
            RecordDamaged: its bytes are not what was written.
        """
        try:
            fields = json.loads(data, parse_constant=_refuse_constant)
            if b"\\ud" in data.lower():  # perhaps one half of a character, which can't be written anywhere
                json.dumps(fields, ensure_ascii=False).encode()
            seal = fields.pop(SEAL)
            if seal != _hash_fields(fields):
                raise ValueError(f"its content doesn't hash to its {SEAL}")
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise RecordDamaged(f"{name} can't be read: {field + ': ' if field else ''}{first['msg']}") from None
        except KeyError as error:
            raise RecordDamaged(f"{name} can't be read: it has no {error.args[0]}") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RecordDamaged(f"{name} can't be read: {error}") from None


def _hash_fields(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


AnyRecord = TypeVar("AnyRecord", bound=Record)


def read_record(store: Store, cls: type[AnyRecord], name: str) -> AnyRecord:
    """A record that is on the store.

    Raises:
        NameMissing: there is none of this name.
        RecordDamaged: it can't be read.
    """
    data = store.read(name, 0, MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        raise RecordDamaged(f"{name} can't be read: it is larger than {MAX_RECORD_BYTES} bytes")
    return cls.from_bytes(data, name)


def record_name(folder: str, number: int) -> str:
    """``commits/00000007.json``"""
    return f"{folder}/{number:08d}.json"


def now() -> str:
    """The time as records hold it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunRecord(Record):
    """``run.json``: that there is such a run."""

    format: int = Field(ge=1)
    run: str
    recipe: str
    first_commit: int = Field(1, ge=1, description="later than 1 where the run was unpacked from a checkpoint")
    created_at: Time


class ConfigRecord(Record):
    """``config.snapshot.json`` and the files in ``configs/``: the settings that a fingerprint stands for."""

    fingerprint: str = Field(pattern=SHA256)
    identity: dict[str, Any]
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """``configs/<fingerprint>.json``, for the settings as they were first used."""
        return f"configs/{self.fingerprint}.json"

    @property
    def snapshot_name(self) -> str:
        """``configs/<fingerprint>-<hash>.json``, for the same with other operational settings."""
        return f"configs/{self.fingerprint}-{_hash_fields(json.loads(self.model_dump_json()))[:16]}.json"


class AttemptRecord(Record):
    """``attempts/00000003.json``: one process life; its number is the fencing token."""

    number: int = Field(ge=1)
    why: str
    created_at: Time
    host: str
    pid: int
    writer: str = Field("", description="a random token; attempts from before it was added have none")
    environment: dict[str, Any]
    lineage: dict[str, Any] = Field(
        default_factory=dict, description="what is not as it was: drift that was let through, the machine, an ancestor"
    )


class EndingRecord(Record):
    """``endings/00000003.json``: how an attempt ended, as it said itself, or as was found later."""

    number: int = Field(ge=1, description="the attempt's")
    reason: str = Field(description="a name in holdfast.endings.REASONS")
    message: str
    step: int = Field(ge=0, description="the newest step that was committed then")
    created_at: Time

    @property
    def ending(self) -> Ending:
        """What the record says, without its number and time."""
        return Ending(self.reason, self.message, self.step)


class FileRecord(BaseModel):
    """One file of a checkpoint, as it was when it was committed."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(pattern=FILE)
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=SHA256)


class Commit(Record):
    """``commits/00000007.json``: a checkpoint that counts."""

    number: int = Field(ge=1)
    parent: int = Field(ge=0, description="the commit that it was trained from; 0 for none")
    attempt: int = Field(ge=1)
    step: int = Field(ge=1)
    epoch: int = Field(ge=0, description="epochs completed")
    path: str = Field(pattern=FOLDER)
    files: list[FileRecord]
    metrics: dict[str, float | None] = Field(
        description="avg_loss, and at the end of an epoch what it was evaluated to"
    )
    checkpoint_sha256: str = Field(pattern=SHA256)
    previous_checkpoint_sha256: str = Field(pattern=rf"{SHA256}|^$")
    previous_record_sha256: str = Field(pattern=rf"{SHA256}|^$", description="of the bytes of commit number - 1")
    config_fingerprint: str = Field(pattern=SHA256)
    why: str = Field(description="chunk, preempted or adopted")
    created_at: Time
    train_s: float = Field(0.0, ge=0, description="of its steps; 0 where nobody knows, and so with the others")
    stall_s: float = Field(0.0, ge=0, description="that training stood still for its save")
    save_s: float = Field(0.0, ge=0, description="from when its state was copied until it was durable")
    restart_s: float = Field(0.0, ge=0, description="that its ranks, or their attempt, took to begin")

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Latest(Record):
    """``latest.json``: a hint what the newest commit is."""

    epoch: int
    path: str = Field(pattern=FOLDER)
    created_at: Time
    model_params: int
    optimizer_steps_total: int
    scheduler_type: str
    checkpoint_sha256: str = Field(pattern=SHA256)
    commit: int = Field(ge=1)
    attempt: int = Field(ge=1)
    config_fingerprint: str = Field(pattern=SHA256)


class Quarantine(Record):
    """``quarantine/00000006.json``: a commit that is not to be used again."""

    commit: int = Field(ge=1)
    reason: str
    attempt: int
    created_at: Time


class Pruned(Record):
    """``pruned/00000004.json``: a commit whose checkpoint retention has given up."""

    commit: int = Field(ge=1)
    path: str = Field(pattern=FOLDER)
    checkpoint_sha256: str = Field(pattern=SHA256)
    size_bytes: int
    created_at: Time


class Pin(Record):
    """``pins/00000004.json``: a commit whose checkpoint no retention gives up."""

    commit: int = Field(ge=1)
    created_at: Time


class PruneEntry(BaseModel):
    """One checkpoint in a report.

    Attributes:
        why: the rule that kept it, or what protects it; empty for one that was given up.
    """

    model_config = ConfigDict(frozen=True)

    commit: int
    step: int
    path: str
    checkpoint_sha256: str
    size_bytes: int
    why: str


class PruneReport(Record):
    """``prunes/00000009.json``: what a prune did when commit 9 was the newest; checkpoints are listed newest first.

    Attributes:
        kept: what the policy keeps.
        protected: what the policy would have given up, and what forbade it.
        pruned: what was given up.
        unreadable: commits whose records can't be read; the folders of their checkpoints aren't known, and stay.
        unfinished: folders that were given up before and were still there, and so were deleted once more.
        debris: folders that no commit ever named, from dead attempts, which were deleted too.
        dry_run: nothing was done.
    """

    newest: int = Field(ge=1)
    policy: dict[str, Any]
    kept: list[PruneEntry]
    protected: list[PruneEntry]
    pruned: list[PruneEntry]
    unreadable: list[int]
    unfinished: list[str]
    debris: list[str]
    dry_run: bool
    created_at: Time


def metrics_name(number: int) -> str:
    """``metrics/00000007.jsonl``"""
    return f"metrics/{number:08d}.jsonl"


def signature_name(commit: Commit) -> str:
    """``signatures/00000007-00000003.json``: of a commit, by an attempt that meant to make it."""
    return f"signatures/{commit.number:08d}-{commit.attempt:08d}.json"
