"""The hardware contract: the table of terms that two environments must share for equal bits, and their comparison.

The verdict "identical" is a promise: everything that the bits depend on is equal, as far as the libraries'
documentation says. "not promised" predicts nothing: the bits may still be equal, and often are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.machine.determinism import FULL
from holdfast.machine.environment import CPU_VARIABLES, GPU_VARIABLES, PROCESS_VARIABLES, chooses_kernels
from holdfast.terminal.distribution import OWN_NAMES

Device = Literal["cpu", "cuda"]

PYTORCH = "PyTorch, Reproducibility: not guaranteed across releases, commits, platforms, nor between CPU and GPU"
CUBLAS = "cuBLAS, Results Reproducibility: one version, one architecture, one number of SMs"
CUDNN = "cuDNN, Odds and Ends, Reproducibility: one version and one architecture"
ONEMKL = "oneMKL Developer Guide, Obtaining Numerically Reproducible Results: code path, threads"
ONEDNN = "oneDNN, CPU Dispatcher Control: code is generated for the features that the CPU has"


@dataclass(frozen=True)
class Term:
    """One property by which two environments are compared.

    Attributes:
        key: the property's key in `describe_environment`.
        on: the devices on which a difference may change bits; if empty, the property is only recorded.
        why: how a difference changes bits, or why it doesn't; ``holdfast doctor --json`` prints this text.
        compared: the part of the property's value that is compared, as a key of `PARTS`.
        source: the documentation or the issue that proves `why`; empty if the reason is obvious.
        free: the part of the value that may differ.
        before: the part in records of earlier versions, which lack the property; empty if it isn't known.
    """

    key: str
    on: tuple[Device, ...]
    why: str
    compared: str = "whole"
    source: str = ""
    free: str = ""
    before: str = ""


# The properties of an environment on which, with three ranks or more, NCCL's order of summation depends.
TOPOLOGY = ("nodes", "gpus_per_node", "links")
VIRTUAL = "the bits would be equal only with compute.virtual_ranks"

BOTH: tuple[Device, ...] = ("cpu", "cuda")

TERMS = (
    Term("device", BOTH, "a CPU and a GPU add up in different orders", source=PYTORCH),
    Term("system", BOTH, "each platform has its own builds of torch", source=PYTORCH),
    Term(
        "libc", BOTH, "schedules and optimizers use the C library's cos, exp, pow",
        source="GNU C Library manual, Known Maximum Errors in Math Functions: results are not correctly rounded",
    ),
    Term(
        "python", BOTH, "sum() of floats changed in 3.12 and in 3.14", "major.minor",
        source="python/cpython#100425", free="python's patch version",
    ),
    Term("torch", BOTH, "a different release or build of torch has different kernels", source=PYTORCH),
    Term("numpy", BOTH, "NumPy's random numbers may change with its version", source="NEP 19"),
    Term("accelerate", BOTH, "accelerate accumulates, scales and clips gradients"),
    Term("torchdata", BOTH, "torchdata's loaders draw random numbers"),
    Term("deterministic", BOTH, "without it, torch makes atomic additions in any order", "switch", PYTORCH),
    Term(
        "precision", BOTH, "TF32 and bf16 round each product; earlier versions demanded full precision",
        "reduced", source="PyTorch, Numerical accuracy: reduced precision of float32 products", before="full",
    ),
    Term("variables", BOTH, "variables choose kernels or the order of a set", "those of the process"),
    Term("cpu", ("cpu",), "libraries choose kernels by the CPU's model", source=ONEMKL),
    Term("cpu_family", ("cpu",), "clouds give different CPUs the same model name", source=ONEMKL),
    Term("cpu_vector", ("cpu",), "wider vectors add up in a different order", "words", ONEDNN),
    Term(
        "cpu_vector", ("cuda",), "the host's cos, exp and pow give different bits without FMA", "fma",
        source="seen: glibc 2.36 gives 0.999 ** n different bits with its FMA variants turned off",
    ),
    Term(
        "cpu_cache", ("cpu",), "matrices are summed in blocks that fit in the cache",
        source="oneDNN, platform::get_per_core_cache_size",
    ),
    Term("cpu_capability", ("cpu",), "torch has different kernels for each capability"),
    Term("mkl", ("cpu",), "MKL multiplies matrices; its version decides the order of sums", source=ONEMKL),
    Term("onednn", ("cpu",), "oneDNN convolves; its version decides the order of sums", source=ONEDNN),
    Term("threads", ("cpu",), "each thread sums a part of the terms", source=ONEMKL),
    Term("variables", ("cpu",), "variables choose the CPU's kernels and threads", "those of the CPU", ONEMKL),
    Term(
        "gpus", ("cuda",), "architecture and SMs choose the kernels",
        "architecture and SMs", CUBLAS, free="a GPU's name",
    ),
    Term("cuda", ("cuda",), "cuBLAS promises nothing across versions", source=CUBLAS),
    Term(
        "cudnn", ("cuda",), "the kernels change with the minor version", "major.minor", CUDNN,
        free="cuDNN's patch version",
    ),
    Term("nccl", ("cuda",), "NCCL adds up the gradients of several ranks"),
    Term("variables", ("cuda",), "variables choose GPU kernels and workspaces", "those of the GPU", CUBLAS),
    Term(
        "topology", (), "NCCL sums along the links; compared from three GPU ranks on, if the sum depends on them",
        source="NVIDIA/nccl#23, #1461",
    ),
    Term("driver", (), "torch and CUDA ship compiled kernels, so the driver changes no bits"),
    Term("cpu_flags", (), "a digest that tells machines apart; many flags don't affect computation"),
    Term("gpu_uuids", (), "recorded to name a GPU that computes wrongly"),
)  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """A limit of the contract: a cause of different bits that no term covers.

    Attributes:
        on: the devices on which this cause matters.
    """

    on: tuple[Device, ...]
    text: str


LIMITS = (
    Limit(BOTH, "code that torch.compile or the recipe compiles on the machine"),
    Limit(("cuda",), "kernels that the driver compiles, for a GPU that is newer than torch's build"),
    Limit(("cuda",), "values that a recipe computes on the host: they are the same only on the same CPU"),
    Limit(("cuda",), "NCCL's own files, /etc/nccl.conf and ~/.nccl.conf, and plugins that choose its algorithms"),
    Limit(
        ("cuda",), "several nodes with the same GPUs and links, but a different network or NVLink domain between them"
    ),
)


@dataclass(frozen=True)
class Verdict:
    """The promise of equal bits to a run that was trained in one environment and continues in another.

    Attributes:
        reasons: a line for each difference that rules out the promise; empty if equal bits are promised.
    """

    promise: Literal["identical", "not promised"]
    reasons: tuple[str, ...] = ()


def judge(
    saved: Mapping[str, Any], current: Mapping[str, Any], ranks: tuple[int | None, int | None] = (None, None)
) -> Verdict:
    """Decide whether a run trained in the environment ``saved`` continues in ``current`` with equal bits.

    Both environments are results of `describe_environment`. If either lacks a value, the value counts as different,
    because nothing can be promised about it. On a device without terms nothing is promised.

    Args:
        ranks: the saved and the current number of ranks; None for an unknown number, or if the bits don't depend on it.
    """
    device = saved.get("device") or current.get("device")
    terms = terms_on(device)
    if current.get("device") not in (None, device):
        # Another device rules out equal bits, and lacks most of the properties that the terms compare.
        terms = tuple(term for term in terms if term.key == "device")
    parts = [(term, part_of(term, saved), part_of(term, current)) for term in terms]
    reasons = [line for term, old, new in parts for line in _differences(term, old, new)]
    for where, missing in (
        ("not recorded", [term.key for term, old, _ in parts if old is None]),
        ("not known here", [term.key for term, _, new in parts if new is None]),
    ):
        if missing:
            reasons.append(f"{', '.join(dict.fromkeys(missing))}: {where}")
    reasons += [
        f"{name}: saved {was!r}, here {now or 'not installed'!r}" for name, was, now in list_changed(saved, current)
    ]
    reasons += _changed_ranks(*ranks)
    reasons += _changed_topology(saved, current, *ranks)
    if not terms:
        reasons.append(f"device: nothing is promised on {device!r}" if device else "device: not recorded")
    return Verdict("not promised", tuple(reasons)) if reasons else Verdict("identical")


def list_changed(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the packages that the recipe imported and that have changed since the save, or are missing now.

    Each entry has the package's name, its saved description, and its description now, which is empty if the package is
    missing. A package has changed if its version or its files differ. If an older record lacks packages or their files,
    these aren't compared. Holdfast isn't compared either, because other records contain its version and code.
    """
    versions, now = saved.get("packages"), current.get("packages")
    if not isinstance(versions, Mapping) or not isinstance(now, Mapping):
        return []
    changed = []
    for name, version in sorted(versions.items()):
        if name in OWN_NAMES:
            continue
        files, own = ((each.get("package_files") or {}).get(name) for each in (saved, current))
        if now.get(name) != version:
            changed.append((name, version, now.get(name, "")))
        elif files and own and files != own:
            changed.append((name, *(f"{version}, {_describe_files(each)}" for each in (files, own))))
    return changed


