"""The entry point of a rank's process: set up Python, then run `holdfast.rank.serving`."""

import atexit
import gc
import os
import sys

code = 1


def leave() -> None:
    """Exit without Python's own shutdown, which takes a second longer once torch is imported."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    # disabled until serving.main, because garbage collections during the imports take 0.4 s and free nothing
    gc.disable()
    atexit.register(leave)  # registered before torch is imported, so that it runs after torch's own exit functions

    from holdfast.machine.determinism import separate_threads

    # called early, because a module that has imported a function of `random` by name would keep the original function
    separate_threads()

    from holdfast.rank.orphans import end_if_orphaned

    end_if_orphaned()

    from holdfast.rank.launcher_signals import await_code
    from holdfast.rank.serving import main  # imported last, because this imports torch

    code = await_code(main())
