"""Settings of torch's compiler with which a kernel doesn't depend on what its process has computed before.

A run that resumes begins with a different batch than the process before it. The compiler learns from the batches so
far, and may time several kernels. Both would lead to different results in the two processes.
"""

import sys
from types import ModuleType
from typing import Any

from holdfast.config import Determinism

CONFIG = "torch._dynamo.config"
AUTOTUNER = "triton.runtime.autotuner"

# By default torch compiles a function again for any size once it has seen two sizes, and stops compiling after 8
# sizes. It also reads from a file which sizes changed in earlier processes.
STEADY = {
    "automatic_dynamic_shapes": False,
    "automatic_dynamic_local_pgo": False,
    "recompile_limit": 2**20,
    "accumulated_recompile_limit": 2**20,
}


# The compiler's module of settings when `steady_compiler` was called last; None if the compiler wasn't loaded then.
_seen: ModuleType | None = None


def steady_new_compiler(settings: Determinism) -> None:
    """Call `steady_compiler` if torch's compiler was loaded since the last call. Call this after each step.

    Loading the compiler takes 2 s, so Holdfast doesn't load it, but a step may load it.
    """
    if sys.modules.get(CONFIG) is not _seen:
        steady_compiler(settings)


def steady_compiler(settings: Determinism) -> None:
    """In strict mode, set `STEADY` if torch's compiler is loaded. A function gets a kernel for each size."""
    global _seen
    config: Any = sys.modules.get(CONFIG)
    _seen = config
    if config is not None and settings.mode == "strict":
        for name, value in STEADY.items():
            if getattr(config, name, value) != value:  # a different version of torch may lack the setting
                setattr(config, name, value)


def find_autotuners() -> list[str]:
    """Return the names of Triton's kernels that are chosen by timing, such as ``package.module.kernel``.

    The kernels that torch's compiler makes are left out, because in strict mode it doesn't time them.
    """
    autotuner: Any = getattr(sys.modules.get(AUTOTUNER), "Autotuner", None)
    if autotuner is None:
        return []
    found: dict[int, str] = {}
    for module in [*sys.modules.values()]:
        if not isinstance(module, ModuleType) or module.__name__.startswith(("torch.", "triton.")):
            continue
        for name, value in [*vars(module).items()]:
            kernel = _unwrap(value, autotuner)
            if isinstance(kernel, autotuner) and len(kernel.configs) > 1:
                found.setdefault(id(kernel), f"{module.__name__}.{name}")
    return sorted(found.values())


def _unwrap(value: Any, autotuner: type) -> Any:
    """Return the autotuner that another decorator of Triton keeps in ``fn``; any other value unchanged."""
    while not isinstance(value, autotuner) and str(type(value).__module__).startswith("triton."):
        value = getattr(value, "fn", None)
    return value
