"""What a rank ran on: recorded with every attempt."""

import platform
from pathlib import Path
from typing import Any


def describe_environment() -> dict[str, Any]:
    """Versions and hardware that decide which bits an operation gives."""
    import numpy as np
    import torch

    has_cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_cuda else None,  # type: ignore[no-untyped-call]
        "gpus": [
            {"name": torch.cuda.get_device_name(index), "sm": list(torch.cuda.get_device_capability(index))}
            for index in range(torch.cuda.device_count() if has_cuda else 0)
        ],
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
