"""The pipe through which ranks report events and errors to the attempt."""

import os
import threading

from holdfast.errors import HoldfastError
from holdfast.rank.messages import Event, Failed, encode_message

# A write of up to this many bytes to a pipe is never interleaved with another process's. Source: POSIX, PIPE_BUF.
ATOMIC_BYTES = 4096
MESSAGE_LETTERS = 600  # this many characters fit into ATOMIC_BYTES: each takes at most six bytes as JSON


class Events:
    """One rank's end of the pipe: a node's first rank sends events, and every rank sends the error that ends it."""

    def __init__(self) -> None:
        # The recipe may print: send its output to standard error, so that the pipe carries only events.
        self._pipe = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()  # a save's thread and the training thread may report at the same time
        self._is_first = os.environ.get("LOCAL_RANK", "0") == "0"

    def send(self, event: Event) -> None:
        """Report an event if this is a node's first rank, and the process that started this rank is still alive."""
        if self._is_first:
            self._write(encode_message(event))

    def send_error(self, error: HoldfastError) -> None:
        """Report the error that ends this rank.

        Every rank reports its own error: the first error is the cause, and the other ranks' errors are its effects.
        """
        failed = Failed.of(error)
        line = encode_message(failed)
        # write atomically, because the first rank may be writing at the same time
        if not self._is_first and len(line) > ATOMIC_BYTES:
            line = encode_message(Failed(kind=failed.kind, message=failed.message[:MESSAGE_LETTERS]))
        self._write(line)

    def close(self) -> None:
        """Close the pipe, so that nothing is reported any more."""
        with self._lock:
            pipe, self._pipe = self._pipe, -1
            os.close(pipe)

    def _write(self, text: str) -> None:
        line = memoryview(text.encode())
        try:
            with self._lock:
                while line and self._pipe >= 0:
                    line = line[os.write(self._pipe, line) :]
        except BrokenPipeError:
            # the attempt has died, so send nothing more; the next attempt finds the saved checkpoints on the store
            self._is_first = False
