"""What saving and restoring cost, beside what the machine could do at best and beside what others do.

Each state is measured in a process of its own, so that its memory is its own. A time is the median of several, taken
in turn, so that a slow minute of the machine is in all of them.
"""

import gc
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from holdfast.checkpoint import CheckpointSave, Payload, Saver, read_payload
from holdfast.state import from_payload, to_payload
from holdfast.store.local import LocalStore
from holdfast.training.capturing import decode
from tests.bench.disk import make_cold, read_raw, take_memory, write_raw
from tests.bench.frame import Benchmark, Row, ask, compare, median_of, scratch, time_of, without
from tests.support.makers import METADATA_FIELDS, commit_of

MB = 10**6
SIZES = {"100 MB": (100 * MB, 24), "1 GB": (1000 * MB, 48), "3 GB": (3000 * MB, 48), "1,000 tensors": (64 * MB, 1000)}
ROUNDS = 5
HASHERS = 2
# A figure, what it is of, and a means of speed that it may have from: a ratio is what that means gains.
# Names of our own figures, with which others are compared.
OURS = {"stall": "Holdfast's pause", "durable": "Holdfast's time until durable", "restore": "Holdfast's restore"}
WITHOUT = [
    ("pause of training for a save", "stall", "buffers"),
    ("pause of training for a save", "stall", "buffers, huge pages"),
    ("time until durable and hashed", "durable", "direct"),
    ("time to restore and verify", "restore", "direct"),
]


def run(full: bool) -> list[Row]:
    """The rows of all states; the largest only if there is time."""
    return [row for name in SIZES if full or name != "3 GB" for row in ask("tests.bench.saving", name)]


# ---- in the process of one state


def measure(name: str) -> list[Row]:
    """All figures of one state."""
    size_bytes, tensors = SIZES[name]
    gc.freeze()  # as a rank does
    with scratch() as folder:
        bench = Bench(Path(folder), size_bytes, tensors)
        times = bench.time_all()

    slower = max(times["raw write"], times["SHA-256, two threads"])

    def row(figure: str, key: str, of: str, limit: float, reach: float) -> Row:
        return compare(name, figure, times[key], of, limit, reach)

    return [
        row("pause of training for a save", "stall", "a memory copy", times["memory copy"], 1.3),
        row("time until durable and hashed", "durable", "the slower of a raw write and SHA-256", slower, 1.25),
        row("time to restore and verify", "restore", "a raw cold read", times["raw read"], 1.3),
        compare(name, "time to restore into new memory", times["restore anew"], "a raw cold read", times["raw read"]),
        compare(
            name,
            "time of a save with safetensors, fsync, hash",
            times["safetensors"],
            OURS["durable"],
            times["durable"],
            3.0,
            least=True,
        ),
        compare(
            name,
            "time of a save with torch.save, fsync, hash",
            times["torch.save"],
            OURS["durable"],
            times["durable"],
            4.0,
            least=True,
        ),
        compare(name, "time until durable, state unchanged", times["unchanged"], OURS["durable"], times["durable"]),
        *(
            compare(name, f"{figure}, without {means}", times[f"{key} without {means}"], OURS[key], times[key])
            for figure, key, means in WITHOUT
        ),
        compare(name, "extra memory of a save", times["memory"], "one copy of the state", 1.0, 1.1, unit="states"),
    ]