def _describe_files(files: Mapping[str, Any]) -> str:
    edited = ", ".join(f"{name} ({sha256[:8]})" for name, sha256 in files.get("edited", {}).items())
    return f"installed files {files['record'][:8]}" + (f", edited since: {edited}" if edited else "")


def _changed_ranks(saved: int | None, current: int | None) -> list[str]:
    """Return a line if the number of ranks changed, because gradient sums and random numbers depend on the number."""
    if None in (saved, current) or saved == current:
        return []
    return [f"ranks: saved {saved}, here {current}; {VIRTUAL}"]


def _changed_topology(
    saved: Mapping[str, Any], current: Mapping[str, Any], ranks_then: int | None, ranks: int | None
) -> list[str]:
    """Return a line for each reason why NCCL may sum in a different order than before; none for 1 or 2 ranks."""
    if saved.get("device") != "cuda" or ranks is None or ranks != ranks_then or ranks < 3:
        return []
    old, new = (each.get("topology") or {} for each in (saved, current))
    for where, found in (("not recorded", old), ("not known here", new)):
        if not found.get("links"):
            return [f"topology: {where}; {VIRTUAL}"]
    names = [name for name in TOPOLOGY if old.get(name) != new.get(name)]
    return [f"topology: {name} saved {old.get(name)!r}, here {new.get(name)!r}; {VIRTUAL}" for name in names]


