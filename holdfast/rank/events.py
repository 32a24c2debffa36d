"""What a rank reports."""

import os
import threading

from holdfast.errors import HoldfastError
from holdfast.rank.messages import Event, Failed, encode

# A write of so many bytes to a pipe is never mixed with another process's. Source: POSIX, PIPE_BUF.
ATOMIC_BYTES = 4096
MESSAGE_LETTERS = 600  # six bytes each, as JSON, at most


class Events:
    """The reports of the main rank, and the errors of all ranks, which share the pipe."""

    def __init__(self) -> None:
        # The recipe may print whatever it likes: nothing but events gets into the pipe.
        self._pipe = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()  # a save is reported beside the training
        self._is_main = os.environ.get("RANK", "0") == "0"

    def send(self, event: Event) -> None:
        """Report an event, if this is the main rank and somebody still reads."""
        if self._is_main:
            self._write(encode(event))

    def send_error(self, error: HoldfastError) -> None:
        """Report the error that ends this rank.

        Every rank does: the first error is the cause, and what the other ranks then raise is its effect.
        """
        failed = Failed.of(error)
        line = encode(failed)
        if not self._is_main and len(line) > ATOMIC_BYTES:  # the main rank may be writing, too
            line = encode(Failed(kind=failed.kind, message=failed.message[:MESSAGE_LETTERS]))
        self._write(line)

    def _write(self, text: str) -> None:
        line = memoryview(text.encode())
        try:
            with self._lock:
                while line:
                    line = line[os.write(self._pipe, line) :]
        except BrokenPipeError:
            self._is_main = False  # the attempt has died; what is saved is found on the store
