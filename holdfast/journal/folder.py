"""A run's folder: that there is such a run, and the settings that it was trained with."""

import contextlib
import logging
from typing import Any

from pydantic import ValidationError

from holdfast.config import Retention
from holdfast.errors import NameMissing, NameTaken, RecordDamaged, RunUnknown, WrongUse
from holdfast.fingerprint import to_plain
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
    """

    def __init__(self, store: Store, run: str) -> None:
        self.run = run
        self.place = store.inside(run)
        self.store = self.place.existing()
        self.store_url = store.url
        self._warned: set[str] = set()

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
        """The settings that have this fingerprint, as they were first used; None where they were lost."""
        return self._read_config(f"configs/{fingerprint}.json")

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
        """The numbers above ``after`` that a folder of records has, sorted."""
        names = self.store.list(folder, after=f"{after:08d}.json" if after else "")
        return [int(name[:8]) for name in names if len(name) == 13 and name[:8].isdigit() and name.endswith(".json")]

    def highest(self, folder: str, hint: int) -> int:
        """The highest number in a folder; 0 for none. Where the hint is right, the cost doesn't grow with the run."""
        found = self.numbers(folder, after=hint - 1) if hint else []
        return max(found or self.numbers(folder), default=0)