def terms_on(device: str | None) -> tuple[Term, ...]:
    """Return the terms that apply to a device; an empty tuple for a device about which nothing is promised."""
    return tuple(term for term in TERMS if device in term.on)


def part_of(term: Term, environment: Mapping[str, Any]) -> Any:
    """Return the part of an environment that the term compares; None if the part is unknown or has an unknown form."""
    value = environment.get(term.key)
    if value is None:
        return term.before or None
    try:
        return PARTS[term.compared](value)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _differences(term: Term, saved: Any, current: Any) -> list[str]:
    if saved is None or current is None:
        return []
    if saved == current and not (term.compared == "switch" and saved == "off"):
        return []
    if isinstance(saved, dict) and isinstance(current, dict):
        names = [name for name in sorted(saved | current) if saved.get(name) != current.get(name)]
        return [f"{name}: saved {_shown(saved.get(name))}, here {_shown(current.get(name))}" for name in names]
    if isinstance(saved, frozenset):
        only = (("saved", saved - current), ("here", current - saved))
        return [
            f"{term.key}: " + "; ".join(f"only {name} {' '.join(sorted(words))!r}" for name, words in only if words)
        ]
    return [f"{term.key}: saved {saved!r}, here {current!r}"]


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def _minor(value: Any) -> str:
    """Return the major and minor version: ``3.11`` for ``3.11.7``; ``9.10`` for cuDNN's 91002, ``8.9`` for its 8907."""
    if isinstance(value, int):
        thousands = 10_000 if value >= 10_000 else 1000
        return f"{value // thousands}.{value % thousands // 100}"
    major, minor, *_ = value.split(".")
    return f"{major}.{minor}"


def _kinds(gpus: list[dict[str, Any]]) -> str | None:
    kinds = {f"sm_{gpu['sm'][0]}{gpu['sm'][1]} with {gpu['sm_count']} SMs" for gpu in gpus}
    return " and ".join(sorted(kinds)) or None


def _only(*patterns: str) -> Callable[[dict[str, str]], dict[str, str]]:
    return lambda variables: {name: value for name, value in variables.items() if chooses_kernels(name, patterns)}


PARTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda value: value,
    "switch": lambda value: "on" if value is True else "off",
    "major.minor": _minor,
    "reduced": lambda value: " ".join(f"{name}={each}" for name, each in value.items() if each != FULL) or "full",
    "words": lambda value: frozenset(value.split()),
    "fma": lambda value: "with fma" if {"fma", "asimd"} & {*value.split()} else "without fma",
    "architecture and SMs": _kinds,
    "those of the process": _only(*PROCESS_VARIABLES),
    "those of the CPU": _only(*CPU_VARIABLES),
    "those of the GPU": _only(*GPU_VARIABLES),
}
