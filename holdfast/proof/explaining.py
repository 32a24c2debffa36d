"""`python -m holdfast.proof.explaining RUN STEP RECIPE`: explain a step, in a child process of an attempt.

One line of JSON on standard output is the answer, a `SpikeAnswer`. The end of standard input tells the process to end:
the attempt has closed standard input, or has died. See `holdfast.attempt.explaining`.
"""

import os
import signal
import sys
import threading

from holdfast.attempt.explaining import SpikeAnswer
from holdfast.errors import HoldfastError
from holdfast.journal.finding import open_journal
from holdfast.proof.explanation import MEANINGS, Explanation, explain_step
from holdfast.recipe.permission import Trust
from holdfast.terminal import interrupt

# The nice value of the process and of its ranks. A positive value lowers their priority below that of training.
NICENESS = 10


def answer(run: str, step: int, recipe: str) -> SpikeAnswer:
    """Explain a step of the run ``STORE/RUN``, trained again with this recipe."""
    try:
        found = explain_step(open_journal(run), step, trust=Trust(recipe=recipe))
    except HoldfastError as error:
        return SpikeAnswer(cause="", text=f"it can't be explained: {error}")
    return SpikeAnswer(cause=found.cause, text=_describe(found))


def _describe(found: Explanation) -> str:
    if found.cause == "none":
        return MEANINGS["none"]
    if found.cause != "data":
        return f"the cause is {MEANINGS[found.cause]}"
    worst = found.list_far()[0]
    return f"sample {worst.index} (content {worst.content}) has a loss of {worst.loss:.4g} before the step"


def _end_with_attempt() -> None:
    while os.read(0, 1024):  # not sys.stdin, whose lock would be held when Python exits
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Print the answer. On SIGTERM, end the ranks first."""
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, interrupt.end)
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # send a library's prints to standard error: standard output carries only the answer
    threading.Thread(target=_end_with_attempt, daemon=True).start()
    run, step, recipe = sys.argv[1:]
    print(answer(run, int(step), recipe).model_dump_json(), file=own, flush=True)


if __name__ == "__main__":
    main()
