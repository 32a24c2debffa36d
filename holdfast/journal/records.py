"""The records of a run: JSON files, each with the hash of its own content."""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import ConfigError, RecordDamaged
from holdfast.journal.endings import Ending
from holdfast.machine.slow_ranks import SlowRank
from holdfast.store import Store

FORMAT_VERSION = 1
SHA256 = r"^[0-9a-f]{64}$"
FILE = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
# The pattern of a checkpoint folder's name. It doesn't match a path that leads out of the run's folder, or a folder of
# records.
FOLDER = r"^epoch-[0-9]{4,9}(-step-[0-9]{8,12})?(\.[0-9]{1,6})?$"
# The largest size of a record that Holdfast writes. A longer file is refused before it is read into memory.
MAX_RECORD_BYTES = 64 * 2**20
# The largest number of values in a record that Holdfast writes. A file with more values is refused, because an empty
# list, two bytes in the file, takes 60 bytes in memory.
MOST_VALUES = 500_000
# The maximum number of levels in a record. pydantic can't write more than 255, and Python's recursion ends soon above.
MOST_DEPTH = 200
SEAL = "record_sha256"
# The name of the HTML page that is generated from the records.
REPORT = "report.html"
# Bounds of the numbers in records, so that readers can compute with the numbers. JavaScript's integers are exact up to
# 2**53. No run lasts 300 years. Times stay within the range of every platform's clock, even after an addition.
MOST_STEPS, MOST_SECONDS = 2**53, 1e10
YEARS = range(1970, 9000)
# The words for the numbers that a spike is in.
SPIKE_NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


def _check_time(text: str) -> str:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError("the time has no offset from UTC")
    if time.year not in YEARS:
        raise ValueError(f"the time is not between the years {YEARS.start} and {YEARS.stop}")
    return text


# A point in time in the format of records: ISO 8601 with the offset from UTC.
Time = Annotated[str, AfterValidator(_check_time)]
# A `Time`; empty in a record that was written before the field existed.
LaterTime = Annotated[str, AfterValidator(lambda text: text and _check_time(text))]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]


class Record(BaseModel):
    """A JSON file whose key ``record_sha256`` is the hash of all its other keys, so that every flipped bit is noticed.

    Unknown keys, which a later version may have added, are ignored.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True, protected_namespaces=())

    def to_bytes(self) -> bytes:
        fields = json.loads(self.model_dump_json())  # don't use model_dump: only pydantic's JSON has null for NaN
        return (json.dumps(fields | {SEAL: _hash_fields(fields)}, indent=2) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """Return the record that `to_bytes` wrote.

        Raises:
            RecordDamaged: the bytes were changed.
        """
        if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:  # an upper bound of the values, without parsing
            raise RecordDamaged(f"{name} can't be read: it has more than {MOST_VALUES} values")
        try:
            fields = json.loads(data, parse_constant=_refuse_constant)
            if b"\\ud" in data.lower():  # for example one half of a surrogate pair, which UTF-8 can't encode
                json.dumps(fields, ensure_ascii=False).encode()
            seal = fields.pop(SEAL)
            if seal != _hash_fields(fields):
                raise ValueError(f"the record's content doesn't hash to its {SEAL}")
            if _is_deeper(fields, MOST_DEPTH):
                raise ValueError(f"the record has values nested deeper than {MOST_DEPTH} levels")
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise RecordDamaged(f"{name} can't be read: {field + ': ' if field else ''}{first['msg']}") from None
        except KeyError as error:
            raise RecordDamaged(f"{name} can't be read: it has no key {error.args[0]}") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RecordDamaged(f"{name} can't be read: {error}") from None


def _hash_fields(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_deeper(value: Any, most: int) -> bool:
    """Return whether objects and lists are nested deeper than ``most`` levels. Don't recurse."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


AnyRecord = TypeVar("AnyRecord", bound=Record)


