"""The self-test of a rank's device: one small training step, computed twice from equal numbers, has equal bits.

Each rank tests its own device once it has built its recipe, and `holdfast doctor` tests all devices. A device whose
bits differ computes wrong numbers. The test takes a tenth of a second on a CPU core.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import __version__
from holdfast.config import DEFAULT_SEED
from holdfast.errors import SelfTestFailed
from holdfast.machine import determinism, faults
from holdfast.machine.contract import judge
from holdfast.machine.heartbeats import name_device
from holdfast.machine.host import name_host

if TYPE_CHECKING:
    from torch import Tensor

Bits = dict[str, str]  # for each part of a step, the SHA-256 of its result and gradients

UNPROMISED = ("driver", "cpu_flags")  # properties that `judge` doesn't compare, although they may change bits
KEY = "self_test"  # the key of a `SelfTest` in a record's environment
RECORDED = ("host", "where", "sha256", "flags")
HINT = "train on a different machine, and have this one examined; --set compute.gpu_health=warn trains anyway"


@dataclass(frozen=True)
class SelfTest:
    """The result of the self-test of one device.

    Attributes:
        host: the name of the machine that has the device.
        where: `host`, and the GPU's number if the device is a GPU.
        model: the device's model; devices of one model in one machine compute equal bits.
        sha256: a digest of the step's bits.
        flags: a digest of torch's flags, which a recipe may set, and of Holdfast's version: two tests are comparable
            only if their flags are equal.
        differing: the parts of the step whose bits differed between the two computations.
    """

    host: str
    where: str
    model: str
    sha256: str
    flags: str
    differing: tuple[str, ...] = ()

    def describe(self) -> dict[str, str]:
        """Return the fields that are recorded with each attempt, as `KEY` in the attempt's environment."""
        return {name: getattr(self, name) for name in RECORDED}


def run_self_test(device: str) -> SelfTest:
    """Compute the same step twice on a device of this machine, and compare the bits.

    Args:
        device: the device, as torch names it.
    """
    with determinism.strictly():
        first, second = (take_step(device, is_wrong=is_wrong) for is_wrong in faults.takes_flips())
    differing = tuple(part for part, bits in first.items() if bits != second[part])
    # include the version, because a later version may compute another step
    flags = _digest(determinism.read_flags() | {"holdfast": __version__})
    return SelfTest(name_host(), name_device(device), _name_model(device), _digest(first), flags, differing)


def _name_model(device: str) -> str:
    import torch

    if not device.startswith("cuda"):
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} with {properties.multi_processor_count} SMs"


def find_fault(tests: Sequence[SelfTest], name: str = "rank") -> str:
    """Return a line that names the devices whose self-tests failed; empty if none failed.

    A device's test fails if the bits of its two steps differ, or if most devices of the same model on the same host
    have different bits. If no bits have a majority among these devices, the line names all of them.

    Args:
        name: the word for a device's owner in the message, such as "rank"; a number follows this word.
    """
    lines = []
    for number, test in enumerate(tests):
        who = f"{name} {number} on {test.where}" if len(tests) > 1 else test.where
        if test.differing:
            lines.append(f"{who} gave different bits when it computed the same again ({', '.join(test.differing)})")
            continue
        alike = [each.sha256 for each in tests if _is_like(each, test)]
        if 2 * alike.count(test.sha256) <= len(alike):
            lines.append(f"{who} gave different bits than other devices of the same model ({test.model})")
    return f"the self-test failed: {'; '.join(lines)}" if lines else ""


def _is_like(one: SelfTest, other: SelfTest) -> bool:
    return (one.host, one.model, one.flags) == (other.host, other.model, other.flags) and not one.differing


