"""Settings of a process for equal bits in equal steps: environment variables, torch's flags, seeds."""

import contextlib
import functools
import hashlib
import itertools
import operator
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.config import Determinism
from holdfast.errors import DeterminismError

# The environment variables that the interpreter, cuBLAS and torch's compiler read once, at their start. Later changes
# have no effect.
PREAMBLE = {
    # One workspace per stream makes cuBLAS reproducible. Source: cuBLAS documentation, "Results Reproducibility".
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONHASHSEED": "0",
    # Set here, because torch.use_deterministic_algorithms, which also sets this, first imports torch._inductor, which
    # takes 2 s.
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}

# Read by torch's compiler in strict mode, when it is loaded; see `holdfast.machine.compiling`.
COMPILER = {"TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES": "0", "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0"}

# By default NCCL chooses its algorithm from measurements and from the hardware, so that equal jobs may sum in different
# orders. NVLS and CollNet sum in network switches, whose order no job controls. If the user has set one of these
# variables, Holdfast keeps the value, and a resume compares it. Sources: NVIDIA/nccl#1497, #2360; Megatron Core,
# Deterministic Training.
COLLECTIVES = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
}

# How long a thread spins at a barrier of OpenMP before it sleeps. By default it spins for milliseconds: if another
# process has its core, a step's threads wait for each other at nearly every barrier (docs/performance.md). These
# variables change no bits. libgomp, in torch's wheels for Linux, counts rounds; Intel's and LLVM's runtimes count
# milliseconds.
SPINS = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
# If one of these variables is set, the user has chosen how threads wait.
WAITS = (*SPINS, "OMP_WAIT_POLICY")

SDP_KERNELS = ("flash", "mem_efficient", "math", "cudnn")

# NumPy's and Python's generators are Mersenne Twisters, whose state has this position after seeding and before any
# draw.
FRESH = 624

# The flags of `read_flags` that `apply` sets in strict mode, with their values.
STRICT = {
    "torch.use_deterministic_algorithms": True,
    "warn_only of torch.use_deterministic_algorithms": False,
    "torch.backends.cudnn.benchmark": False,
    "torch.backends.cudnn.deterministic": True,
}

# The libraries that compute float32 products in their own precision, by device, as torch.backends names them.
PRECISE = {
    "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
    "cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"),
}
# The smallest positive number, which is a denormal number.
SMALLEST = 5e-324
FULL = "ieee"  # torch's name of the full precision of float32


def preamble(settings: Determinism) -> dict[str, str]:
    """Return the environment variables with which a rank's interpreter has to be started."""
    threads = str(settings.threads)
    inductor = COMPILER if settings.mode == "strict" else {"TORCHINDUCTOR_DETERMINISTIC": "0"}
    return PREAMBLE | inductor | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def choose_collectives(settings: Determinism) -> dict[str, str]:
    """Return environment variables that make NCCL's order of summation depend only on the ranks and their links."""
    return COLLECTIVES if settings.mode == "strict" else {}