def read_record(store: Store, cls: type[AnyRecord], name: str) -> AnyRecord:
    """Read a record from a store.

    Raises:
        NameMissing: no file has this name.
        RecordDamaged: the record can't be read.
    """
    data = store.read(name, 0, MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        raise RecordDamaged(f"{name} can't be read: it is larger than {MAX_RECORD_BYTES} bytes")
    return cls.from_bytes(data, name)


def read_commit(store: Store, number: int) -> "Commit":
    """Read the commit with this number from a run's folder.

    Raises:
        NameMissing: there is no such commit.
        RecordDamaged: the commit's record can't be read.
    """
    name = record_name("commits", number)
    commit = read_record(store, Commit, name)
    if commit.number != number:
        raise RecordDamaged(f"{name} contains the record of a different commit, {commit.number}")
    return commit


def record_name(folder: str, number: int) -> str:
    """Return the name of a numbered record, such as ``commits/00000007.json``."""
    return f"{folder}/{number:08d}.json"


def now() -> str:
    """Return the current time in the format of records: UTC, ISO 8601, whole seconds.

    Raises:
        ConfigError: no record can have the time of this machine's clock.
    """
    return _in_years(datetime.now(UTC)).isoformat(timespec="seconds")


def seconds_of(time: str) -> float:
    """Convert a record's time to seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()


def format_time(seconds: float) -> str:
    """Return a time in seconds since 1970 as ISO 8601 text in UTC, to the millisecond.

    Raises:
        ConfigError: no record can have this time.
    """
    return _in_years(datetime.fromtimestamp(seconds, UTC)).isoformat(timespec="milliseconds")


def _in_years(time: datetime) -> datetime:
    if time.year not in YEARS:
        raise ConfigError(
            f"this machine's clock is wrong: it says {time:%Y-%m-%d}, and records can have times from {YEARS.start} "
            f"to {YEARS.stop - 1} only",
            hint="set this machine's clock",
        )
    return time


class RunRecord(Record):
    """``run.json``: the run's name, recipe and format."""

    format: int = Field(ge=1)
    run: str
    recipe: str
    first_commit: int = Field(1, ge=1, description="above 1 if the run was unpacked from a checkpoint")
    packed: bool = Field(False, description="whether the run was unpacked, so that its first commit has no attempt")
    imported: bool = Field(False, description="whether the run begins with an import of another program's checkpoint")
    created_at: Time


class ConfigRecord(Record):
    """``config.snapshot.json`` and the files in ``configs/``: settings and their fingerprint."""

    fingerprint: str = Field(pattern=SHA256)
    identity: dict[str, Any]
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the first settings with the fingerprint: ``configs/<fingerprint>.json``."""
        return config_name(self.fingerprint)

    @property
    def snapshot_name(self) -> str:
        """The name of later settings with the same fingerprint: ``configs/<fingerprint>-<hash of all>.json``."""
        return f"configs/{self.fingerprint}-{_hash_fields(json.loads(self.model_dump_json()))[:16]}.json"


# Reasons for the start of an attempt that trains nothing: an audit holds the run, or a person releases it.
HELD, RELEASED = "held", "released"


class AttemptRecord(Record):
    """``attempts/00000003.json``: one process life of a run. Its number is the fencing token: the highest may write."""

    number: int = Field(ge=1)
    why: str
    created_at: Time
    began_at: LaterTime = Field("", description="when its ranks were started; empty, as in older records, if unknown")
    host: str
    pid: int
    writer: str = Field("", description="a random token; attempts of older versions have none")
    environment: dict[str, Any]
    lineage: dict[str, Any] = Field(
        default_factory=dict,
        description="differences from the previous attempt: accepted changes, the machine, a different parent commit",
    )

    @property
    def is_training(self) -> bool:
        """Return whether the attempt may have trained: it is neither a hold nor the release of a hold."""
        return self.why not in (HELD, RELEASED)


class EndingRecord(Record):
    """``endings/00000003.json``: how an attempt ended, recorded by the attempt itself or by a later process."""

    number: int = Field(ge=1, description="the number of the attempt")
    reason: str = Field(description="a name in holdfast.journal.endings.REASONS")
    message: str
    step: int = Field(ge=0, description="the newest step committed by then")
    created_at: Time

    @property
    def ending(self) -> Ending:
        """The record's content without its number and time."""
        return Ending(self.reason, self.message, self.step)


class FileRecord(BaseModel):
    """One file of a checkpoint, as it was committed."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(pattern=FILE)
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=SHA256)


class Origin(BaseModel):
    """The source of an imported checkpoint, which another program has trained.

    Attributes:
        form: the source's form, such as ``torch`` or ``trainer``; see `holdfast.extensions.importing`.
        source: the path of the file or folder, as it was given.
        sha256: the SHA-256 of the file, or of ``sha256sum``'s listing of the folder's files.
        step: the step from which the run continues.
        lacks: the parts of the run's state that are missing in the source; the run starts with the program's own values
            for them.
    """

    model_config = ConfigDict(frozen=True)

    form: str
    source: str
    sha256: str = Field(pattern=SHA256)
    step: int = Field(ge=1, le=MOST_STEPS)
    lacks: list[str] = []

    def __str__(self) -> str:
        return f"{self.source} ({self.form}, step {self.step}, sha256 {self.sha256[:12]})"


RehearsalKind = Literal["commit", "inside", "across", "stop"]


class RehearsedSteps(BaseModel):
    """The steps of one equal rehearsal.

    Attributes:
        kind: where the rehearsal started: at a ``commit``; ``inside`` a chunk; inside a chunk, and then ``across`` an
            epoch's end; or at a ``stop``, after whose save the ranks trained on.
        start: the step of the checkpoint from which new ranks started.
        stop: the last step that they trained.
        has_end: whether an epoch's end is inside these steps, so that a step of the next epoch was trained.
    """

    model_config = ConfigDict(frozen=True)

    kind: RehearsalKind
    start: int = Field(ge=1, le=MOST_STEPS)
    stop: int = Field(ge=1, le=MOST_STEPS)
    has_end: bool


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradient norm is far above the values of the steps before.

    Attributes:
        name: ``loss`` or ``grad_norm``.
        value: the step's loss or gradient norm; None if it isn't finite.
        usual: the median of the steps before; None if there were too few steps.
    """

    step: int
    name: str
    value: float | None
    usual: float | None

    def __str__(self) -> str:
        value = "not finite" if self.value is None else f"{self.value:.4g}"
        usual = "" if self.usual is None else f", usually {self.usual:.4g}"
        return f"{SPIKE_NAMES.get(self.name, self.name)} {value}{usual}"


class Commit(Record):
    """``commits/00000007.json``: a checkpoint that counts."""

    number: int = Field(ge=1)
    parent: int = Field(ge=0, description="the commit from which it was trained; 0 for none")
    attempt: int = Field(ge=1)
    step: int = Field(ge=1, le=MOST_STEPS)
    epoch: int = Field(ge=0, le=MOST_STEPS, description="epochs completed")
    path: str = Field(pattern=FOLDER)
    files: list[FileRecord]
    metrics: dict[str, float | None] = Field(
        description="avg_loss, and at the end of an epoch the results of its evaluation"
    )
    checkpoint_sha256: str = Field(pattern=SHA256)
    previous_checkpoint_sha256: str = Field(pattern=rf"{SHA256}|^$")
    previous_record_sha256: str = Field(
        pattern=rf"{SHA256}|^$", description="the SHA-256 of the record of commit number - 1"
    )
    config_fingerprint: str = Field(pattern=SHA256)
    why: str = Field(description="chunk, preempted, adopted or imported")
    created_at: Time
    loss: float | None = Field(None, description="mean loss of its steps; None if unknown or not finite")
    trained_at: LaterTime = Field("", description="when its last step ended; empty, as in older records, if unknown")
    train_s: Seconds = Field(0.0, description="seconds that its steps took; each of these times is 0 if unknown")
    slow_s: Seconds = Field(
        0.0, description="the part of train_s by which the previous commit's save delayed these steps, in seconds"
    )
    stall_s: Seconds = Field(0.0, description="seconds that training paused for its save")
    save_s: Seconds = Field(0.0, description="seconds from the copy of the state until the checkpoint was durable")
    restart_s: Seconds = Field(0.0, description="seconds from the start of its ranks until they began to train")
    slow_rank: SlowRank | None = Field(
        None, description="the rank for which the others waited for over a fifth of the time; else null"
    )
    spikes: list[Spike] = Field([], description="its steps whose loss or gradient norm has jumped, at most eight")
    is_last: bool = Field(False, description="whether the ranks ended with this commit, and trained no step after it")
    hosts: list[str] = Field(
        [],
        description="the host of each rank, by rank; empty if the ranks were on one node, and in older records",
    )
    rehearsed: list[Annotated[int, Field(ge=1, le=MOST_STEPS)]] = Field(
        [], description="the steps at which the last equal rehearsals began, oldest first"
    )
    rehearsals: list[RehearsedSteps] = Field(
        [],
        description="the first and last step of each of these rehearsals; older commits have none, because their "
        "rehearsals began at commits",
    )
    not_rehearsed: str = Field("", description="the reason why no rehearsal was made; empty if one was or will be made")
    unrehearsed_s: Seconds = Field(0.0, description="seconds that the steps since the last equal rehearsal took")
    rehearse_s: Seconds = Field(0.0, description="seconds for which a rehearsal delayed its steps")
    inexact: str = Field("", description="the difference that a rehearsal found, if the run continued all the same")
    unproved: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="the numbers of the last commits whose steps began with a resume that no rehearsal has checked"
    )
    unkept: list[str] = Field(
        [],
        description="values that steps change and no checkpoint contains, of which a run has warned, eight at most",
    )
    records: dict[str, str] = Field(
        default_factory=dict,
        description="the records that this commit relies on, by name; see holdfast docs FORMAT; empty in older commits",
    )
    origin: Origin | None = Field(None, description="the source of an imported checkpoint; None if the run trained it")

    @property
    def first_start(self) -> int:
        """The step from which a run with this first commit began: the commit's step if it was imported, otherwise 0."""
        return self.step if self.origin else 0

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def shown_loss(self) -> float | None:
        """The mean loss of the commit's steps; None if it isn't finite.

        For a commit of an earlier version, the mean loss of the epoch until this commit.
        """
        return self.metrics.get("avg_loss") if self.loss is None else self.loss

    @property
    def shown_metrics(self) -> dict[str, float | None]:
        """The metrics as they are shown to the user, with `shown_loss` as ``avg_loss``."""
        return {name: self.shown_loss if name == "avg_loss" else value for name, value in self.metrics.items()}

    @property
    def verdict(self) -> str:
        """Return a sentence on the run's rehearsals up to this commit; see `describe_rehearsals`."""
        return describe_rehearsals(self, "RUN")


