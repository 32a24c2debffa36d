"""The errors of cloud libraries: which are retried, and how they become Holdfast's errors without secrets."""

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

# A separate generator, because training draws from Python's global generator, and a retry must not change the numbers
# that training draws.
_random = random.SystemRandom()

_PERMANENT = (
    HoldfastError, FileExistsError, FileNotFoundError, PermissionError, IsADirectoryError,
    ValueError, TypeError, KeyError,
)  # fmt: skip
_PERMANENT_ERRNO = {errno.EINVAL, errno.ENAMETOOLONG, errno.EROFS, errno.ENOSPC}
# S3's error codes. _CUT: the network has cut or changed a request, although the status is 400. _CREDENTIALS and _CLOCK:
# the credentials or this machine's clock are wrong; s3fs reports both as a missing permission. Source:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_CUT = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}
_CREDENTIALS = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired"}
_CLOCK = {"RequestTimeTooSkewed"}
# The code of a failed HEAD request. The response to HEAD has no body, so it contains none of the codes above.
_BARE = "400"
# Matches the value after "AccountKey=", "?sig=", "X-Amz-Security-Token: " and similar keys, and user:password before
# the host in a URL.
_SECRET = re.compile(
    r"(?i)((?:sig|signature|key|secret|token|password|credential)['\"]?\s*[=:]\s*['\"]?|bearer\s+)[^&;,\s'\"]+"
    r"|(?<=://)[^\s/@]*:[^\s@]*(?=@)"
)


def retried(request: Callable[[], T], where: str, within_s: float = RETRY_WITHIN_S) -> T:
    """Send a request and return its result. After a transient failure, send the request again.

    Args:
        where: the action and its place, for the error's message: "read a in s3://bucket".
        within_s: seconds after the first try during which the request is repeated.
    """
    deadline = time.monotonic() + within_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return request()
        except Exception as error:
            if not _is_transient(error) or time.monotonic() + pause_s > deadline:
                with translate_library_errors(where):
                    raise
        time.sleep(pause_s * _random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


@contextlib.contextmanager
def translate_library_errors(where: str) -> Iterator[None]:
    """Convert each error that a library raises in the block to a `StoreError` without secrets: "can't <where>: ..."."""
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
                raise StoreDenied(
                    f"can't {where}: {text}", hint="create the bucket, or name a different store"
                ) from None
            raise NameMissing(f"can't {where}: it does not exist") from None
        if status == 401 or _is_about_credentials(error):
            raise StoreDenied(f"can't {where}: {text}", hint="set the cloud's usual credentials") from None
        if _code_of(error) == _BARE:
            hint = "set the cloud's usual credentials: expired credentials are often refused without a reason"
            raise StoreDenied(f"can't {where}: {text}", hint=hint) from None
        if _code_of(error) in _CLOCK:
            raise StoreDenied(f"can't {where}: {text}", hint="set this machine's clock") from None
        if isinstance(error, PermissionError) or status == 403:
            raise StoreDenied(
                f"can't {where}: {text}",
                hint="give this machine's identity the right to perform this action",
                lacks_right=True,
            ) from None
        # Don't chain the cause, because it would show the secrets that were removed from the text.
        cause = error if text == str(error) else None
        raise StoreError(f"can't {where}: {type(error).__name__}: {text}") from cause


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status that led to an error or to one of its causes; None if there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        status = getattr(error, "status_code", None) or getattr(error, "code", None)
        if type(error).__module__ == "aiohttp.http_exceptions":
            status = None  # aiohttp's code 400 means only that it couldn't parse a response, perhaps an incomplete one
        if isinstance(response, dict):  # an error of botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return status
        if str(error).startswith("Forbidden: "):  # an error of gcsfs
            return 403
        error = error.__cause__
    return None


def _code_of(error: BaseException | None) -> str:
    """Return S3's error code in the response that led to an error; empty if there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # an error of botocore
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def without_secrets(text: str) -> str:
    """Return the text with ``***`` in place of anything that looks like a key, token, signature or password."""
    return _SECRET.sub(lambda found: f"{found[1] or ''}***", text)


def _is_transient(error: Exception) -> bool:
    if _code_of(error) in _CUT:
        return True
    if (
        isinstance(error, _PERMANENT)
        or _is_about_credentials(error)
        or getattr(error, "errno", None) in _PERMANENT_ERRNO
    ):
        return False
    status = status_of(error)
    return status is None or status < 400 or status >= 500 or status in (408, 409, 429)


def _is_about_credentials(error: Exception) -> bool:
    name = type(error).__name__
    return "credential" in name.lower() or "ClientAuthentication" in name or _code_of(error) in _CREDENTIALS
