import hashlib
import logging
import queue
import threading
from pathlib import Path

from holdfast import AttemptView, Commit, Observer, RunConfig, load_config
from holdfast.config import Section
from holdfast.errors import HoldfastError
from holdfast.extending import read_table
from holdfast.store import open_store
from second_bucket import extension

log = logging.getLogger("holdfast.second_bucket")


class SecondBucket(Section):
    store: str = ""  # empty for no copies
    wait_s: float = 10  # to wait for copies when an attempt ends


def refuse(config: RunConfig, settings: SecondBucket) -> str:
    try:
        if settings.store:
            open_store(settings.store).replace("second-bucket.txt", b"")
    except HoldfastError as error:
        return str(error)
    return ""


def observe(config: RunConfig, settings: SecondBucket) -> list[Observer]:
    return [Copier(config, settings)] if settings.store else []


def show(path: Path, /) -> None:
    config = load_config(path)
    urls = (config.store, read_table(extension, config).store)
    first, second = (open_store(url).inside(config.run) for url in urls)
    for name in first.list("commits"):
        commit = Commit.model_validate_json(first.read(f"commits/{name}"))
        names = {f"{commit.path}/{file.name}": file.sha256 for file in commit.files}
        found = {name: hashlib.sha256(second.read(name)).hexdigest() for name in names if second.exists(name)}
        print(commit.number, "equal" if found == names else "missing or different")


class Copier(Observer):
    def __init__(self, config: RunConfig, settings: SecondBucket) -> None:
        self.first, self.second = (open_store(url).inside(config.run) for url in (config.store, settings.store))
        self.wait_s = settings.wait_s
        self.commits: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.copy_all, daemon=True)
        self.thread.start()

    def opened(self, attempt: AttemptView) -> None:
        if attempt.head:  # its copy may have been interrupted
            self.commits.put(attempt.head)

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        self.commits.put(commit)

    def ended(self, attempt: AttemptView) -> None:
        self.commits.put(None)
        self.thread.join(self.wait_s)

    def copy_all(self) -> None:
        while commit := self.commits.get():
            try:
                names = [f"{commit.path}/{file.name}" for file in commit.files] + ["run.json"]
                names += [f"attempts/{commit.attempt:08d}.json", f"configs/{commit.config_fingerprint}.json"]
                names += [f"folders/{commit.path}.json", f"commits/{commit.number:08d}.json"]  # the commit comes last
                for name in names:
                    if not self.second.exists(name):
                        self.second.create(name, self.first.read(name))
                log.info("copied commit %d to %s", commit.number, self.second.url)
            except HoldfastError as error:
                log.warning("commit %d isn't copied to %s: %s", commit.number, self.second.url, error)