def describe_rehearsals(commit: Commit, run: str) -> str:
    """Return a sentence on the results of a run's rehearsals up to a commit: from which steps they started.

    Args:
        run: <store>/<run>, for the command in the sentence.
    """
    if commit.inexact:
        return commit.inexact
    rehearsed = _describe_starts(commit)
    if commit.unkept:
        rehearsed += f"; no checkpoint contains {', '.join(commit.unkept)}"
    if not commit.unproved:
        return f"continues exactly: {rehearsed}" if commit.rehearsed and not commit.unkept else rehearsed
    numbers = ", ".join(map(str, commit.unproved))
    some = f"commits {numbers} begin" if len(commit.unproved) > 1 else f"commit {numbers} begins"
    audit = f"holdfast audit {run} --commit {commit.unproved[-1]}"
    return f"{rehearsed}; unproved: {some} after a stop or a kill that left no steps to compare ({audit})"


def _describe_starts(commit: Commit) -> str:
    if not commit.rehearsed:
        return f"not rehearsed: {commit.not_rehearsed}" if commit.not_rehearsed else "not rehearsed"
    steps = f"step{'s' if len(commit.rehearsed) > 1 else ''} {', '.join(map(str, commit.rehearsed))}"
    has_end = any(each.has_end for each in commit.rehearsals)
    return f"rehearsed from {steps}; {'' if has_end else 'not '}across an epoch's end"


