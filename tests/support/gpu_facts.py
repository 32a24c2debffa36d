"""The measurements with which `make test-gpus` begins: what documentation says of GPUs, and nobody has seen here.

``python -m tests.support.gpu_facts NAME`` measures one fact in this process, and prints the result as a line. A
measurement is in the order of what its result decides, so that the first minute tells most. On a CPU it runs if it
needs no GPU, which tests it.
"""

import ctypes
import hashlib
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config import DEFAULT_SEED, Compute, Determinism, RunConfig
from holdfast.machine.determinism import preamble
from holdfast.terminal import counted
from tests.support.device import DEVICE, ON_GPUS

if TYPE_CHECKING:
    from holdfast import Recipe
    from holdfast.checkpoint import Saved
    from holdfast.store.local import LocalStore
    from holdfast.training import Training

ROOT = Path(__file__).parents[2]
GIB, MIB = 2**30, 2**20
STARTS = 20 if ON_GPUS else 2  # processes that compute the same step
ABREAST = 4
HELD_BYTES = 4 * GIB  # of a process that is killed
LAYERS, WIDTH = 8, 2048  # of a model whose save is measured: 134 MB, and twice as much in AdamW's moments
WAIT_CYCLES = 3 * 10**9  # of the GPU: about two seconds
STEPS = (3, 6)  # a save and the end


@dataclass(frozen=True)
class Fact:
    """Something to measure.

    Attributes:
        about: the left column of the table.
        measure: returns the right column; raises if the result contradicts a promise.
        needs_gpu: whether a CPU can't measure it.
        within_s: the seconds after which it is given up.
    """

    about: str
    measure: Callable[[], str]
    needs_gpu: bool = True
    within_s: float = 60


def start(name: str, within_s: float | None = None) -> "subprocess.CompletedProcess[str]":
    """Call a function of this module in a process that starts as a rank does, and print what it returns.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time; the process and those that it has started are killed.
    """
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, name]
    variables = os.environ | preamble(Determinism())
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=within_s is not None,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ask(name: str) -> str:
    """Return what `start` prints.

    Raises:
        RuntimeError: the process failed.
    """
    done = start(name)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    return done.stdout.strip()


def describe_machine() -> str:
    from holdfast.machine import determinism
    from holdfast.machine.contract import judge
    from holdfast.machine.environment import describe_environment

    determinism.apply(Determinism(), DEFAULT_SEED)
    found = describe_environment(DEVICE)
    verdict = judge(found, describe_environment(DEVICE))
    if verdict.reasons:
        raise RuntimeError(f"equal bits aren't promised on one machine: {'; '.join(verdict.reasons)}")
    gpus = ", ".join(f"{gpu['name']}, compute capability {gpu['sm']}" for gpu in found["gpus"]) or found["cpu"]
    versions = ", ".join(
        f"{name} {found[name]}" for name in ("torch", "cuda", "cudnn", "nccl", "driver") if found[name]
    )
    return f"{gpus}; {versions}"


def compute_digest() -> str:
    """Compute the step of the self-test twice, and return a digest of its bits."""
    from holdfast.machine.self_test import run_self_test

    test = run_self_test(DEVICE)
    if test.differing:
        raise RuntimeError(f"{', '.join(test.differing)}: a second computation in this process gave different bits")
    return test.sha256


def test_itself() -> str:
    return f"two equal steps, {compute_digest()[:16]}"


def save_and_resume() -> str:
    """Train the toy straight and with a resume, through the real save, and compare the content ids."""
    return _compare_resumed("toy:toy")


