"""What has to be true of a process before the same step gives the same bits."""

import os
import random
import sys

from holdfast.config import Determinism
from holdfast.errors import DeterminismError

# Read once, when the interpreter, the CUDA library or torch's compiler starts: setting them later has no effect.
PREAMBLE = {
    # Source: cuBLAS documentation, "Results Reproducibility": one workspace per stream.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONHASHSEED": "0",
    # What torch.use_deterministic_algorithms would set; it imports torch._inductor for that, which takes two seconds.
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}


def preamble(settings: Determinism) -> dict[str, str]:
    """The environment that a rank's interpreter has to be started with."""
    threads = str(settings.threads)
    inductor = {"TORCHINDUCTOR_DETERMINISTIC": "1" if settings.mode == "strict" else "0"}
    return PREAMBLE | inductor | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def apply(settings: Determinism, seed: int) -> None:
    """Make this process deterministic and seed it. To be called before the model is built.

    Afterwards Python's, NumPy's and torch's generators (the CPU's and every GPU's) are seeded, and in strict
    mode an operation that has no deterministic implementation raises instead of being used.

    Raises:
        DeterminismError: strict, and this interpreter was started without the preamble.
    """
    import torch

    torch.set_num_threads(settings.threads)
    if settings.mode == "strict":
        missing = sorted(name for name, value in PREAMBLE.items() if os.environ.get(name) != value)
        if sys.flags.hash_randomization and "PYTHONHASHSEED" not in missing:  # it was set too late
            missing.append("PYTHONHASHSEED")
        if missing:
            raise DeterminismError(
                f"this process was started without {', '.join(missing)}",
                hint="start ranks through holdfast.launch, which sets them before Python starts",
            )
        torch.set_deterministic_debug_mode("error")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
    reseed(seed)


def check(settings: Determinism) -> None:
    """Return if, in strict mode, this process still is as `apply` has made it.

    Raises:
        DeterminismError: it was never made so, or something has changed it back.
    """
    import torch

    if settings.mode != "strict":
        return
    wrong = {
        "torch.use_deterministic_algorithms is off": not torch.are_deterministic_algorithms_enabled(),
        "torch.use_deterministic_algorithms only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.backends.cudnn.benchmark is on": torch.backends.cudnn.benchmark,
        "torch.backends.cudnn.deterministic is off": not torch.backends.cudnn.deterministic,
        "torch.backends.cudnn.allow_tf32 is on": torch.backends.cudnn.allow_tf32,
        "float32 matrices are multiplied in a lower precision": torch.get_float32_matmul_precision() != "highest",
        f"there are {torch.get_num_threads()} threads, not {settings.threads}": torch.get_num_threads()
        != settings.threads,
    }
    found = [text for text, is_wrong in wrong.items() if is_wrong]
    if found:
        raise DeterminismError(
            f"the model would be built, or has been, while {' and '.join(found)}",
            hint='leave it as it is, or --set determinism.mode="fast", which gives up bit-exactness',
        )


def reseed(seed: int) -> None:
    """Begin every generator anew: Python's, NumPy's and torch's, the CPU's and every GPU's."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
