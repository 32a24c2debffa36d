"""The setting that lets this process sleep while it waits for a GPU. By default CUDA spins.

A spinning process looks like a computing process, so a rank whose GPU hangs couldn't be told from a rank that compiles.
The spinning also takes a core from the loader's workers.

Source: the CUDA driver API, cuDevicePrimaryCtxSetFlags and CU_CTX_SCHED_BLOCKING_SYNC.
"""

import ctypes
import logging
from typing import Any

LIBRARY = "libcuda.so.1"
BLOCKING_SYNC, SCHEDULING = 0x04, 0x07  # CU_CTX_SCHED_BLOCKING_SYNC, CU_CTX_SCHED_MASK

log = logging.getLogger(__name__)


def sleep_in_waits(driver: Any = None) -> None:
    """Let this process sleep while it waits for a GPU. Call it before torch uses one.

    If the user or a library has already chosen how to wait for a GPU, keep that choice. If the driver refuses, log a
    warning; the process then spins.

    Args:
        driver: the library of the CUDA driver; by default it is loaded.
    """
    try:
        driver = driver or ctypes.CDLL(LIBRARY)
        count = ctypes.c_int()
        _check(driver.cuInit(0), "cuInit")
        _check(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        for number in range(count.value):
            _sleep_for(driver, number)
    except (OSError, AttributeError) as error:
        log.warning(
            "the CUDA driver can't be set to sleep while it waits for a GPU, so each wait takes a full CPU core, and "
            "a hanging GPU is found only after an hour: %s",
            error,
        )


def _sleep_for(driver: Any, number: int) -> None:
    device, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
    state = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
    _check(state, "cuDevicePrimaryCtxGetState")
    if not flags.value & SCHEDULING:
        set_flags = driver.cuDevicePrimaryCtxSetFlags_v2
        _check(set_flags(device, ctypes.c_uint(flags.value | BLOCKING_SYNC)), "cuDevicePrimaryCtxSetFlags")


def _check(code: int, name: str) -> None:
    if code:
        raise OSError(f"{name} returned {code}")
