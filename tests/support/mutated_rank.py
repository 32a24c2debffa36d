"""Run one of several ranks with a fault in its code; see `tests.support.mutants`.

``python -m tests.support.mutated_rank FAULT MODULE``; `holdfast.processes` knows a rank by the name of its module.
"""

import runpy
import sys

from tests.support.mutants import find_fault

if __name__ == "__main__":
    find_fault(sys.argv[1])()
    runpy.run_module(sys.argv[2], run_name="__main__")