def save_into_pinned() -> str:
    """Save twice in a process: the second save is into memory that is pinned since the first one."""
    from holdfast.store.local import LocalStore
    from holdfast.training import Training
    from tests.support.trainings import content_id, live, train_to

    at, stop = STEPS
    with tempfile.TemporaryDirectory() as folder:
        config = _configure("toy:toy", folder)
        straight = content_id(live(config, stop)[0])
        training, store, stalls = Training(config), LocalStore(f"{folder}/again"), []
        for step in (at, stop):
            train_to(training, step)
            saved, stall_s = _save(training, store)
            stalls.append(f"{1000 * stall_s:.1f} ms")
        if saved.metadata.checkpoint_sha256 != straight:
            raise RuntimeError("a process that has saved before saves different bytes")
    count = len([unpin for unpin in training.saver.buffers._pinned.values() if unpin])
    if ON_GPUS and not count:
        raise RuntimeError("no memory was pinned after the first save")
    return f"equal bytes, {counted(count, 'part')} pinned, stalls of {' and '.join(stalls)}"


def save_beside_streams() -> str:
    """Save while other streams compute: an average, a copy into the host's memory, and whole steps."""
    return _compare_resumed(*(f"late_loops:{loop}" for loop in ("averages_beside", "copies_out", "steps_beside")))


def resume_generators() -> str:
    """Draw from the GPU's own generators, and copy batches ahead of a step."""
    return _compare_resumed("late_loops:draws", "late_loops:draws_there", "late_loops:prefetches")


def resume_graphs() -> str:
    """Train with CUDA graphs, which torch.compile records, on a GPU."""
    return _compare_resumed("late_loops:graphed")


def _configure(program: str, folder: str) -> RunConfig:
    compute = Compute(device=DEVICE)
    return RunConfig(recipe=f"tests.support.{program}", run="r", store=folder, epochs=9, compute=compute)


def _compare_resumed(*programs: str) -> str:
    from tests.support.trainings import content_id, live

    at, stop = STEPS
    found, problems = [], []
    for program in programs:
        name = program.partition(":")[2]
        try:
            with tempfile.TemporaryDirectory() as folder:
                config = _configure(program, folder)
                straight = content_id(live(config, stop)[0])
                resumed = content_id(live(config, stop, live(config, at)[0])[0])
            if resumed != straight:
                raise RuntimeError("a resumed training ended on different bytes")
            found.append(f"{name}: equal bytes, {straight[:16]}")
        except Exception as error:  # the other programs are to be measured, too
            problems.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
    if problems:
        raise RuntimeError("; ".join([*problems, *found]))
    return "; ".join(found)


def _save(training: "Training", store: "LocalStore") -> "tuple[Saved, float]":
    """Save a checkpoint as during a run. Return it once it is durable, and the seconds for which training stood."""
    from holdfast.training import SaveRequest, begin_save

    began = time.perf_counter()
    begin_save(training, SaveRequest(store, "f" * 64, {}, is_urgent=False))
    stall_s = time.perf_counter() - began
    saved = training.saver.wait()
    assert saved is not None
    return saved, stall_s


def compare_starts() -> str:
    with ThreadPoolExecutor(ABREAST) as pool:
        found = [*pool.map(lambda _: ask("compute_digest"), range(STARTS))]
    if len({*found}) > 1:
        raise RuntimeError(f"{len({*found})} different results in {STARTS} processes")
    return f"equal bits in {STARTS} processes"


def register_pages() -> str:
    """Pin memory as a save does, in usual and in huge pages, and copy from the GPU into it."""
    import torch

    from holdfast.memory.buffers import map_memory
    from holdfast.memory.pinning import pinning

    found, source = [], torch.ones(GIB, dtype=torch.uint8, device=DEVICE)
    pin = pinning(torch.device(DEVICE))
    assert pin is not None
    for without, is_pinned in (("", True), ("huge pages", True), ("", False)):
        os.environ["HOLDFAST_WITHOUT"] = without
        memory = memoryview(map_memory(GIB))
        target = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        began = time.perf_counter()
        unpin = pin(memory) if is_pinned else None
        if is_pinned and unpin is None:
            raise RuntimeError(f"CUDA refused to pin memory (without {without or 'nothing'})")
        pinned_s, began = time.perf_counter() - began, time.perf_counter()
        if is_pinned and not target.is_pinned():
            raise RuntimeError(f"torch doesn't see that the memory is pinned (without {without or 'nothing'})")
        target.copy_(source)
        copied_s = time.perf_counter() - began
        if unpin is not None and not unpin():
            raise RuntimeError("CUDA refused to unpin memory")
        pages = "usual pages" if without else "huge pages"
        pinning_s = f"pinned in {pinned_s:.2f} s" if is_pinned else "not pinned"
        found.append(f"{pages}, {pinning_s}: 1 GiB copied in {copied_s:.3f} s")
    return "; ".join(found)