class RehearsalRecord(Record):
    """``rehearsals/00000003.json``: steps after a commit that no checkpoint contains.

    The ranks that had trained the commit also trained these steps: in a rehearsal that found a difference, or after
    their save when they were told to stop. The next attempt has to train the same trail from the same commit before it
    commits anything.
    """

    attempt: int = Field(ge=1)
    commit: int = Field(ge=1)
    lines: list[dict[str, Any]] = Field(description="the trail of these steps, a line for each")
    difference: str = Field(description="the difference that a rehearsal found; empty for the steps of a stop")
    unregistered: list[dict[str, Any]] = Field(
        [], description="for a stop: the values that the checkpoint doesn't contain, each with a digest"
    )
    created_at: Time


class IndexRecord(Record):
    """``index/00000005.json``: an index entry for a record that no commit names, such as a pin.

    The entry says whether the record was written, or is about to be deleted on purpose. So ``verify`` can notice that a
    record was lost. If a name has several entries, the last entry counts.
    """

    number: int = Field(ge=1)
    name: str
    is_there: bool
    created_at: Time


class Latest(Record):
    """``latest.json``: a hint at the newest commit."""

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


class FolderRecord(Record):
    """``folders/epoch-0004.json``: the only commit that may ever use this checkpoint folder."""

    path: str = Field(pattern=FOLDER)
    commit: int = Field(ge=0, description="the commit's number; 0 if no commit may name it, because it is deleted")
    created_at: Time


