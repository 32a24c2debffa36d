"""A store's writer who names code of their own in the records of a run, with all hashes consistent."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config import RunConfig
from holdfast.config.loading import set_field
from holdfast.journal import ConfigRecord, Journal, record_name
from holdfast.provenance.fingerprint import fingerprint
from holdfast.store import open_store


def plant(folder: Path, mark: Path, name: str = "evil") -> Path:
    """Write a module that leaves a mark when it is imported, and trains what the toy recipe does; return its file."""
    file = folder / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nfrom tests.support.toy import toy\n")
    return file


def plant_shadows(folder: Path) -> Path:
    """Write modules that end any Python which imports them in place of modules of Python, Prefect and Holdfast."""
    for name in ("json", "prefect", "holdfast", "tasks"):
        (folder / f"{name}.py").write_text('raise SystemExit(f"{__file__} was imported")\n')
    return folder


def rename_recipe(run: Path, recipe: str) -> None:
    """Name another recipe in every record of a run, and make all hashes consistent with it."""
    forge(run, {"recipe": recipe})


def forge(run: Path, fields: Mapping[str, Any]) -> None:
    """Give configuration fields, by dotted name, other values in every record of a run, with consistent hashes."""
    journal = Journal(open_store(str(run.parent)), run.name)
    for number in journal.numbers("commits"):
        commit = journal.read_commit(number)
        old = journal.read_config(commit.config_fingerprint)
        assert old
        config = copy.deepcopy(old.config)
        for name, value in fields.items():
            set_field(config, name, value)
        identity = old.identity | {"settings": old.identity["settings"] | config["settings"]}
        identity |= {name: value for name, value in fields.items() if name in old.identity}
        if config["init_from"]:
            identity["init_from"] = RunConfig.model_validate(config).identity["init_from"] | {"commit": 1}
        new = ConfigRecord(fingerprint=fingerprint(identity), identity=identity, config=config)
        journal.store.replace(new.name, new.to_bytes())
        journal.store.replace("config.snapshot.json", new.to_bytes())
        commit = commit.model_copy(update={"config_fingerprint": new.fingerprint})
        if number > 1:
            commit = commit.model_copy(update={"previous_record_sha256": journal.record_sha256(number - 1)})
        journal.store.replace(record_name("commits", number), commit.to_bytes())
