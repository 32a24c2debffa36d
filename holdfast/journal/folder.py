"""A run's folder on a store: its identity, its saved settings, and the numbers of its records."""

import contextlib
import hashlib
import logging
from typing import Any

from pydantic import ValidationError

from holdfast.config import Retention
from holdfast.config.earlier import read_earlier
from holdfast.errors import NameMissing, NameTaken, RecordDamaged, RunUnknown, WrongUse
from holdfast.journal.names import CHAINS, REACH, SUFFIXES, Numbered, sort_names
from holdfast.journal.records import FORMAT_VERSION, ConfigRecord, RunRecord, config_name, now, read_record
from holdfast.provenance.fingerprint import to_plain
from holdfast.store import Store

log = logging.getLogger(__name__)


class RunFolder:
    """One run's folder on a store.

    Attributes:
        run: the run's name.
        store: the folder. Writes fail if the folder is missing, because a new folder would prevent a moved run from
            being moved back.
        place: the same folder, for the beginning of the run: a write creates the folder if it is missing.
        store_url: the URL of the store that contains the folder.
        strays: a line of text for each stray name (a name of no record) that was found among the records.
        settings: the SHA-256 of each settings record of this process, by the record's name; empty if an earlier process
            wrote the record.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.run = run
        self.place = store.inside(run)
        self.store = self.place.existing()
        self.store_url = store.url
        self.strays: list[str] = []
        self._warned: set[str] = set()
        self._configs: dict[str, ConfigRecord] = {}  # cached, because a record never changes
        self.settings: dict[str, str] = {}

    def exists(self) -> bool:
        """Return whether the run exists: whether its folder has a ``run.json``."""
        return self.store.exists("run.json")

    def read_run(self) -> RunRecord:
        """Read ``run.json``.

        Raises:
            RunUnknown: there is no such run.
            RecordDamaged: the record can't be read.
            WrongUse: a later version of Holdfast wrote the run.
        """
        try:
            record = read_record(self.store, RunRecord, "run.json")
        except NameMissing:
            if "run.json" in self.store.list():
                raise RecordDamaged(f"run.json of run {self.run!r} is not a file") from None
            raise RunUnknown(
                f"there is no run {self.run!r} in {self.store_url}",
                hint=f"holdfast show --store {self.store_url} lists the runs there",
            ) from None
        if record.format > FORMAT_VERSION:
            raise WrongUse(
                f"run {self.run!r} is stored in format {record.format}; this version of Holdfast reads formats up to "
                f"{FORMAT_VERSION}",
                hint="upgrade holdfast",
            )
        return record

    def find_rename(self) -> str:
        """Return a message if ``run.json`` names a different run than this folder; otherwise an empty text.

        The folder is then a copy under another name, or the file belongs to another run.
        """
        named = self.read_run().run
        return (
            "" if named == self.run else f"run.json is the record of a run {named!r}, and this folder is {self.run!r}"
        )

    def begin(self, recipe: str, *, is_imported: bool = False) -> RunRecord:
        """Return the run's record, ``run.json``. Create the file if it is missing, and replace it if it is damaged.

        Args:
            is_imported: whether the run begins with an imported checkpoint.
        """
        try:
            return self.read_run()
        except RunUnknown:
            write = self.place.create
        except RecordDamaged as error:
            self.warn(f"{error}; run.json is written anew")
            write = self.store.replace
        record = RunRecord(
            format=FORMAT_VERSION,
            run=self.run,
            recipe=recipe,
            first_commit=min(self.numbers("commits"), default=1),
            imported=is_imported,
            created_at=now(),
        )
        try:
            write("run.json", record.to_bytes())
        except NameTaken:  # another process has just begun the run
            return self.read_run()
        return record

    def record_config(self, fingerprint: str, identity: dict[str, Any], config: dict[str, Any]) -> None:
        """Save the current settings as ``config.snapshot.json``, and permanently in ``configs/``.

        ``configs/<fingerprint>.json`` keeps the settings that were first used with this fingerprint. If the current
        settings differ from these, ``configs/<fingerprint>-<hash>.json`` is added. Only operational settings can
        differ, because all other settings change the fingerprint.
        """
        record = ConfigRecord(fingerprint=fingerprint, identity=to_plain(identity), config=config)
        data = record.to_bytes()
        self.settings = {record.name: hashlib.sha256(data).hexdigest()}
        try:
            self.store.create(record.name, data)
        except NameTaken:
            first = self._read_config(record.name)
            if first is None:
                self.store.replace(record.name, data)
            elif first != record:
                with contextlib.suppress(NameTaken):
                    self.store.create(record.snapshot_name, data)
                self.settings = {record.snapshot_name: self.settings[record.name], record.name: ""}
        self.store.replace("config.snapshot.json", data)

    def read_config(self, fingerprint: str) -> ConfigRecord | None:
        """Return the settings that were first used with this fingerprint; None if they are lost."""
        if fingerprint not in self._configs:
            record = self._read_config(config_name(fingerprint))
            if record is None:
                return None
            self._configs[fingerprint] = _without_earlier(record)
        return self._configs[fingerprint]

    def read_snapshot(self) -> ConfigRecord | None:
        """Return the settings of the run's last training; None if they are lost, or if nothing was trained yet."""
        record = self._read_config("config.snapshot.json")
        return record and _without_earlier(record)

    def read_epochs(self) -> int | None:
        """Return the setting `epochs` of the run's last training; None if the settings are lost."""
        snapshot = self.read_snapshot()
        epochs = snapshot.config.get("epochs") if snapshot else None
        return epochs if isinstance(epochs, int) else None

    def read_retention(self) -> Retention | None:
        """Return the setting `retention` of the run's last training; None if the settings are lost."""
        snapshot = self.read_snapshot()
        try:
            return Retention.model_validate(snapshot.config["retention"]) if snapshot else None
        except (KeyError, ValidationError):
            return None

    def _read_config(self, name: str) -> ConfigRecord | None:
        try:
            return read_record(self.store, ConfigRecord, name)
        except NameMissing:
            return None
        except RecordDamaged as error:
            self.warn(str(error))
            return None

    def warn(self, message: str) -> None:
        """Log a warning about the run, once for each message."""
        if message not in self._warned:
            log.warning("run %r: %s", self.run, message)
        self._warned.add(message)

    def numbers(self, folder: str, after: int = 0) -> list[int]:
        """Return the sorted record numbers above ``after`` in a folder; see `list_numbered`."""
        return self.list_numbered(folder, after).numbers

    def list_numbered(self, folder: str, after: int = 0) -> Numbered:
        """Return the record numbers above ``after`` in a folder, and the stray names.

        A stray name is not a number, or a number that the run can't have reached. Stray names are ignored, and logged
        once.
        """
        suffix = SUFFIXES.get(folder, ".json")
        found = sort_names(self.store.list(folder, after=f"{after:08d}{suffix}" if after else ""), suffix)
        if found.numbers and found.numbers[-1] > REACH:
            base = after if after and folder in CHAINS else self._base_of(folder)
            found = found.within(base) if folder in CHAINS else found.up_to(base + REACH)
        for name in found.strays:
            note = f"{folder}/{name} is not a record of this run; it is ignored"
            self.warn(note)
            self.strays += [note] if note not in self.strays else []
        return found

    def highest(self, folder: str, hint: int) -> int:
        """Return the highest record number in a folder; 0 if the folder has no records.

        Args:
            hint: the highest number that is known. If it is right, the cost of a listing doesn't grow with the run.
        """
        found = self.numbers(folder, after=hint - 1) if hint else []
        return max(found or self.numbers(folder), default=0)

    def can_reach(self, number: int) -> bool:
        """Return whether the run can have reached a commit with this number."""
        return number <= REACH or number <= self.highest("commits", 0) + REACH

    def _base_of(self, folder: str) -> int:
        """Return the base of a folder's numbers: the first number may exceed it by at most `REACH`."""
        if folder == "commits":
            with contextlib.suppress(RunUnknown, RecordDamaged):
                return self.read_run().first_commit - 1
            return 0
        return 0 if folder == "attempts" else self.highest("attempts" if folder == "endings" else "commits", 0)


def _without_earlier(record: ConfigRecord) -> ConfigRecord:
    """Return a copy of a settings record in which settings of earlier versions are renamed or removed."""
    return record.model_copy(update={"config": read_earlier(record.config)[0]})