def choose_spins(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that let a rank's waiting threads sleep soon; none if the user has set any."""
    return {} if any(name in environment for name in WAITS) else SPINS


def apply(settings: Determinism, seed: int) -> None:
    """Make this process deterministic and seed its generators. Call it before the model is built.

    It seeds Python, NumPy and torch (the CPU and every GPU). In strict mode, torch then raises an error for each
    operation without a deterministic implementation.

    Raises:
        DeterminismError: in strict mode, this interpreter was started without the `preamble`.
    """
    import torch

    torch.set_num_threads(settings.threads)
    if settings.mode == "strict":
        missing = sorted(name for name, value in PREAMBLE.items() if os.environ.get(name) != value)
        # Read the interpreter's own flag, because a variable that was set after Python's start has no effect.
        if sys.flags.hash_randomization and "PYTHONHASHSEED" not in missing:
            missing.append("PYTHONHASHSEED")
        if missing:
            raise DeterminismError(
                f"this training process was started without the variables {', '.join(missing)}",
                hint="start it with holdfast train or holdfast.rank.launching, which set these variables before "
                "Python starts",
            )
        torch.set_deterministic_debug_mode("error")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    reseed(seed)


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Use deterministic algorithms in the block, even in fast mode. Restore torch's flags after the block.

    In fast mode, an operation without a deterministic algorithm causes only a warning: an error would stop runs whose
    interpreter was started without the `preamble`, which cuBLAS needs.
    """
    import torch

    cudnn, mode = torch.backends.cudnn, torch.get_deterministic_debug_mode()
    before = cudnn.deterministic, cudnn.benchmark
    torch.set_deterministic_debug_mode(mode or "warn")
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark = before


def read_flags() -> dict[str, Any]:
    """Return torch's settings that choose kernels or the order of a sum, by the names in torch's documentation."""
    return {name: read() for name, read in _list_readers().items()}


@functools.cache
def _list_readers() -> dict[str, Callable[[], Any]]:
    """Return the functions that read the settings of `read_flags`, by name."""
    import torch

    cuda, cudnn, matmul = torch.backends.cuda, torch.backends.cudnn, torch.backends.cuda.matmul
    readers: dict[str, Callable[[], Any]] = {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "warn_only of torch.use_deterministic_algorithms": torch.is_deterministic_algorithms_warn_only_enabled,
        "torch.backends.cudnn.benchmark": lambda: cudnn.benchmark,
        "torch.backends.cudnn.deterministic": lambda: cudnn.deterministic,
    }
    for name in read_precision():
        readers[f"torch.backends.{name}.fp32_precision"] = functools.partial(_read_precision, _find_library(name))
    readers |= {
        "torch.set_num_threads": torch.get_num_threads,
        "torch.set_default_dtype": torch.get_default_dtype,
        # torch has no function that returns flush_denormal. If the flag is on, this product is 0.
        "torch.set_flush_denormal": lambda: operator.mul(SMALLEST, 1.0) == 0.0,
        "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
            lambda: matmul.allow_fp16_reduced_precision_reduction
        ),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
            lambda: matmul.allow_bf16_reduced_precision_reduction
        ),
    }
    return readers | {
        f"torch.backends.cuda.enable_{kind}_sdp": getattr(cuda, f"{kind}_sdp_enabled") for kind in SDP_KERNELS
    }


def read_precision(device: str | None = None) -> dict[str, str]:
    """Return the precision in which each library computes float32 products, such as ``{"cuda.matmul": "tf32"}``.

    TF32 and bfloat16 repeat their bits, so strict mode leaves the choice to the recipe. Old and new names of torch set
    the same precision, but torch refuses to read an old name once a new one was set. So only new names are read.

    Args:
        device: the type of the device whose libraries are read; None for all devices.
    """
    found: dict[str, str] = {}
    for name in PRECISE.get(device, ()) if device else itertools.chain(*PRECISE.values()):
        # A different version of torch may lack the library's setting, or refuse to read it.
        with contextlib.suppress(AttributeError, RuntimeError):
            found[name] = _read_precision(_find_library(name))
    return found


def _find_library(name: str) -> Any:
    """Return the object of torch that has a library's settings, such as ``torch.backends.cuda.matmul``."""
    import torch

    return operator.attrgetter(name)(torch.backends)


def _read_precision(library: Any) -> str:
    return FULL if library.fp32_precision == "none" else str(library.fp32_precision)


def check(settings: Determinism, moment: str) -> None:
    """Check in strict mode that torch's flags are those that `apply` sets.

    Args:
        moment: the beginning of the message, such as ``after the recipe was built``.

    Raises:
        DeterminismError: `apply` was not called, or something has changed a flag since.
    """
    if settings.mode == "strict":
        _refuse_changed(STRICT | {"torch.set_num_threads": settings.threads}, moment)


def check_unchanged(settings: Determinism, built: Mapping[str, Any], moment: str) -> None:
    """Check in strict mode that no flag has changed since the recipe was built.

    Args:
        built: the result of `read_flags` after the recipe was built.
        moment: the beginning of the message, such as ``after step 12``.

    Raises:
        DeterminismError: a flag has changed; the message names it with both values.
    """
    if settings.mode == "strict":
        _refuse_changed(built, moment)


def _refuse_changed(expected: Mapping[str, Any], moment: str) -> None:
    readers = _list_readers()
    if all(readers[name]() == value for name, value in expected.items()):
        return
    flags = read_flags()
    names = [name for name, value in expected.items() if flags[name] != value]
    if names:
        changed = [f"{name} is {flags[name]}, not {expected[name]}" for name in names]
        raise DeterminismError(
            f"{moment}, {' and '.join(changed)}",
            hint='leave the setting unchanged, or --set determinism.mode="fast", which doesn\'t promise equal bits',
            flags=names,
        )


def reseed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch (the CPU's and every GPU's)."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    # Seed each generator directly, because torch.manual_seed takes a hundred times as long: it records its caller for
    # each missing kind of device.
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def read_seeds() -> dict[str, Any]:
    """Return a value that identifies the seed of each global generator, by the name of the function that seeds it.

    For torch's generator the value is the seed. For NumPy's and Python's generators the value is the state, or None if
    a number was drawn since the generator was seeded.
    """
    import numpy as np
    import torch

    state = np.random.get_state(legacy=False)
    own = random.getstate()[1]
    return {
        "torch.manual_seed": torch.initial_seed(),
        "np.random.seed": state["state"]["key"].tobytes() if state["state"]["pos"] == FRESH else None,
        "random.seed": own[:-1] if own[-1] == FRESH else None,
    }


def describe_replaced(before: Mapping[str, Any], seed: int) -> list[str]:
    """Return a warning if the import of the recipe's module has seeded generators. The run's seed replaces those seeds.

    Args:
        before: the result of `read_seeds` before the import.
    """
    now = read_seeds()
    called = [name for name, value in now.items() if value not in (None, before[name])]
    if not called or (called == ["torch.manual_seed"] and now["torch.manual_seed"] == seed):
        return []
    asked = f", for example {now['torch.manual_seed']}," if "torch.manual_seed" in called else ""
    return [
        f"importing the recipe's module calls {' and '.join(called)}; the run's seed {seed} is used instead. Set "
        f"seed{asked} in the configuration, or set seeds inside the recipe's function"
    ]


def derive_seed(*names: int | str) -> int:
    """Return a seed that is the hash of some values, for example the run's seed and the number of a step."""
    text = "/".join(map(str, names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") // 2


def separate_threads() -> None:
    """Give the threads that Python starts a separate generator for the functions of `random`.

    This thread and torch's own threads keep the global generator, because on a GPU the backward pass, which may call
    the recipe's code, runs in one of torch's threads.

    Call this before another module runs ``from random import ...``: a function that was imported before still draws
    from the global generator in every thread.
    """
    own, other = threading.get_ident(), random.Random()
    for name, function in list(vars(random).items()):
        if getattr(function, "__self__", None) is random._inst:
            setattr(random, name, _by_thread(own, function, getattr(other, name)))


def _by_thread(own: int, function: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        is_own = threading.get_ident() == own or isinstance(threading.current_thread(), threading._DummyThread)
        return (function if is_own else others)(*arguments, **options)

    return call
