"""Requests to Prefect's server that are repeated while the server is away."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import SyncClientContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

ASK_AGAIN_S = 0.5
WARN_AFTER = 5  # after this many consecutive failures a warning is logged
# The HTTP statuses with which a busy or starting server answers.
TRANSIENT = {429, 500, 502, 503, 504}

T = TypeVar("T")

log = logging.getLogger("holdfast.asking")


def ask_server(ask: Callable[[SyncPrefectClient], T]) -> T:
    """Ask Prefect's server and return its answer. Repeat the request while the server is away."""
    failures = 0
    while True:
        try:
            # The client's own retries wait for 2, 4, 8, ... seconds: too long if the server is only busy.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), SyncClientContext.get_or_create() as context:
                return ask(context.client)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in TRANSIENT:
                raise
            failures += 1
            if failures == WARN_AFTER:
                log.warning("Prefect's server doesn't answer (%s); the request is repeated until it does", error)
            time.sleep(ASK_AGAIN_S)