class Quarantine(Record):
    """``quarantine/00000006.json``: a commit that must not be used again."""

    commit: int = Field(ge=1)
    reason: str
    attempt: int
    created_at: Time


class Pruned(Record):
    """``pruned/00000004.json``: a commit whose checkpoint is deleted by retention."""

    commit: int = Field(ge=1)
    path: str = Field(pattern=FOLDER)
    checkpoint_sha256: str = Field(pattern=SHA256)
    size_bytes: int
    created_at: Time


class Pin(Record):
    """``pins/00000004.json``: a commit whose checkpoint must not be deleted by retention."""

    commit: int = Field(ge=1)
    created_at: Time
    explains: int = Field(
        0,
        ge=0,
        description="the commit for whose explanation or skip the run pins this one, until that is done; 0 "
        "for a person's pin",
    )


class AuditRecord(Record):
    """``audits/00000007-00000002.json``: audit 2 of commit 7. An audit trains a commit's steps again."""

    commit: int = Field(ge=1)
    number: int = Field(ge=1, description="the number of this audit among the commit's audits")
    from_commit: int = Field(ge=0, description="the commit that the replay began with; 0 for the beginning of the run")
    checkpoint_sha256: str = Field(
        pattern=rf"{SHA256}|^$", description="the content id that the replay ended with; empty if the gate refused it"
    )
    notes: list[str] = Field(description="the reason why equal bits were not promised; empty if they were promised")
    host: str
    environment: dict[str, Any] = Field(description="the machine, as in an attempt's record, without the code")
    created_at: Time
    resumes: list[Annotated[int, Field(ge=0, le=MOST_STEPS)]] = Field(
        [], description="the steps at which the run may have been resumed while the replay trained on without a resume"
    )
    first_step: int | None = Field(
        None, ge=0, le=MOST_STEPS, description="the number of the first step that differs, if any"
    )
    first_differs_in: list[str] = Field([], description="the fields that differ in that step, causes first")
    first_tensors: list[str] = Field([], description="the first tensors that differ after that step")
    seed: int | None = Field(None, description="the seed of the choice of this commit; null if a person chose it")
    share: float | None = Field(
        None, ge=0, le=1, description="the fraction of the training time that audits may take; null if not set"
    )


class PruneEntry(BaseModel):
    """One checkpoint in the report of a prune.

    Attributes:
        why: the rule that keeps the checkpoint, or the reason for its protection; empty for a pruned checkpoint.
    """

    model_config = ConfigDict(frozen=True)

    commit: int
    step: int
    path: str
    checkpoint_sha256: str
    size_bytes: int
    why: str


class PruneReport(Record):
    """``prunes/00000009.json``: the report of a prune when commit 9 was the newest, newest checkpoints first.

    Attributes:
        kept: the checkpoints that the policy keeps.
        protected: the checkpoints that stay although the policy doesn't keep them; ``why`` says what protects them.
        pruned: the deleted checkpoints.
        unreadable: the commits whose records can't be read. Their checkpoints' folders are unknown, so they aren't
            deleted.
        unfinished: folders of checkpoints that an earlier prune didn't finish deleting, now deleted.
        debris: folders of checkpoints that dead attempts left and no commit names, now deleted.
        dry_run: whether the prune only made this report, and deleted nothing.
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


def config_name(fingerprint: str) -> str:
    """Return the name of the record of the settings first used with a fingerprint: ``configs/<fingerprint>.json``."""
    return f"configs/{fingerprint}.json"


def folder_record_name(path: str) -> str:
    """Return the name of the record that assigns a checkpoint folder to a commit: ``folders/epoch-0004.json``."""
    return f"folders/{path}.json"


def metrics_name(number: int) -> str:
    """Return the name of a commit's trail: ``metrics/00000007.jsonl``."""
    return f"metrics/{number:08d}.jsonl"


def shown_name(number: int) -> str:
    """Return the name of the file with a commit's shown texts and pictures: ``shown/00000007.jsonl``."""
    return f"shown/{number:08d}.jsonl"


def audit_name(commit: int, number: int) -> str:
    """Return the name of an audit of a commit: ``audits/00000007-00000002.json``."""
    return f"audits/{commit:08d}-{number:08d}.json"


def signature_name(number: int, attempt: int) -> str:
    """Return the name of the signature that an attempt made for a commit: ``signatures/00000007-00000003.json``."""
    return f"signatures/{number:08d}-{attempt:08d}.json"
