"""The errors that Holdfast raises, as one tree.

::

    HoldfastError
    ├── WrongUse                     exit 1: the user can correct it before anything runs
    │   ├── ConfigError              (ValueError)         a setting is missing, unknown or out of range
    │   ├── RecipeError              (ValueError)         the recipe can't be found or built
    │   ├── ConfigDrift              (RuntimeError)       the run exists with different settings
    │   ├── RunUnknown               (LookupError)        there is no such run on the store
    │   └── DeterminismError         (RuntimeError)       the requested bit-exactness is impossible here
    ├── Damage                       exit 2: bytes on the store are not what was committed
    │   ├── CheckpointDamaged        (ValueError)
    │   ├── RecordDamaged            (ValueError)         a journal record can't be read
    │   ├── NoVerifiedCheckpoint     (RuntimeError)       every commit is damaged or quarantined
    │   ├── NotTrusted               (PermissionError)    no trusted key signed a commit
    │   ├── GateTripped              (RuntimeError)       a resumed model differs from the saved model, or isn't healthy
    │   └── Inexact                  (RuntimeError)       new ranks don't train the same steps as the living ranks
    └── RunStopped                   exit 3: the run ended early; the same command continues it
        ├── StoreError               (OSError)
        │   ├── StoreFull            (OSError)            no space left
        │   ├── StoreDenied          (PermissionError)
        │   ├── Unreadable           (OSError)            a name is there, and the file system can't read it
        │   ├── RunGone              (OSError)            the run's folder was moved or deleted while it was trained
        │   ├── NameTaken            (FileExistsError)    a file of this name exists already
        │   └── NameMissing          (FileNotFoundError)  no file has this name
        ├── StateError               (TypeError)          part of the state can't be saved without a pickle
        ├── RankDied                 (ChildProcessError)  a rank ended unexpectedly; retryable
        │   └── RankHung             (ChildProcessError)  a rank stopped making progress, and was ended; retryable
        ├── OutOfMemory              (MemoryError)        the recipe asked for more memory than there is; retryable
        ├── RecipeFailed             (RuntimeError)       the recipe's own code raised an error; retryable
        │   └── RecipeBroken         (RuntimeError)       an error that new ranks would raise again
        ├── Unhealthy                (RuntimeError)       a health signal left its limits; retryable
        ├── GpuUnhealthy             (RuntimeError)       a GPU that a run would take reports a fault
        ├── SelfTestFailed           (RuntimeError)       a rank's device computes wrong bits
        ├── MachineQuarantined       (RuntimeError)       this machine has computed wrongly; another machine may train
        ├── MachineRefused           (RuntimeError)       an extension or a drain file refuses this machine
        ├── NodesMissing             (TimeoutError)       too few nodes connected to the rendezvous
        ├── ParentQuarantined        (RuntimeError)       a commit's parent was quarantined meanwhile
        ├── FolderTaken              (FileExistsError)    a checkpoint's folder is another commit's, or being deleted
        ├── NoProgress               (RuntimeError)       the same failure at the same step again
        └── Superseded               (RuntimeError)       a later attempt owns the run
            └── RunHeld              (RuntimeError)       an audit holds the run until a person releases it

Each class also inherits the builtin that a caller would catch. ``hint`` tells the user what to do next, ``data`` holds
facts for programs, and ``exit_code`` is the exit code of a command that raises the error. ``is_retryable`` says whether
fresh processes, started from the last verified checkpoint, can help. ``reason`` is the end reason recorded for an
attempt that this error ends.
"""

from typing import Any, ClassVar, Literal

# One of the gate's checks; see `GateTripped`.
Check = Literal["state", "results", "health"]

# The hint of an error in code whose traceback a rank has printed. An attempt replaces this hint by the log's path.
IN_LOG = "the traceback is in the attempt's log"

# The hints of errors whose remedy is longer than a line; see `choose_hint`.
AFTER_AN_END = "holdfast docs troubleshooting#what-to-do-when-an-attempt-ends says what to do"
AFTER_AN_ERROR = "holdfast docs troubleshooting#what-to-do-after-an-error says what to do"


