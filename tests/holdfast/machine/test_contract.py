"""The contract promises equal bits only if every term agrees, and the environment records what the terms need."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import Determinism
from holdfast.machine import determinism
from holdfast.machine.contract import LIMITS, PARTS, TERMS, Verdict, judge, part_of, terms_on
from holdfast.machine.environment import (
    CPU_VARIABLES,
    GPU_VARIABLES,
    PROCESS_VARIABLES,
    Places,
    chooses_kernels,
    describe_environment,
)

PREAMBLE = determinism.preamble(Determinism())
WITHOUT_CUBLAS = {name: value for name, value in PREAMBLE.items() if name != "CUBLAS_WORKSPACE_CONFIG"}

EPYC: dict[str, Any] = {
    "device": "cpu", "system": "Linux x86_64", "libc": "glibc 2.36", "python": "3.11.7",
    "cpu": "AMD EPYC 7763 64-Core Processor", "cpu_family": "AuthenticAMD family 25 model 1",
    "cpu_vector": "avx avx2 f16c fma", "cpu_flags": "ab" * 32, "cpu_cache": "32K 32K 512K 32768K",
    "torch": "2.9.1+cpu", "numpy": "2.3.5", "accelerate": "1.15.0", "torchdata": "0.11.0", "cpu_capability": "AVX2",
    "mkl": "2024.2", "onednn": "3.9.1", "threads": 1, "deterministic": True,
    "precision": {"mkldnn.matmul": "ieee", "cuda.matmul": "ieee"},
    "cuda": None, "cudnn": None, "nccl": "none", "driver": None, "gpus": [], "gpu_uuids": [], "topology": None,
    "variables": PREAMBLE,
}  # fmt: skip
H100_GPU = {"name": "NVIDIA H100 80GB HBM3", "sm": [9, 0], "sm_count": 132}
EIGHT = {"nodes": 1, "gpus_per_node": 8, "links": "X NV18, NV18 X"}
H100: dict[str, Any] = EPYC | {
    "device": "cuda", "torch": "2.9.1+cu128", "cuda": "12.8", "cudnn": 91002, "nccl": "2.27.5",
    "driver": "570.124.06", "gpus": [H100_GPU] * 8, "topology": EIGHT,
}  # fmt: skip
MACHINES = {"cpu": EPYC, "cuda": H100}


def started(**variables: str) -> dict[str, Any]:
    """Return the variables of a process that was started with the preamble, and further ones."""
    return {"variables": PREAMBLE | variables}


# Each row: the device, the values that differ here, and the reasons; none if equal bits are promised.
DIFFERENCES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("both", {}, ()),
    # the device
    ("cpu", H100, ("device: saved 'cpu', here 'cuda'",)),
    ("cuda", EPYC, ("device: saved 'cuda', here 'cpu'",)),
    # the software
    ("both", {"system": "Linux aarch64"}, ("system: saved 'Linux x86_64', here 'Linux aarch64'",)),
    ("both", {"libc": "glibc 2.39"}, ("libc: saved 'glibc 2.36', here 'glibc 2.39'",)),
    ("both", {"python": "3.11.14"}, ()),
    ("both", {"python": "3.12.7"}, ("python: saved '3.11', here '3.12'",)),
    ("cpu", {"torch": "2.9.0+cpu"}, ("torch: saved '2.9.1+cpu', here '2.9.0+cpu'",)),
    ("cpu", {"torch": "2.9.1+cu128"}, ("torch: saved '2.9.1+cpu', here '2.9.1+cu128'",)),
    ("cuda", {"torch": "2.9.1+cu130"}, ("torch: saved '2.9.1+cu128', here '2.9.1+cu130'",)),
    ("both", {"numpy": "2.3.4"}, ("numpy: saved '2.3.5', here '2.3.4'",)),
    ("both", {"accelerate": "1.16.0"}, ("accelerate: saved '1.15.0', here '1.16.0'",)),
    ("both", {"torchdata": "0.11.1"}, ("torchdata: saved '0.11.0', here '0.11.1'",)),
    ("cpu", {"mkl": "none"}, ("mkl: saved '2024.2', here 'none'",)),
    ("cuda", {"mkl": "none"}, ()),
    ("cpu", {"onednn": "3.10"}, ("onednn: saved '3.9.1', here '3.10'",)),
    ("cuda", {"onednn": "none"}, ()),
    ("both", {"deterministic": False}, ("deterministic: saved 'on', here 'off'",)),
    ("both", {"precision": {"mkldnn.matmul": "bf16"}}, ("precision: saved 'full', here 'mkldnn.matmul=bf16'",)),
    ("both", {"precision": None}, ()),  # an earlier version, which demanded full precision
    # the CPU
    ("cpu", {"cpu": "AMD EPYC"}, ("cpu: saved 'AMD EPYC 7763 64-Core Processor', here 'AMD EPYC'",)),
    (
        "cpu", {"cpu_family": "AuthenticAMD family 25 model 17"},
        ("cpu_family: saved 'AuthenticAMD family 25 model 1', here 'AuthenticAMD family 25 model 17'",),
    ),
    ("cpu", {"cpu_vector": "avx avx2 avx512f f16c fma"}, ("cpu_vector: only here 'avx512f'",)),
    ("cpu", {"cpu_vector": "avx amx_tile"}, ("cpu_vector: only saved 'avx2 f16c fma'; only here 'amx_tile'",)),
    ("both", {"cpu_vector": "fma f16c avx2 avx"}, ()),
    ("cuda", {"cpu_vector": "avx avx2 avx512f f16c fma"}, ()),
    ("cuda", {"cpu_vector": "avx"}, ("cpu_vector: saved 'with fma', here 'without fma'",)),
    ("cpu", {"cpu_cache": "not shown"}, ("cpu_cache: saved '32K 32K 512K 32768K', here 'not shown'",)),
    ("cpu", {"cpu_capability": "DEFAULT"}, ("cpu_capability: saved 'AVX2', here 'DEFAULT'",)),
    ("both", {"cpu_flags": "cd" * 32}, ()),
    ("cuda", {"cpu": "Intel", "cpu_family": "GenuineIntel", "cpu_cache": "1K", "cpu_capability": "AVX512"}, ()),
    ("cpu", {"threads": 4}, ("threads: saved 1, here 4",)),
    ("cuda", {"threads": 4}, ()),
    # the GPU
    ("cuda", {"gpus": [H100_GPU]}, ()),
    ("cuda", {"gpus": [H100_GPU | {"name": "NVIDIA H200"}]}, ()),
    (
        "cuda", {"gpus": [{"name": "NVIDIA A100", "sm": [8, 0], "sm_count": 108}]},
        ("gpus: saved 'sm_90 with 132 SMs', here 'sm_80 with 108 SMs'",),
    ),
    (
        "cuda", {"gpus": [H100_GPU | {"name": "NVIDIA H100 PCIe", "sm_count": 114}]},
        ("gpus: saved 'sm_90 with 132 SMs', here 'sm_90 with 114 SMs'",),
    ),
    ("cpu", {"gpus": [H100_GPU], "driver": "570.124.06", "cudnn": 91002, "cuda": "12.8", "nccl": "2.27.5"}, ()),
    ("cuda", {"cudnn": 91003}, ()),
    ("cuda", {"cudnn": 90900}, ("cudnn: saved '9.10', here '9.9'",)),
    ("cuda", {"cudnn": 8907}, ("cudnn: saved '9.10', here '8.9'",)),
    ("cuda", {"cuda": "13.0"}, ("cuda: saved '12.8', here '13.0'",)),
    ("cuda", {"nccl": "2.28.3"}, ("nccl: saved '2.27.5', here '2.28.3'",)),
    ("cuda", {"driver": "580.65.06"}, ()),
    # variables
    ("both", started(PYTHONHASHSEED="1"), ("PYTHONHASHSEED: saved '0', here '1'",)),
    ("both", started(GLIBC_TUNABLES="a"), ("GLIBC_TUNABLES: saved unset, here 'a'",)),
    ("cpu", started(MKL_CBWR="AVX2"), ("MKL_CBWR: saved unset, here 'AVX2'",)),
    ("cpu", started(ATEN_CPU_CAPABILITY="avx2"), ("ATEN_CPU_CAPABILITY: saved unset, here 'avx2'",)),
    ("cpu", started(ONEDNN_MAX_CPU_ISA="AVX2"), ("ONEDNN_MAX_CPU_ISA: saved unset, here 'AVX2'",)),
    ("cuda", started(MKL_CBWR="AVX2", OMP_NUM_THREADS="8"), ()),
    ("cuda", {"variables": WITHOUT_CUBLAS}, ("CUBLAS_WORKSPACE_CONFIG: saved ':4096:8', here unset",)),
    ("cuda", started(NVIDIA_TF32_OVERRIDE="1"), ("NVIDIA_TF32_OVERRIDE: saved unset, here '1'",)),
    ("cpu", started(NVIDIA_TF32_OVERRIDE="1", CUBLAS_WORKSPACE_CONFIG=":16:8"), ()),
    # unknown values
    ("both", {"sources": {"my_model": "1f"}, "added by a later version": 1}, ()),
    ("cpu", {"cpu_family": None}, ("cpu_family: not known here",)),
    ("cuda", {"gpus": []}, ("gpus: not known here",)),
    ("cuda", {"cuda": None}, ("cuda: not known here",)),  # ROCm, to which these terms don't apply
    ("both", {"variables": ["PYTHONHASHSEED=0"], "libc": None}, ("libc, variables: not known here",)),
    # several at once
    ("cpu", {"threads": 2, "libc": "glibc 2.39", "cpu": None}, (
        "libc: saved 'glibc 2.36', here 'glibc 2.39'", "threads: saved 1, here 2", "cpu: not known here",
    )),
]  # fmt: skip

CASES = [
    pytest.param(MACHINES[device], changes, reasons, id=f"{device} {', '.join(changes) or 'nothing'} {len(reasons)}")
    for where, changes, reasons in DIFFERENCES
    for device in (("cpu", "cuda") if where == "both" else (where,))
]


@pytest.mark.parametrize(("saved", "changes", "reasons"), CASES)
def test_a_difference_rules_out_the_promise_only_on_its_terms_devices(
    saved: dict[str, Any], changes: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    assert judge(saved, saved | changes) == Verdict("not promised" if reasons else "identical", reasons)


@pytest.mark.parametrize(("saved", "here"), [(2, 2), (None, 2), (2, None), (None, None)])
def test_ranks_that_are_as_many_or_virtual_keep_the_promise(saved: int | None, here: int | None) -> None:
    assert judge(EPYC, EPYC, (saved, here)) == Verdict("identical")


def test_another_number_of_ranks_rules_out_the_promise() -> None:
    verdict = judge(EPYC, EPYC, (4, 1))
    assert verdict.promise == "not promised"
    assert verdict.reasons == ("ranks: saved 4, here 1; the bits would be equal only with compute.virtual_ranks",)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_term_can_forbid_the_promise(device: str) -> None:
    """Every term has a row in the table above that shows it."""
    lines = [reason for where, _, reasons in DIFFERENCES if where in ("both", device) for reason in reasons]
    shown = {line.partition(":")[0] for line in lines if ": saved" in line or ": only" in line}
    assert {term.key for term in terms_on(device)} <= shown | {"variables"}
    for patterns in (PROCESS_VARIABLES, CPU_VARIABLES if device == "cpu" else GPU_VARIABLES):
        assert any(chooses_kernels(name, patterns) for name in shown)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_value_missing_from_an_old_record_is_not_promised(device: str) -> None:
    machine = MACHINES[device]
    terms = [term for term in terms_on(device) if not term.before]
    for key in {term.key for term in terms}:
        old = {name: value for name, value in machine.items() if name != key}
        assert judge(old, machine) == Verdict("not promised", (f"{key}: not recorded",))
        assert judge(machine, old) == Verdict("not promised", (f"{key}: not known here",))
    everything = ", ".join(dict.fromkeys(term.key for term in terms))
    assert judge({}, machine) == Verdict("not promised", (f"{everything}: not recorded",))


def test_the_record_of_an_earlier_version() -> None:
    """An earlier version recorded eight keys, and GPUs without their number of SMs."""
    keys = ("python", "system", "cpu", "torch", "numpy", "threads", "cuda", "cudnn")
    old = {key: H100[key] for key in keys} | {"gpus": [{"name": "NVIDIA H100 80GB HBM3", "sm": [9, 0]}]}
    missing = "device, libc, accelerate, torchdata, deterministic, variables, cpu_vector, gpus, nccl"
    assert judge(old, H100 | {"cuda": "13.0"}).reasons == (
        "cuda: saved '12.8', here '13.0'",
        f"{missing}: not recorded",
    )
    assert judge(H100 | {"cuda": "13.0"}, old).reasons == (
        "cuda: saved '13.0', here '12.8'",
        f"{missing}: not known here",
    )


def test_an_arm_host_has_fused_multiply_add_too() -> None:
    (term,) = (term for term in TERMS if term.compared == "fma")
    assert part_of(term, {"cpu_vector": "asimd sve"}) == part_of(term, EPYC) == "with fma"


def test_a_process_that_is_not_deterministic_promises_nothing_even_to_itself() -> None:
    for machine in MACHINES.values():
        off = machine | {"deterministic": False}
        assert judge(off, off).reasons == ("deterministic: saved 'off', here 'off'",)


def test_a_device_without_a_contract_promises_nothing() -> None:
    mac = EPYC | {"device": "mps"}
    assert judge(mac, mac).reasons == ("device: nothing is promised on 'mps'",)
    assert judge(mac, EPYC).promise == judge(EPYC, mac).promise == "not promised"
    assert judge({}, {}).reasons == ("device: not recorded",)


words = st.lists(st.sampled_from(["avx", "avx2", "fma", "amx_tile"]), min_size=1).map(" ".join)
versions = st.sampled_from(["1.2.3", "1.2.4", "1.3.0", "2.0"])
gpus = st.fixed_dictionaries(
    {"name": st.text(), "sm": st.just([9, 0]) | st.just([8, 0]), "sm_count": st.integers(1, 3)}
)
names = st.sampled_from(["PYTHONHASHSEED", "MKL_CBWR", "DNNL_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE", "TORCH_HOME"])
texts = st.sampled_from(["a", "b"])
environments = st.fixed_dictionaries(
    dict.fromkeys(("system", "libc", "cpu", "cpu_family", "cpu_flags", "cpu_cache", "cpu_capability", "mkl"), texts)
    | dict.fromkeys(("python", "torch", "numpy", "accelerate", "torchdata", "onednn", "cuda", "nccl"), versions)
    | {"device": st.sampled_from(["cpu", "cuda"]), "cpu_vector": words, "threads": st.integers(1, 2)}
    | {"deterministic": st.just(True), "driver": st.none() | versions, "cudnn": st.sampled_from([8907, 90100, 91002])}
    | {"gpus": st.lists(gpus, min_size=1), "variables": st.dictionaries(names, texts)}
)


@given(environments)
def test_a_machine_promises_equal_bits_to_itself(machine: dict[str, Any]) -> None:
    assert judge(machine, machine) == Verdict("identical")
    assert judge(json.loads(json.dumps(machine)), machine) == Verdict("identical")


@given(environments, environments)
def test_neither_direction_promises_more_than_the_other(one: dict[str, Any], other: dict[str, Any]) -> None:
    there, back = judge(one, other), judge(other, one)
    assert (there.promise, len(there.reasons)) == (back.promise, len(back.reasons))
    assert (there.promise == "identical") == (not there.reasons)
    counting = {term.key for term in terms_on(one["device"]) if not term.before}
    if one["device"] == other["device"] and all(one[key] == other[key] for key in counting):
        assert there.promise == "identical"


shapes = st.none() | st.integers() | st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.text())


@given(st.dictionaries(st.sampled_from(sorted(EPYC)), shapes))
def test_a_record_of_any_shape_is_judged(record: dict[str, Any]) -> None:
    for machine in MACHINES.values():
        assert judge(machine | record, machine).promise in ("identical", "not promised")
        assert all(reason.count("\n") == 0 for reason in judge(machine | record, machine).reasons)


# ---- the data


def test_the_terms_are_about_what_is_described() -> None:
    described = describe_environment()
    assert {term.key for term in TERMS} == described.keys() == EPYC.keys()
    for term in TERMS:
        assert term.compared in PARTS
        assert term.why
        assert part_of(term, MACHINES[term.on[0] if term.on else "cuda"]) is not None
    assert {device for limit in LIMITS for device in limit.on} == {"cpu", "cuda"}


@pytest.mark.parametrize(
    ("ranks", "saved", "here", "reasons"),
    [
        (8, EIGHT, EIGHT, []),
        (
            8,
            EIGHT,
            EIGHT | {"nodes": 2, "gpus_per_node": 4},
            ["nodes saved 1, here 2", "gpus_per_node saved 8, here 4"],
        ),
        (8, EIGHT, EIGHT | {"links": "X SYS, SYS X"}, ["links saved 'X NV18, NV18 X', here 'X SYS, SYS X'"]),
        (8, None, EIGHT, ["not recorded"]),
        (8, EIGHT, EIGHT | {"links": None}, ["not known here"]),
        (2, EIGHT, None, []),  # the sum of two has one order
        (None, EIGHT, None, []),  # virtual ranks add in an order of their own
    ],
)
def test_three_gpus_or_more_add_in_the_order_of_their_links(
    ranks: int | None, saved: Any, here: Any, reasons: list[str]
) -> None:
    pair = [MACHINES["cuda"] | {"topology": topology} for topology in (saved, here)]
    found = judge(pair[0], pair[1], (ranks, ranks))
    assert [reason.partition(";")[0] for reason in found.reasons] == [f"topology: {reason}" for reason in reasons]
    on_cpus = [MACHINES["cpu"] | {"topology": topology} for topology in (saved, here)]
    assert judge(on_cpus[0], on_cpus[1], (ranks, ranks)).promise == "identical"


# ---- the record


def test_every_value_is_known_on_this_machine_and_the_record_is_small() -> None:
    described = describe_environment()
    missing = {term.key for term in terms_on("cpu") if part_of(term, described) is None}
    assert missing == set()
    assert len(json.dumps(described)) < 2000


def test_the_recorded_device_is_the_training_device() -> None:
    assert (describe_environment()["device"], describe_environment("cuda")["device"]) == ("cpu", "cuda")


@pytest.mark.parametrize(
    ("name", "is_recorded"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", True), ("PYTHONHASHSEED", True), ("OMP_NUM_THREADS", True),
        ("TORCHINDUCTOR_DETERMINISTIC", True), ("TORCHINDUCTOR_CACHE_DIR", False),
        ("MKL_NUM_THREADS", True), ("ATEN_CPU_CAPABILITY", True), ("MKL_CBWR", True), ("DNNL_MAX_CPU_ISA", True),
        ("ONEDNN_MAX_CPU_ISA", True), ("ONEDNN_DEFAULT_FPMATH_MODE", True), ("NVIDIA_TF32_OVERRIDE", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", True), ("TORCH_BLAS_PREFER_CUBLASLT", True), ("NCCL_ALGO", True),
        ("NCCL_NVLS_ENABLE", True), ("NCCL_MAX_NCHANNELS", True), ("NCCL_SOCKET_IFNAME", False),
        ("ONEDNN_VERBOSE", False), ("MKL_VERBOSE", False), ("NCCL_DEBUG", False), ("TORCH_HOME", False),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", False), ("CUBLAS_LOGINFO_DBG", False), ("AWS_SECRET_ACCESS_KEY", False),
    ],
)  # fmt: skip
def test_variables_that_choose_kernels_are_recorded_and_no_others(
    name: str, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert chooses_kernels(name) is is_recorded
    assert describe_environment()["variables"].get(name) == ("1" if is_recorded else None)


X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
cpu MHz\t\t: 2700.000
flags\t\t: fpu sse2 smep avx fma avx2 avx512f amx_tile hypervisor

processor\t: 1
model name\t: another core
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd sve bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


@pytest.mark.parametrize(
    ("cpuinfo", "cpu", "family", "vector"),
    [
        (
            X86, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "GenuineIntel family 6 model 143",
            "amx_tile avx avx2 avx512f fma",
        ),
        (ARM, "implementer 0x41 part 0xd40", "implementer 0x41 part 0xd40", "asimd bf16 sve"),
    ],
)  # fmt: skip
def test_the_cpu_is_described_by_more_than_its_name(
    cpuinfo: str, cpu: str, family: str, vector: str, tmp_path: Path
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    first = describe_environment(places=Places(cpuinfo=path))
    assert (first["cpu"], first["cpu_family"], first["cpu_vector"]) == (cpu, family, vector)
    path.write_text(cpuinfo.replace("sse2", "sse2 md_clear").replace("asimd", "asimd cpuid"))
    second = describe_environment(places=Places(cpuinfo=path))
    assert {key for key in first if first[key] != second[key]} == {"cpu_flags"}


def test_a_system_without_cpu_files_promises_nothing(tmp_path: Path) -> None:
    none = tmp_path / "none"
    described = describe_environment(places=Places(none, none, (none,))) | {"deterministic": True}
    assert {key for key in ("cpu_family", "cpu_vector", "cpu_flags", "driver") if described[key] is None} == {
        "cpu_family", "cpu_vector", "cpu_flags", "driver",
    }  # fmt: skip
    (*_, last) = judge(described, described).reasons
    assert last.endswith("not known here")
    assert described["cpu_cache"] == "not shown"  # Arm's kernels often don't show it, and the family tells the core
    assert "cpu_family, cpu_vector" in last


def test_the_driver_version_is_read_from_its_file(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n")
    places = Places(drivers=(tmp_path / "none", version))
    assert describe_environment(places=places)["driver"] == "550.54.15"