def compare_with_records(records: Iterable[Mapping[str, Any]], current: Mapping[str, Any]) -> tuple[str, bool]:
    """Compare this machine's self-test with the recorded self-tests of earlier attempts.

    Two tests are compared only if the hardware contract promises equal bits between their machines, and if their flags
    are equal. If the first comparable record has equal bits, no more records are read. Otherwise each host's newest
    record is one vote, and a machine that agrees with most hosts is not blamed.

    Args:
        records: the environments of attempts, the newest first.
        current: this machine's environment.

    Returns:
        a line about the difference, which is empty if the tests agree or can't be compared; and whether this host
        itself gave different bits before, with the same driver and the same CPU flags. If so, its hardware is at fault.
    """
    now, others = _find_test(current), dict[str, Mapping[str, str]]()
    if now is None:
        return "", False
    is_unstable = False
    for record in records:
        then = _find_test(record)
        if then is None or then["host"] in others or not _is_comparable(record, current):
            continue
        is_equal = then["sha256"] == now["sha256"]
        if is_equal and not others:
            return "", False
        others[then["host"]] = then
        if then["host"] == now["host"] and not is_equal:
            is_unstable = all(record.get(name) == current.get(name) for name in UNPROMISED)
    differing = [then for then in others.values() if then["sha256"] != now["sha256"]]
    if not differing or (not is_unstable and 2 * len(differing) < len({now["host"], *others})):
        return "", False
    given = ", ".join(dict.fromkeys(then["sha256"][:12] for then in differing))
    line = (
        f"self-test: {now['where']} gives different bits than "
        f"{' and '.join(then['where'] for then in differing)} gave, "
        f"with the same model of machine and the same versions ({now['sha256'][:12]}, not {given})"
    )
    return line, is_unstable


def _find_test(environment: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the self-test in an environment; None if there is no self-test, or if it has an unknown form."""
    test = environment.get(KEY)
    is_known = isinstance(test, Mapping) and all(isinstance(test.get(name), str) for name in RECORDED)
    return test if is_known else None


def _is_comparable(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Return whether the self-tests of two machines must have equal bits."""
    if saved[KEY]["flags"] != current[KEY]["flags"] or judge(saved, current).promise != "identical":
        return False
    # `judge` doesn't compare the names of GPUs, but GPUs of one architecture may differ in memory or clock rate.
    return _name_gpus(saved) == _name_gpus(current)


def _name_gpus(environment: Mapping[str, Any]) -> set[str]:
    return {str(gpu.get("name")) for gpu in environment.get("gpus") or ()}


def refuse(fault: str) -> SelfTestFailed:
    """Return the error to raise for the result of `find_fault`."""
    return SelfTestFailed(fault, hint=HINT)


def take_step(device: str, seed: int = DEFAULT_SEED, *, is_wrong: bool = False) -> Bits:
    """Compute a small training step (forward, backward and optimizer), and return a digest of the bits of each part.

    The step draws from its own random generator, and doesn't change the generators of the training.

    Args:
        is_wrong: whether to flip a bit of the step's matrix product, to simulate a fault.
    """
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> "Tensor":
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(device).requires_grad_()

    def multiply(left: "Tensor", right: "Tensor") -> "Tensor":
        product = torch.matmul(left, right)
        if is_wrong:
            with torch.no_grad():
                product.view(torch.int32)[0, 0] ^= 1
        return product

    parts: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "matmul": (multiply, [draw(256, 512), draw(512, 128)]),
        "conv": (F.conv2d, [draw(8, 16, 32, 32), draw(32, 16, 3, 3)]),
        "attention": (F.scaled_dot_product_attention, [draw(4, 4, 64, 32) for _ in range(3)]),
        "embedding": (lambda table: F.embedding(torch.arange(4096, device=device) % 64, table), [draw(64, 128)]),
        "sum": (torch.sum, [draw(1_000_000)]),
    }
    bits = {name: bits_of(operation, given) for name, (operation, given) in parts.items()}
    weights = parts["matmul"][1]
    torch.optim.AdamW(weights).step()
    return bits | {"optimizer": _hash(weights)}


def bits_of(operation: "Callable[..., Tensor]", given: "list[Tensor]") -> str:
    """Run an operation and return the SHA-256 of its result and of the gradients of its arguments."""
    import torch

    with torch.enable_grad():
        result = operation(*given)
        result.square().sum().backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad for each in given]
    return _hash([result, *(gradient for gradient in gradients if gradient is not None)])


def _hash(tensors: "Sequence[Tensor]") -> str:
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
