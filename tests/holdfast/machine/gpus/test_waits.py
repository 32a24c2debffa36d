"""A process sleeps while it waits for a GPU, unless somebody has chosen another way of waiting."""

import ctypes
import logging
from typing import Any

import pytest

from holdfast.machine.gpus.waits import sleep_in_waits

SPINS, SLEEPS, MAPS = 0x01, 0x04, 0x08  # CU_CTX_SCHED_SPIN, CU_CTX_SCHED_BLOCKING_SYNC, CU_CTX_MAP_HOST


class Driver:
    """The driver's functions on GPUs with these flags, with the types of the C functions."""

    def __init__(self, *flags: int, refuses: str = "") -> None:
        self.flags = [*flags]
        for name in ("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxGetState"):
            setattr(self, name, ctypes.PYFUNCTYPE(ctypes.c_int, *ARGUMENTS[name])(getattr(self, f"_{name}")))
        self.cuDevicePrimaryCtxSetFlags_v2 = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_uint)(self._set)
        self.code = 999 if refuses else 0

    def _cuInit(self, flags: int) -> int:  # noqa: N802
        return self.code

    def _cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count[0] = len(self.flags)
        return 0

    def _cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        device[0] = number
        return 0

    def _cuDevicePrimaryCtxGetState(self, device: int, flags: Any, is_active: Any) -> int:  # noqa: N802
        flags[0], is_active[0] = self.flags[device], 0
        return 0

    def _set(self, device: int, flags: int) -> int:
        self.flags[device] = flags
        return 0


NUMBER, FLAGS = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,), "cuDeviceGetCount": (NUMBER,), "cuDeviceGet": (NUMBER, ctypes.c_int),
    "cuDevicePrimaryCtxGetState": (ctypes.c_int, FLAGS, NUMBER),
}  # fmt: skip


def test_waits_for_each_gpu_sleep_unless_somebody_has_chosen_how_they_wait() -> None:
    driver = Driver(0, MAPS, SPINS)
    sleep_in_waits(driver)
    assert driver.flags == [SLEEPS, MAPS | SLEEPS, SPINS]


def test_a_driver_that_refuses_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sleep_in_waits(Driver(0, refuses="cuInit"))
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "cuInit returned 999" in warning
