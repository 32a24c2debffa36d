"""Memory and speed: what makes a save and a restore cheap, and changes no byte of either.

Each means has a name. ``HOLDFAST_WITHOUT="direct,prefetch"`` turns some off: to find out whether one is to blame, or to
measure what it gains. `make bench` has a row "without" for each; docs/performance.md has the figures.

==============  ========================================================================================
``buffers``     `Buffers`: save after save uses the same memory
``huge pages``  `map_memory`: large pieces of memory are asked for in pages of 2 MiB
``direct``      `memory.direct`: large files are written and read past the system's cache
``priority``    `Priority`: the threads of a save give way to training
``pinning``     `memory.pinning`: a GPU copies into memory that the system doesn't move
``prefetch``    `rank.prefetch`: a rank reads its checkpoint while it imports torch
==============  ========================================================================================

Nothing here imports torch but `pinning`, which has to be imported by name.
"""

from holdfast.memory.buffers import ALIGNED_BYTES, Buffers, map_memory
from holdfast.memory.priority import Priority
from holdfast.memory.switches import WITHOUT_VARIABLE, is_on

__all__ = ["ALIGNED_BYTES", "WITHOUT_VARIABLE", "Buffers", "Priority", "is_on", "map_memory"]
