"""All GPUs of this machine and their health, as ``nvidia-smi`` reports them."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from holdfast.terminal import counted

PROGRAM = "nvidia-smi"
GPU_NAME, STYLE = re.compile(r"GPU\d+"), re.compile(r"\x1b\[[0-9;]*m")
# The timeout of nvidia-smi, which takes ten seconds on a machine with eight GPUs and without the persistence daemon.
WITHIN_S = 60.0

XML = re.compile(r"<\?xml.*</nvidia_smi_log>", re.S)
# The texts that nvidia-smi prints instead of a value if it can't reach a GPU.
UNREACHABLE = re.compile("GPU is lost|GPU requires reset|fallen off the bus", re.I)
# The texts that nvidia-smi prints both for an unreachable GPU and for a sensor that a healthy GPU lacks. In the fields
# about a GPU's health these texts are a fault; in other fields they mean nothing.
UNREADABLE = re.compile("Unknown Error|ERR!", re.I)
HEALTH_FIELDS = ("uuid", "ecc_errors", "retired_pages", "remapped_rows", "gpu_recovery_action")
# The fields that count uncorrected memory errors. The fields depend on the driver and the GPU: up to Volta there is one
# total, later one field for each kind of memory.
UNCORRECTED = (
    "double_bit/total", "sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded",
    "dram_uncorrectable",
)  # fmt: skip
FAULTS = {
    "gpu_reset_status/reset_required": "the GPU has to be reset",
    "ecc_errors/aggregate/sram_threshold_exceeded": "the GPU's SRAM has had more errors than NVIDIA allows",
    "ecc_errors/unrepairable_memory": "a part of the GPU's memory can't be repaired",
    "remapped_rows/remapped_row_failure": "a faulty row of the GPU's memory can't be replaced",
    "retired_pages/pending_retirement": "a faulty page of the GPU's memory stays in use until the next reset",
    "retired_pages/pending_blacklist": "a faulty page of the GPU's memory stays in use until the next reset",
}
# Source: NVIDIA GPU Memory Error Management: while a remapping is pending, new work may be started.
NOTES = {
    "remapped_rows/remapped_row_pending": "a row of the GPU's memory will be replaced at the next reset",
    "ecc_errors/channel_repair_pending": "a memory channel will be repaired at the GPU's next reset",
    "ecc_errors/tpc_repair_pending": "a processing cluster will be repaired at the GPU's next reset",
}
COUNTS = {
    "retired_pages/multiple_single_bit_retirement/retired_count": ("memory page", "retired after corrected errors"),
    "retired_pages/double_bit_retirement/retired_count": ("memory page", "retired after uncorrected errors"),
    "remapped_rows/remapped_row_unc": ("memory row", "replaced after uncorrected errors"),
}
NO_ACTION = ("", "None", "N/A")


@dataclass(frozen=True)
class Gpu:
    """A GPU, as nvidia-smi reports it.

    Attributes:
        index: the GPU's number in nvidia-smi.
        memory: the memory's size with its unit, such as ``81559 MiB``.
        is_split: whether the GPU is in MIG mode, in which a process sees only a part of it.
        faults: reasons not to train on the GPU, for a person.
        notes: events to tell a person about, which are no reason against training on the GPU.
    """

    index: int
    uuid: str
    name: str = ""
    memory: str = ""
    is_split: bool = False
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


@dataclass(frozen=True)
class GpuReport:
    """The answer of nvidia-smi.

    Attributes:
        gpus: all GPUs that nvidia-smi lists, in its order.
        problem: why nvidia-smi gave no answer; empty if it answered.
        is_fault: whether a GPU or its driver has caused the problem; False on a machine without a GPU.
    """

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    is_fault: bool = False


def read_report(within_s: float = WITHIN_S) -> GpuReport:
    """Ask nvidia-smi for all GPUs and their health, and return the answer.

    Args:
        within_s: seconds in which nvidia-smi must answer. No answer in time is a fault of the driver.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        return GpuReport(problem=f"{PROGRAM} is not on PATH")
    try:
        exit_code, text = run_command([program, "-q", "-x"], within_s)
    except subprocess.TimeoutExpired:
        return GpuReport(problem=f"{PROGRAM} did not answer within {within_s:g} s", is_fault=True)
    except OSError as error:
        return GpuReport(problem=f"{PROGRAM} can't be run: {error.strerror}")
    if "No devices were found" in text:
        return GpuReport()
    shown = XML.search(text)
    # nvidia-smi prints warnings before and after the XML
    said = [line.strip() for line in XML.sub("", text).splitlines() if line.strip()]
    fault = next(filter(UNREACHABLE.search, said), "")
    with contextlib.suppress(ElementTree.ParseError):
        if shown and not fault:  # if a GPU is lost, the XML may have no entry for the GPU
            return parse_report(shown[0])
    known = fault or next(iter(said), f"exit code {exit_code}")
    return GpuReport(problem=f"{PROGRAM} failed: {known}", is_fault=bool(fault))


