"""What has to be true of a process before the same step gives the same bits."""

import os
import random

from holdfast.config import Determinism
from holdfast.errors import DeterminismError

# Read once, when the interpreter or the CUDA library starts: setting them later has no effect.
PREAMBLE = {
    # Source: cuBLAS documentation, "Results Reproducibility": one workspace per stream.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONHASHSEED": "0",
}


def preamble(settings: Determinism) -> dict[str, str]:
    """The environment that a rank's interpreter has to be started with."""
    threads = str(settings.threads)
    return PREAMBLE | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


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
        if missing:
            raise DeterminismError(
                f"this process was started without {', '.join(missing)}",
                hint="start ranks through holdfast.launch, which sets them before Python starts",
            )
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
    reseed(seed)


def reseed(seed: int) -> None:
    """Begin every generator anew: Python's, NumPy's and torch's, the CPU's and every GPU's."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