class Bench:
    """A state of so many bytes in so many tensors, with a store, and a saver whose memory is warm after `prepare`."""

    def __init__(self, folder: Path, size_bytes: int, count: int) -> None:
        self.folder, self.size_bytes = folder, size_bytes
        numbers = size_bytes // 4 // count
        self.state = {f"layer{number:04d}": torch.randn(numbers // 64, 64) for number in range(count)}
        self.size_bytes = sum(tensor.nbytes for tensor in self.state.values())
        self.store = LocalStore(str(folder / "run"))
        self.saver = Saver()
        self.step = 0

    def time_all(self) -> dict[str, float]:
        before = _resident()
        self.save()
        memory = (_resident() - before) / self.size_bytes
        self.prepare()
        self.sharing = Saver(shared_by=1000)
        self.sharing.buffers = self.saver.buffers  # for the largest state there is no memory to spare
        for _ in range(2):
            self._save_unchanged()
        measured: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for name, seconds in self._round():
                measured.setdefault(name, []).append(seconds)
        return median_of(measured) | {"memory": memory}

    def prepare(self) -> None:
        """Make the copy into which a restore writes, and an image of the state for the machine's own figures."""
        self.copy = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        for tensor in self.copy.values():
            tensor.zero_()
        self.image = take_memory(self.size_bytes)
        torch.frombuffer(self.image, dtype=torch.uint8).random_()

    def _round(self) -> Iterator[tuple[str, float]]:
        yield "memory copy", time_of(self._copy)
        raw = self.folder / "raw"
        yield "raw write", time_of(lambda: write_raw(raw, self.image))
        yield "SHA-256, two threads", time_of(self._hash_raw)
        make_cold(self.folder)
        yield "raw read", time_of(lambda: read_raw(raw, self.image))
        raw.unlink()
        stall, durable = self.save()
        yield "stall", stall
        yield "durable", durable
        for name, restore in (("restore", self.restore), ("restore anew", self._restore_anew)):
            make_cold(self.folder / "run" / self.saved.path)
            yield name, time_of(restore)
        yield from self._round_without()
        self.store.delete_folder(self.saved.path)
        yield "unchanged", time_of(self._save_unchanged)
        for name, write in (("safetensors", self._save_safetensors), ("torch.save", self._save_torch)):
            yield name, time_of(lambda write=write: self._save_and_hash(write))

    def _round_without(self) -> Iterator[tuple[str, float]]:
        make_cold(self.folder / "run" / self.saved.path)
        with without("direct"):
            yield "restore without direct", time_of(self.restore)
        for place, name, means in (
            (0, "stall", "buffers"),
            (0, "stall", "buffers, huge pages"),
            (1, "durable", "direct"),
        ):
            self.store.delete_folder(self.saved.path)
            with without(means):
                yield f"{name} without {means}", self.save()[place]

    # ---- ours

    def save(self) -> tuple[float, float]:
        began = time.perf_counter()
        self._begin(self.saver)
        stall = time.perf_counter() - began
        saved = self.saver.wait()
        assert saved
        self.saved = saved
        return stall, time.perf_counter() - began

    def _save_unchanged(self) -> None:
        """The same tensors again: what isn't written is hashed all the same."""
        self._begin(self.sharing)
        self.sharing.wait()

    def _begin(self, saver: Saver) -> None:
        self.step += 10
        fields = METADATA_FIELDS | {"optimizer_steps_total": self.step}
        saver.begin(
            CheckpointSave(
                self.store, to_payload({"model": self.state, "step": self.step}), fields, "", is_urgent=False
            )
        )

    def restore(self) -> None:
        """As a rank does it: into tensors that the model has."""
        state = decode(self._read())["model"]
        for name, tensor in self.copy.items():
            tensor.copy_(state[name])

    def _restore_anew(self) -> None:
        """As a rank does it for an optimizer, which keeps what it is given."""
        from_payload(self._read())

    def _read(self) -> Payload:
        return read_payload(self.store, commit_of(self.saved), self.saver.buffers)

    # ---- the machine

    def _copy(self) -> None:
        for name, tensor in self.state.items():
            self.copy[name].copy_(tensor)

    def _hash_raw(self) -> None:
        half = self.size_bytes // HASHERS
        with ThreadPoolExecutor(HASHERS) as pool:
            list(pool.map(lambda n: hashlib.sha256(self.image[n * half : (n + 1) * half]).digest(), range(HASHERS)))

    # ---- others

    def _save_safetensors(self, path: Path) -> None:
        save_file(self.state, path)

    def _save_torch(self, path: Path) -> None:
        torch.save(self.state, path)

    def _save_and_hash(self, write: Callable[[Path], None]) -> None:
        path = self.folder / "other"
        write(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            hashlib.file_digest(file, "sha256")
        path.unlink()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


BENCHMARK = Benchmark(
    name="saving",
    about=(
        "How long training stands still for a save, how long until it is durable and its hash known, and how long a "
        "restore takes that verifies, each over what the machine does at best, taken in the same minute. extra memory: "
        "what a process grows by when it saves for the first time."
    ),
    run=run,
)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