class HoldfastError(Exception):
    """The base class: a message of one line, a ``hint`` at what to do next, and ``data`` for programs."""

    exit_code: ClassVar[int] = 3
    is_retryable: ClassVar[bool] = False
    reason: ClassVar[str] = "stopped"

    def __init__(self, message: str, *, hint: str = "", **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.data = data

    def __str__(self) -> str:
        return self.message

    # When an exception is sent to another process, it is rebuilt from `args`, which lacks the keyword arguments.
    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.data))


def _rebuild(cls: type[HoldfastError], message: str, hint: str, data: dict[str, Any]) -> HoldfastError:
    return cls(message, hint=hint, **data)


class WrongUse(HoldfastError):
    """A mistake that the user can correct before anything runs."""

    exit_code = 1
    reason = "settings"


class ConfigError(WrongUse, ValueError):
    """A setting is missing, unknown or out of range."""


class RecipeError(WrongUse, ValueError):
    """The recipe can't be found or built."""


class ConfigDrift(WrongUse, RuntimeError):
    """The settings differ from the run's saved settings."""


class RunUnknown(WrongUse, LookupError):
    """There is no such run on the store."""


class DeterminismError(WrongUse, RuntimeError):
    """The requested bit-exactness is impossible here."""


class Damage(HoldfastError):
    """Bytes on the store differ from the committed bytes."""

    exit_code = 2
    reason = "damaged"


class CheckpointDamaged(Damage, ValueError):
    """A checkpoint's bytes differ from the hashes in its commit."""


class RecordDamaged(Damage, ValueError):
    """A record of the run can't be read."""


class NoVerifiedCheckpoint(Damage, RuntimeError):
    """Every commit of the run is damaged or quarantined."""


class NotTrusted(Damage, PermissionError):
    """No trusted key signed a commit or a receipt, or a receipt doesn't match the run's store."""


class GateTripped(Damage, RuntimeError):
    """The restored model differs from the saved model, or is unhealthy."""

    reason = "refused"

    def __init__(self, message: str, *, check: Check = "results", hint: str = "", **data: Any) -> None:
        """
        Args:
            check: ``state``: a restored value differs from the loaded value; ``results``: all values are equal, but the
                model computes different results from them than when it was saved; ``health``: a number breaks a limit.
        """
        super().__init__(message, hint=hint, check=check, **data)

    @property
    def blames_checkpoint(self) -> bool:
        """True if an older checkpoint, saved before the model became unhealthy, may pass.

        The bytes of the refused checkpoint verify. If the restored values differ, or the model computes different
        results from them, the program or the machine is the cause, and an older checkpoint wouldn't help.
        """
        return bool(self.data["check"] == "health")


class Inexact(Damage, RuntimeError):
    """New ranks that start from a commit train different steps than the ranks that never stopped."""

    reason = "inexact"


class RunStopped(HoldfastError):
    """The run ended early; the same command continues it."""


class StoreError(RunStopped, OSError):
    """The store refused or failed."""

    reason = "store_failed"


class StoreFull(StoreError):
    """The store has no space left."""


class StoreDenied(StoreError, PermissionError):
    """The store denies this user the right to read or write."""


class Unreadable(StoreError, Damage):
    """A name on the store exists but can't be read: the disk reports an error, or it is a link, a pipe or a device.

    Unlike a cloud that doesn't answer, this error concerns a single name, and retrying doesn't help. So it counts as
    damage, with exit code 2.
    """


class RunGone(StoreError):
    """The run's folder was moved or deleted while the run was trained."""

    reason = "folder_gone"

    @classmethod
    def of(cls, folder: str) -> "RunGone":
        """Return the error for the run in this folder."""
        return cls(
            f"the run's folder {folder} is gone: it was moved or deleted while the run was trained",
            hint="put the folder back; the same command then continues the run",
        )


class NameTaken(StoreError, FileExistsError):
    """A file of this name exists already."""


class NameMissing(StoreError, FileNotFoundError):
    """No file on the store has this name."""


