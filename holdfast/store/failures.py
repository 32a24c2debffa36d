"""What a cloud's library raises, as our errors: what may pass, what to mend, and no secrets."""

import contextlib
import errno
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.errors import HoldfastError, NameMissing, NameTaken, StoreDenied, StoreError

RETRY_WITHIN_S = 60.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0

T = TypeVar("T")

# Training draws from Python's global generator: a retry must not.
_chance = random.SystemRandom()

_LASTING = (
    HoldfastError, FileExistsError, FileNotFoundError, PermissionError, IsADirectoryError,
    ValueError, TypeError, KeyError,
)  # fmt: skip
_LASTING_ERRNO = {errno.EINVAL, errno.ENAMETOOLONG, errno.EROFS, errno.ENOSPC}
# What follows "AccountKey=", "?sig=", "X-Amz-Security-Token: " and the like, and what comes before the host in a URL.
_SECRET = re.compile(
    r"(?i)((?:sig|signature|key|secret|token|password|credential)['\"]?\s*[=:]\s*['\"]?|bearer\s+)[^&;,\s'\"]+"
    r"|(?<=://)[^\s/@]*:[^\s@]*(?=@)"
)


def retried(request: Callable[[], T], where: str, within_s: float = RETRY_WITHIN_S) -> T:
    """Ask, and ask again for a while when a failure may pass; return the answer.

    Args:
        where: what can't be done, and where, for the message.
        within_s: for how long the request is asked again.
    """
    deadline = time.monotonic() + within_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return request()
        except Exception as error:
            if not _may_pass(error) or time.monotonic() + pause_s > deadline:
                with explained(where):
                    raise
        time.sleep(pause_s * _chance.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


@contextlib.contextmanager
def explained(where: str) -> Iterator[None]:
    """Whatever a library raises in the block is one of our errors after it."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        status, text = status_of(error), without_secrets(str(error))
        if isinstance(error, FileExistsError) or status == 412:
            raise NameTaken(f"can't {where}: it exists") from None
        if isinstance(error, FileNotFoundError) or status == 404:
            if where.startswith("write"):
                raise StoreDenied(f"can't {where}: {text}", hint="create the bucket, or give another store") from None
            raise NameMissing(f"can't {where}: it does not exist") from None
        if status == 401 or _is_about_credentials(error):
            raise StoreDenied(f"can't {where}: {text}", hint="set the cloud's usual credentials") from None
        if isinstance(error, PermissionError) or status == 403:
            raise StoreDenied(f"can't {where}: {text}", hint="give this machine's identity the right to it") from None
        # The chain would repeat what the text must not.
        cause = error if text == str(error) else None
        raise StoreError(f"can't {where}: {type(error).__name__}: {text}") from cause


def status_of(error: BaseException | None) -> int | None:
    """The status of the HTTP answer that an error comes from, if it comes from one."""
    while error is not None:
        response = getattr(error, "response", None)
        status = getattr(error, "status_code", None) or getattr(error, "code", None)
        if isinstance(response, dict):  # of botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return status
        if str(error).startswith("Forbidden: "):  # of gcsfs
            return 403
        error = error.__cause__
    return None


def without_secrets(text: str) -> str:
    """The text with stars in place of what looks like a key, a token, a signature or a password."""
    return _SECRET.sub(lambda found: f"{found[1] or ''}***", text)


def _may_pass(error: Exception) -> bool:
    if isinstance(error, _LASTING) or _is_about_credentials(error) or getattr(error, "errno", None) in _LASTING_ERRNO:
        return False
    status = status_of(error)
    return status is None or status < 400 or status >= 500 or status in (408, 409, 429)


def _is_about_credentials(error: Exception) -> bool:
    return "credential" in type(error).__name__.lower() or "ClientAuthentication" in type(error).__name__
