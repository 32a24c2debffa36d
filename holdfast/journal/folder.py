"""A run's folder: that there is such a run, and the settings that it was trained with."""

import contextlib
import logging
from typing import Any

from pydantic import ValidationError

from holdfast.config import Retention
from holdfast.errors import NameMissing, NameTaken, RecordDamaged, RunUnknown, WrongUse
from holdfast.fingerprint import to_plain
from holdfast.journal.names import CHAINS, REACH, SUFFIXES, Numbered, sort_names
from holdfast.journal.records import FORMAT_VERSION, ConfigRecord, RunRecord, now, read_record
from holdfast.store import Store

log = logging.getLogger(__name__)


class RunFolder:
    """One run's folder, on the store that holds it.

    Attributes:
        run: the run's name.
        store: the folder; unless it is there nothing is written, so that a run that was moved may come back.
        place: the same folder, for who begins it.
        store_url: what holds the folder.
        strays: a line for each stray name that was found among the records.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.run = run
        self.place = store.inside(run)
        self.store = self.place.existing()
        self.store_url = store.url
        self.strays: list[str] = []
        self._warned: set[str] = set()
        self._configs: dict[str, ConfigRecord] = {}  # a record never changes

    def exists(self) -> bool:
        """Whether the run was ever begun."""
        return self.store.exists("run.json")

    def read_run(self) -> RunRecord:
        """``run.json``.

        Raises:
            RunUnknown: there is no such run.
            RecordDamaged: it can't be read.
            WrongUse: a later version wrote it.
        """
        try:
            record = read_record(self.store, RunRecord, "run.json")
        except NameMissing:
            raise RunUnknown(
                f"there is no run {self.run!r} in {self.store_url}",
                hint=f"holdfast runs {self.store_url} lists the runs there",
            ) from None
        if record.format > FORMAT_VERSION:
            raise WrongUse(
                f"run {self.run!r} has format {record.format}; this version reads up to {FORMAT_VERSION}",
                hint="upgrade holdfast",
            )
        return record

    def begin(self, recipe: str) -> RunRecord:
        """``run.json`` exists and can be read; the first to begin the run has written it."""
        try:
            return self.read_run()
        except RunUnknown:
            write = self.place.create
        except RecordDamaged as error:
            self.warn(f"{error}; it is written anew")
            write = self.store.replace
        record = RunRecord(
            format=FORMAT_VERSION,
            run=self.run,
            recipe=recipe,
            first_commit=min(self.numbers("commits"), default=1),
            created_at=now(),
        )
        try:
            write("run.json", record.to_bytes())
        except NameTaken:  # another process has begun it a moment ago
            return self.read_run()
        return record

    def record_config(self, fingerprint: str, identity: dict[str, Any], config: dict[str, Any]) -> None:
        """Keep the settings in force: under their fingerprint, in a file of their own, and as the newest snapshot.

        ``configs/<fingerprint>.json`` has them as they were first used. Where they differ from those, which only
        operational settings can, ``configs/<fingerprint>-<hash>.json`` is added.
        """
        record = ConfigRecord(fingerprint=fingerprint, identity=to_plain(identity), config=config)
        data = record.to_bytes()
        try:
            self.store.create(record.name, data)
        except NameTaken:
            first = self.read_config(fingerprint)
            if first is None:
                self.store.replace(record.name, data)
            elif first != record:
                with contextlib.suppress(NameTaken):
                    self.store.create(record.snapshot_name, data)
        self.store.replace("config.snapshot.json", data)

    def read_config(self, fingerprint: str) -> ConfigRecord | None:
        """Return the settings that have this fingerprint, as they were first used; None where they were lost."""
        if fingerprint not in self._configs:
            record = self._read_config(f"configs/{fingerprint}.json")
            if record is None:
                return None
            self._configs[fingerprint] = record
        return self._configs[fingerprint]

    def read_snapshot(self) -> ConfigRecord | None:
        """The settings that the run was last trained with; None where they were lost, or nothing was trained yet."""
        return self._read_config("config.snapshot.json")

    def read_epochs(self) -> int | None:
        """How many epochs the run was last asked for; None where that was lost."""
        snapshot = self.read_snapshot()
        epochs = snapshot.config.get("epochs") if snapshot else None
        return epochs if isinstance(epochs, int) else None

    def read_retention(self) -> Retention | None:
        """How the run was last asked to be pruned; None where that was lost."""
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
        """One warning, however often the same is read."""
        if message not in self._warned:
            log.warning("run %r: %s", self.run, message)
        self._warned.add(message)

    def numbers(self, folder: str, after: int = 0) -> list[int]:
        """Return the numbers above ``after`` that a folder of records has, sorted; see `look_through`."""
        return self.look_through(folder, after).numbers

    def look_through(self, folder: str, after: int = 0) -> Numbered:
        """Find the numbers above ``after`` that a folder of records has, and the names that are none of the run's.

        A stray name (no number, or one that the run can't have reached) is warned of once.
        """
        suffix = SUFFIXES.get(folder, ".json")
        found = sort_names(self.store.list(folder, after=f"{after:08d}{suffix}" if after else ""), suffix)
        if found.numbers and found.numbers[-1] > REACH:
            base = after if after and folder in CHAINS else self._base_of(folder)
            found = found.within(base) if folder in CHAINS else found.up_to(base + REACH)
        for name in found.strays:
            note = f"{folder}/{name} is no record that the run can have; it is ignored"
            self.warn(note)
            self.strays += [note] if note not in self.strays else []
        return found

    def highest(self, folder: str, hint: int) -> int:
        """Return the highest number in a folder; 0 for none. With a right hint the cost doesn't grow with the run."""
        found = self.numbers(folder, after=hint - 1) if hint else []
        return max(found or self.numbers(folder), default=0)

    def can_reach(self, number: int) -> bool:
        """Return whether the run can have come to a commit of this number."""
        return number <= REACH or number <= self.highest("commits", 0) + REACH

    def _base_of(self, folder: str) -> int:
        """Return what the numbers of a folder reach on from; asked only where one is far away."""
        if folder == "commits":
            with contextlib.suppress(RunUnknown, RecordDamaged):
                return self.read_run().first_commit - 1
            return 0
        return 0 if folder == "attempts" else self.highest("attempts" if folder == "endings" else "commits", 0)