class StateError(RunStopped, TypeError):
    """Part of the state can't be saved without a pickle, or doesn't fit the saved state."""


class RankDied(RunStopped, ChildProcessError):
    """A rank ended unexpectedly."""

    is_retryable = True
    reason = "rank_crashed"


class RankHung(RankDied):
    """A rank makes no progress. Its attempt has ended all ranks."""

    reason = "rank_hung"


class OutOfMemory(RunStopped, MemoryError):
    """The recipe asked for more memory than there is."""

    is_retryable = True
    reason = "out_of_memory"


class RecipeFailed(RunStopped, RuntimeError):
    """The recipe's own code raised an error during training."""

    is_retryable = True
    reason = "recipe_failed"


class RecipeBroken(RecipeFailed):
    """The recipe's own code raised an error that new ranks would raise again, in the same step."""

    is_retryable = False


class Unhealthy(RunStopped, RuntimeError):
    """A health signal left its limits while the recipe trained, or ranks no longer have equal weights."""

    is_retryable = True
    reason = "unhealthy"


class GpuUnhealthy(RunStopped, RuntimeError):
    """A GPU that a run would take, or its driver, reports a fault."""

    reason = "gpu_unhealthy"


class SelfTestFailed(RunStopped, RuntimeError):
    """A rank's device computed different bits when it repeated a computation."""

    reason = "self_test_failed"


class MachineQuarantined(RunStopped, RuntimeError):
    """This machine, or a GPU of it, has computed wrongly, and the store has quarantined it."""

    reason = "machine_quarantined"


class MachineRefused(RunStopped, RuntimeError):
    """An extension, or a drain file, refuses this machine for a run."""

    reason = "machine_refused"


class NodesMissing(RunStopped, TimeoutError):
    """Too few nodes connected in time."""


class ParentQuarantined(RunStopped, RuntimeError):
    """A commit's parent was quarantined meanwhile. The attempt goes back to an earlier commit."""


class FolderTaken(RunStopped, FileExistsError):
    """A checkpoint's folder belongs to another commit, or the folder is being deleted."""


class NoProgress(RunStopped, RuntimeError):
    """A failure happened again at the same step."""

    reason = "no_progress"


class Superseded(RunStopped, RuntimeError):
    """A later attempt owns the run; this attempt must not commit any more."""

    reason = "superseded"


class RunHeld(Superseded):
    """An audit found that a machine computes wrongly, and holds the run until a person ends the hold."""

    reason = "held"

    @classmethod
    def of(cls, run: str, url: str, reason: str) -> "RunHeld":
        """Return the error for a run that is held.

        Args:
            url: the run's folder.
            reason: the verdict of the audits.
        """
        return cls(
            f"run {run!r} is held: {reason}",
            hint=f"holdfast release {url} --rollback goes back to a commit with the right bytes; without --rollback "
            "the run continues from its newest commit",
        )


PAGES: dict[type, str] = {
    Damage: AFTER_AN_ERROR, StoreError: AFTER_AN_ERROR,
    RankDied: AFTER_AN_END, OutOfMemory: AFTER_AN_END, NoProgress: AFTER_AN_END,
}  # fmt: skip


def choose_hint(error: HoldfastError) -> str:
    """Return the hint to print for an error that ends a command: the error's hint, or else the page with the remedy.

    The hint is empty if the error has neither.
    """
    return error.hint or next((PAGES[cls] for cls in type(error).__mro__ if cls in PAGES), "")


def to_json(error: HoldfastError) -> dict[str, Any]:
    """Return an error as a JSON object, which a rank sends to its attempt. `from_json` is the inverse."""
    return {"class": type(error).__name__, "message": error.message, "hint": error.hint, "data": error.data}


def from_json(record: dict[str, Any]) -> HoldfastError:
    """Return the error that `to_json` wrote. An error of a class that isn't in this module becomes a `RunStopped`."""
    cls = globals().get(str(record.get("class")))
    if not (isinstance(cls, type) and issubclass(cls, HoldfastError)):
        cls = RunStopped
    return cls(str(record["message"]), hint=str(record.get("hint", "")), **record.get("data", {}))
