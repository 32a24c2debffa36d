"""The process of a rank."""

import atexit
import gc
import os
import sys

code = 1


def leave() -> None:
    """End here: to take the interpreter apart, with torch in it, would take a second more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.disable()  # until all is built: what is imported stays, and to look through it meanwhile takes 0.4 s
    atexit.register(leave)  # before torch is imported: what is registered first is called last

    from holdfast.determinism import separate_threads

    separate_threads()  # before what names `random`'s functions

    from holdfast.rank.prefetch import Prefetch

    prefetch = Prefetch()

    from holdfast.rank.serving import main  # which imports torch

    code = main(prefetch)
