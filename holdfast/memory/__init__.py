"""Optimizations of memory and speed. These make saves, restores and starts cheaper, and don't change any saved byte.

Each optimization has a name. The variable ``HOLDFAST_WITHOUT="direct,priority"`` turns these two off, to find the cause
of a problem or to measure the gain. `make bench` also measures without each optimization; docs/performance.md has the
figures.

=================  ========================================================================================
``buffers``        `Buffers`: each save reuses the memory of the last save
``huge pages``     `map_memory`: this memory is mapped in pages of 2 MiB
``direct``         `memory.direct`: large files are written and read past the system's page cache
``priority``       `Priority`: the threads of a save have a lower priority than training
``pinning``        `memory.pinning`: a GPU copies into page-locked memory
``late compiler``  `memory.late_compiler`: an optimizer doesn't load torch's compiler
=================  ========================================================================================

This package does not import `memory.pinning` and `memory.late_compiler`, because these modules import torch.
"""

from holdfast.memory.buffers import Buffers, Pin, map_memory
from holdfast.memory.priority import Priority
from holdfast.memory.shared import SharedBuffers, map_shared
from holdfast.memory.switches import WITHOUT_VARIABLE, is_on

__all__ = [
    "WITHOUT_VARIABLE",
    "Buffers",
    "Pin",
    "Priority",
    "SharedBuffers",
    "is_on",
    "map_memory",
    "map_shared",
]