def read_links(within_s: float = WITHIN_S) -> str | None:
    """Return the links between this machine's GPUs, with a row for each GPU: ``X NV18, NV18 X``; None if unknown.

    The kinds of links are named as in ``nvidia-smi topo -m``.

    Args:
        within_s: seconds in which nvidia-smi must answer.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        return None
    try:
        exit_code, text = run_command([program, "topo", "-m"], within_s)
    except (subprocess.TimeoutExpired, OSError):
        return None
    lines = [[cell.strip() for cell in STYLE.sub("", line).split("\t")] for line in text.splitlines()]
    count = max((sum(bool(GPU_NAME.fullmatch(cell)) for cell in cells) for cells in lines), default=0)
    rows = [" ".join(cells[1 : count + 1]) for cells in lines if GPU_NAME.fullmatch(cells[0])]
    return ", ".join(rows) if exit_code == 0 and len(rows) == count > 0 else None


def run_command(command: list[str], within_s: float) -> tuple[int, str]:
    """Run a command. Return its exit code and its output.

    Raises:
        subprocess.TimeoutExpired: the command did not end in time. It may still run, because no signal can kill it
            while its driver hangs.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=within_s)
        return process.returncode, text
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            assert process.stdout is not None
            process.stdout.close()


def parse_report(text: str) -> GpuReport:
    """Return the report from the output of ``nvidia-smi -q -x``.

    Raises:
        xml.etree.ElementTree.ParseError: the output isn't XML.
    """
    return GpuReport(
        tuple(_parse_gpu(index, gpu) for index, gpu in enumerate(ElementTree.fromstring(text).iter("gpu")))
    )


def _parse_gpu(index: int, gpu: ElementTree.Element) -> Gpu:
    return Gpu(
        index,
        uuid=_find(gpu, "uuid"),
        name=_find(gpu, "product_name"),
        memory=_find(gpu, "fb_memory_usage/total"),
        is_split=_find(gpu, "mig_mode/current_mig") == "Enabled",
        faults=tuple(dict.fromkeys(_list_faults(gpu))),
        notes=tuple(_list_notes(gpu)),
    )


def _list_faults(gpu: ElementTree.Element) -> Iterator[str]:
    values = [value.strip() for value in gpu.itertext()]
    health = [value.strip() for name in HEALTH_FIELDS for field in gpu.iter(name) for value in field.itertext()]
    yield from (f"nvidia-smi says {value!r}" for value in filter(UNREACHABLE.search, values))
    yield from (f"nvidia-smi reports the GPU's health as {value!r}" for value in filter(UNREADABLE.search, health))
    if errors := _count_uncorrected(gpu, "volatile"):
        yield f"{counted(errors, 'uncorrected ECC error')} since its last reset"
    action = _find(gpu, "gpu_recovery_action")
    if action not in NO_ACTION and not UNREACHABLE.search(action) and not UNREADABLE.search(action):
        yield f"the GPU's driver asks for a recovery: {action}"
    yield from (meaning for path, meaning in FAULTS.items() if _find(gpu, path) == "Yes")


def _list_notes(gpu: ElementTree.Element) -> Iterator[str]:
    yield from (meaning for path, meaning in NOTES.items() if _find(gpu, path) == "Yes")
    if errors := _count_uncorrected(gpu, "aggregate"):
        yield f"{counted(errors, 'uncorrected ECC error')} in its life"
    for path, (what, reason) in COUNTS.items():
        if number := _find_number(gpu, path):
            yield f"{counted(number, what)} {reason}"


def _count_uncorrected(gpu: ElementTree.Element, since: str) -> int:
    return sum(_find_number(gpu, f"ecc_errors/{since}/{name}") for name in UNCORRECTED)


def _find(gpu: ElementTree.Element, path: str) -> str:
    return (gpu.findtext(path) or "").strip()


def _find_number(gpu: ElementTree.Element, path: str) -> int:
    value = _find(gpu, path)
    return int(value) if value.isdecimal() else 0
