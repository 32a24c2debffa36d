"""The environment of a rank (versions, hardware, variables), recorded with every attempt.

`holdfast.machine.contract` compares two environments. An unknown value is None, and nothing is promised about it.
"""

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

from holdfast.machine.determinism import read_precision
from holdfast.machine.gpus.report import read_links

# Patterns of the environment variables that choose kernels or an order of summation. Matching variables are recorded.
# Variables for logs, caches and timeouts are excluded, because they differ between machines and don't change bits.
PROCESS_VARIABLES = ("PYTHONHASHSEED", "GLIBC_TUNABLES", "TORCHINDUCTOR_DETERMINISTIC", "TORCH_LINEAR_FLATTEN_3D")
CPU_VARIABLES = (
    "OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_THREAD_LIMIT", "MKL_*THREADS", "MKL_DYNAMIC", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ATEN_CPU_CAPABILITY", "ONEDNN_*ISA*", "DNNL_*ISA*",
    "*_FPMATH_MODE", "TORCH_MKLDNN_*", "NPY_*_CPU_FEATURES", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
    "OPENBLAS_BLOCK_FACTOR", "OPENBLAS_NUM_THREADS",
)  # fmt: skip
GPU_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_*EMULAT*", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32*", "TORCH_*PREFER*", "TORCH_CUDNN_*", "DISABLE_ADDMM_CUDA_LT",
    # NCCL's order of summation depends on its algorithm, and on the layout of its rings and channels.
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_*", "NCCL_COLLNET_*", "NCCL_M*_NCHANNELS", "NCCL_M*_CTAS", "NCCL_NTHREADS",
    "NCCL_BUFFSIZE", "NCCL_*_THRESHOLD", "NCCL_RINGS", "NCCL_GRAPH_FILE", "NCCL_TOPO_FILE", "NCCL_CONF_FILE",
    "NCCL_TUNER_*", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_CROSS_NIC", "NCCL_P2P_*", "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NVB_DISABLE", "NCCL_PXN_DISABLE", "NCCL_MNNVL_*", "NCCL_RUNTIME_CONNECT",
    "NCCL_NCHANNELS_PER_NET_PEER",
)  # fmt: skip

# Prefixes of x86's and Arm's vector extensions, so that future extensions match, too. (smep doesn't belong to the
# prefix sme.)
VECTOR = re.compile(r"avx|fma|f16c|amx|xop|asimd|neon|sve|sme(?!p)|fphp|i8mm|bf16")


@dataclass(frozen=True)
class Places:
    """The files in which Linux describes the CPU, its caches and NVIDIA's driver."""

    cpuinfo: Path = Path("/proc/cpuinfo")
    caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")
    drivers: tuple[Path, ...] = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))


LINUX = Places()


def describe_environment(device: str = "cpu", places: Places = LINUX) -> dict[str, Any]:
    """Return the versions, hardware and settings of this process that decide which bits an operation gives.

    Args:
        device: the type of the training device, as torch names it: cpu or cuda.
        places: the system's files to read.
    """
    return {
        "device": device,
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or platform.version() or None,
        "python": platform.python_version(),
        **_describe_cpu(places),
        **_describe_torch(),
        "precision": read_precision(device),
        **_describe_gpus(places),
        "topology": _describe_topology() if device == "cuda" else None,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if chooses_kernels(name)},
    }


def chooses_kernels(name: str, patterns: tuple[str, ...] = PROCESS_VARIABLES + CPU_VARIABLES + GPU_VARIABLES) -> bool:
    """Return whether an environment variable of this name may change bits."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _describe_cpu(places: Places) -> dict[str, Any]:
    """Return the CPU's name, family, vector instructions and caches.

    The name isn't enough, because clouds often use one name for different CPUs.
    """
    shown = _read_cpuinfo(places.cpuinfo)
    family = " ".join(
        f"{label} {shown[name]}".strip()
        for name, label in (
            ("vendor_id", ""), ("cpu family", "family"), ("model", "model"),
            ("CPU implementer", "implementer"), ("CPU part", "part"),
        )
        if name in shown
    )  # fmt: skip
    flags = sorted({*shown.get("flags", shown.get("Features", "")).split()})
    return {
        "cpu": shown.get("model name") or family or platform.processor() or None,
        "cpu_family": family or None,
        "cpu_vector": " ".join(flag for flag in flags if VECTOR.match(flag)) or None,
        "cpu_flags": hashlib.sha256(" ".join(flags).encode()).hexdigest() if flags else None,
        "cpu_cache": " ".join(read_system_file(path) for path in sorted(places.caches.glob("index*/size")))
        or "not shown",
    }


def _read_cpuinfo(path: Path) -> dict[str, str]:
    """Return the fields of the first core in a cpuinfo file."""
    lines = read_system_file(path).partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _describe_torch() -> dict[str, Any]:
    import torch

    build = torch.__config__.show()
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    has_onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        **{name: version(name) for name in ("numpy", "accelerate", "torchdata")},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": _find(r"Math Kernel Library Version ([\d.]+)", build) if has_mkl else "none",
        "onednn": _find(r"MKL-DNN v([\d.]+)", build) if has_onednn else "none",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _describe_gpus(places: Places) -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    has_nccl = bool(gpus) and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    drivers = (_find(r"(\d+\.\d[.\d]*)", read_system_file(path)) for path in places.drivers)
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpus else None,  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",  # type: ignore[no-untyped-call]
        "driver": next(filter(None, drivers), None),
        "gpus": [
            {"name": gpu.name, "sm": [gpu.major, gpu.minor], "sm_count": gpu.multi_processor_count} for gpu in gpus
        ],
        # with the prefix that nvidia-smi prints
        "gpu_uuids": [f"GPU-{gpu.uuid}" for gpu in gpus if hasattr(gpu, "uuid")],
    }


def _describe_topology() -> dict[str, Any]:
    """Return the number of nodes, the GPUs of each node, and the links between the GPUs of this node.

    The links are None for one or two ranks, because only with more ranks does NCCL's order of summation depend on them.
    """
    ranks, of_node = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    links = read_links() if ranks > 2 else None
    return {"nodes": ranks // of_node, "gpus_per_node": of_node, "links": links}


def _find(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def read_system_file(path: Path) -> str:
    """Return the text of a system file; empty if it can't be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