def compare_enum() -> str:
    """Return how a result of the CUDA runtime compares with a number: `pinning` takes its ``int``."""
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    memory = mmap.mmap(-1, 2 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    right, wrong = (runtime.cudaHostRegister(address, size, 1) for size in (MIB, 2 * MIB))
    runtime.cudaHostUnregister(address)
    described = "; ".join(f"{each!r} != 0 is {each != 0}, int {int(each)}" for each in (right, wrong))
    if int(right) or not int(wrong):
        raise RuntimeError(f"a refusal isn't told from a success: {described}")
    return described


def compare_memory() -> str:
    """Return the peak of the GPU's memory in a step, in the first save and in the second."""
    import torch

    from holdfast.store.local import LocalStore
    from holdfast.training import Training
    from tests.support.trainings import train_to

    def peak_of(call: Callable[[], object]) -> str:
        torch.cuda.reset_peak_memory_stats()
        call()
        return f"{torch.cuda.max_memory_allocated() / MIB:.0f} MiB"

    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(recipe=f"{__spec__.name}:wide", run="r", store=folder, compute=Compute(device=DEVICE))
        training, store = Training(config), LocalStore(f"{folder}/r")
        found = [
            ("the first step", peak_of(lambda: train_to(training, 1))),
            ("a later step", peak_of(lambda: train_to(training, 3))),
            ("the first save", peak_of(lambda: _save(training, store))),
            ("a step", peak_of(lambda: train_to(training, 4))),
            ("the second save, into pinned memory,", peak_of(lambda: _save(training, store))),
        ]
        train_to(training, 5)
        _, stall_s = _save(training, store)
    return ", ".join([*(f"{name} {peak}" for name, peak in found), f"a third save stalls training for {stall_s:.3f} s"])


def wide() -> "Recipe":
    """Build a recipe whose state is large in comparison with its activations."""
    from torch import nn
    from torch.nn import functional as F

    from holdfast import Recipe
    from tests.support.varied import Points

    layers = [nn.Linear(8, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(*layers)
    return Recipe(
        model=model, data=Points(noise=False), optimizer=_adamw(model), batch_size=8,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
    )  # fmt: skip


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def time_release() -> str:
    """Kill a process that holds memory of the GPU, and wait until another one could have it."""
    import torch

    before = torch.cuda.mem_get_info()[0]
    command = [sys.executable, "-m", __spec__.name, "hold"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        held = before - torch.cuda.mem_get_info()[0]
        if held < HELD_BYTES:
            raise RuntimeError(f"the other process holds {held:,} bytes of the GPU's memory, not {HELD_BYTES:,}")
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        process.wait()
        ended_s = time.monotonic() - began
        while before - torch.cuda.mem_get_info()[0] > held // 10:
            time.sleep(0.005)
        freed_s = time.monotonic() - began
    return f"{held / GIB:.1f} GiB are free {freed_s:.2f} s after SIGKILL, the process has ended after {ended_s:.2f} s"


def hold() -> str:
    """Hold memory of the GPU until this process is killed."""
    import torch

    held = torch.ones(HELD_BYTES, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    print(held.nbytes, flush=True)
    time.sleep(600)
    return ""


def compare_tf32() -> str:
    """Return whether TF32 repeats its bits, within a process and between two."""
    found = [ask("compute_tf32") for _ in range(2)]
    if found[0] != found[1]:
        raise RuntimeError(f"TF32 gave different bits in another process: {found}")
    return found[0]


def compute_tf32() -> str:
    import torch

    generator = torch.Generator().manual_seed(DEFAULT_SEED)
    left, right = (torch.randn(1024, 1024, generator=generator).to(DEVICE) for _ in range(2))
    digests: dict[bool, set[str]] = {}
    for allows in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allows
        digests[allows] = {_digest(left @ right) for _ in range(5)}
    if any(len(each) > 1 for each in digests.values()):
        raise RuntimeError("a product of matrices gave different bits when it was computed again")
    is_used = digests[True] != digests[False]
    return f"equal bits in 5 products and 2 processes; TF32 {'differs from' if is_used else 'is the same as'} float32"


def compare_compiled() -> str:
    """Return whether a compiled step repeats its bits, in two processes that each compile it anew."""
    found = set()
    for _ in range(2):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            found.add(ask("compute_compiled"))
    if len(found) > 1:
        raise RuntimeError("torch.compile gave different bits in another process")
    return f"equal bits in 2 processes, each with an empty cache, {found.pop()[:16]}"


def compute_compiled() -> str:
    import torch
    from torch import nn

    torch.manual_seed(DEFAULT_SEED)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8)).to(DEVICE)
    compiled, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())
    for _ in range(3):
        compiled(torch.randn(32, 64).to(DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _digest(*model.parameters())


def time_wait() -> str:
    """Return how much of a core a rank takes that waits for its GPU, by which `hanging` tells waiting from work."""
    import torch

    from holdfast.machine.gpus.waits import sleep_in_waits

    sleep_in_waits()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(WAIT_CYCLES)
    before, began = resource.getrusage(resource.RUSAGE_THREAD), time.monotonic()
    torch.cuda.synchronize()
    after, waited_s = resource.getrusage(resource.RUSAGE_THREAD), time.monotonic() - began
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = f"a wait of {waited_s:.1f} s takes {used_s:.1f} s of a core"
    if used_s > waited_s / 2:
        raise RuntimeError(f"a rank spins while it waits: {found}")
    return found


def _digest(*tensors: Any) -> str:
    data = b"".join(each.detach().cpu().numpy().tobytes() for each in tensors)
    return hashlib.sha256(data).hexdigest()


FACTS: Mapping[str, Fact] = {
    "describe_machine": Fact("the machine, and the contract that it fulfils", describe_machine, needs_gpu=False),
    "test_itself": Fact("the self-test", test_itself, needs_gpu=False),
    "save_and_resume": Fact("a save and a resume", save_and_resume, needs_gpu=False, within_s=90),
    "save_beside_streams": Fact("a save beside other streams", save_beside_streams, needs_gpu=False, within_s=90),
    "save_into_pinned": Fact("a second save, into pinned memory", save_into_pinned, needs_gpu=False, within_s=90),
    "resume_generators": Fact("the GPU's generators", resume_generators, needs_gpu=False, within_s=90),
    "compare_enum": Fact("a result of the CUDA runtime, compared with 0", compare_enum),
    "register_pages": Fact("pinned memory", register_pages),
    "compare_memory": Fact("the GPU's memory: 134 MB of weights", compare_memory),
    "time_release": Fact("the GPU's memory after SIGKILL", time_release),
    "time_wait": Fact("a rank that waits for its GPU", time_wait),
    "compare_tf32": Fact("TF32", compare_tf32),
    "compare_starts": Fact("a step in many processes", compare_starts, needs_gpu=False, within_s=180),
    "resume_graphs": Fact("CUDA graphs", resume_graphs, needs_gpu=False, within_s=150),
    "compare_compiled": Fact("torch.compile", compare_compiled, within_s=150),
}


def main(name: str) -> int:
    """Measure a fact in this process, or call another function of this module, and print the result. Return 0."""
    print(globals()[name]())
    return 0


if __name__ == "__main__":
    main(sys.argv[1])
