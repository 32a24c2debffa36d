"""A store's writer who names code of their own in the records of a run, with all hashes consistent."""

from pathlib import Path

from holdfast.journal import ConfigRecord, Journal, record_name
from holdfast.provenance.fingerprint import fingerprint
from holdfast.store import open_store


def plant(folder: Path, mark: Path, name: str = "evil") -> Path:
    """Write a module that leaves a mark when it is imported, and trains what the toy recipe does; return its file."""
    file = folder / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nfrom tests.support.toy import toy\n")
    return file


def rename_recipe(run: Path, recipe: str) -> None:
    """Name another recipe in every record of a run, and make all hashes consistent with it."""
    journal = Journal(open_store(str(run.parent)), run.name)
    for number in journal.numbers("commits"):
        commit = journal.read_commit(number)
        old = journal.read_config(commit.config_fingerprint)
        assert old
        identity = old.identity | {"recipe": recipe}
        new = ConfigRecord(fingerprint=fingerprint(identity), identity=identity, config=old.config | {"recipe": recipe})
        journal.store.replace(new.name, new.to_bytes())
        journal.store.replace("config.snapshot.json", new.to_bytes())
        commit = commit.model_copy(update={"config_fingerprint": new.fingerprint})
        if number > 1:
            commit = commit.model_copy(update={"previous_record_sha256": journal.record_sha256(number - 1)})
        journal.store.replace(record_name("commits", number), commit.to_bytes())
