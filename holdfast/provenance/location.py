"""The location of an error: the line of the user's code that led to it. Also hints for other libraries' errors."""

import re
import sys
import traceback
import types
from collections.abc import Callable

from holdfast.provenance.ownership import is_own_file
from holdfast.terminal.distribution import spell_install

_LINE = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)
MAX_LETTERS = 400
# torch puts the traceback of a DataLoader worker into the error's message, after this line.
_WORKER = "Original Traceback (most recent call last):"

# Texts in the error messages of other libraries. Each has a hint that says what to do in a run.
HINTS = {
    "initialize the default process group twice": "leave out init_process_group and destroy_process_group: the ranks "
    "have a process group; run.rank, run.world_size and run.accelerator.prepare(model) take the place of DDP's lines",
    "not have a deterministic implementation": "use a different operation: the documentation of "
    "torch.use_deterministic_algorithms lists those that are deterministic; or "
    '--set determinism.mode="fast", which doesn\'t promise equal bits',
    "No module named 'transformers'": spell_install("transformers"),
    "No module named 'lightning'": spell_install("lightning"),
}


def find_hint(error: BaseException) -> str:
    """Return the hint for a known error of another library; empty for all other errors."""
    return next((hint for text, hint in HINTS.items() if text in str(error)), "")


def describe_error(error: BaseException) -> str:
    """Return one line for an error: the user's file and line that led to the error, the error's type and message.

    If the traceback contains none of the user's code, the line names the file and line that raised the error.
    """
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    kind = f"{type(error).__name__}: "
    if _WORKER in text:
        frames += [(name, int(line)) for name, line in _LINE.findall(text)]
        kind, text = "", text.strip().splitlines()[-1] + ", in a loader worker"
    own = [frame for frame in frames if is_own_file(frame[0])]
    where = "{}:{}: ".format(*(own or frames)[-1]) if frames else ""
    text = " ".join(text.split())  # shorten the text, because some of torch's messages have a hundred lines
    return f"{where}{kind}{text if len(text) <= MAX_LETTERS else text[:MAX_LETTERS] + '...'}"


def find_frames(function: Callable[..., object], outside: types.CodeType | None = None) -> list[types.FrameType]:
    """Return the stack frames of the user's own code from here up to the call of ``function``, innermost first.

    Args:
        outside: a code object. The frames of functions that this code has called are left out.
    """
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is outside:
            frames.clear()
        elif is_own_file(frame.f_code.co_filename):
            frames.append(frame)
        if frame.f_code is getattr(function, "__code__", None):
            break
        frame = frame.f_back
    return frames


def find_place() -> str:
    """Return ``file:line: `` of the innermost stack frame of the user's code; empty if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}: "
