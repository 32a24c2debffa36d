"""A server for S3, by moto, with atomic create-once: ``python -m tests.support.s3_server PORT``.

Moto alone checks whether an object exists and then creates it, without a lock between threads.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple


class OneAtATime:
    """A moto application that carries out conditional writes one at a time."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        with self._lock:
            return list(self._app(environ, start_response))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    arguments = ("127.0.0.1", int(sys.argv[1]), OneAtATime())
    threading.Thread(
        target=run_simple, args=arguments, kwargs={"threaded": True, "request_handler": MotoRequestHandler}, daemon=True
    ).start()
    sys.stdin.read()  # returns when the parent process ends, even if it is killed
