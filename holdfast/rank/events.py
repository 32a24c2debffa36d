"""What a rank reports."""

import json
import os
import threading
from typing import Any


class Events:
    """The reports of the main rank; those of others, and those that nobody reads any more, go nowhere."""

    def __init__(self) -> None:
        # The recipe may print whatever it likes: nothing but events gets into the pipe.
        self._pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()  # a save is reported beside the training
        self._is_main = os.environ.get("RANK", "0") == "0"

    def send(self, event: str, **fields: Any) -> None:
        if not self._is_main:
            return
        try:
            with self._lock:
                print(json.dumps({"event": event, **fields}), file=self._pipe, flush=True)
        except BrokenPipeError:
            self._is_main = False  # the attempt has died; what is saved is found on the store
