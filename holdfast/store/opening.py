"""The choice of a store's class by its URL."""

import importlib

from holdfast.errors import ConfigError
from holdfast.store.contract import Store
from holdfast.store.failures import without_secrets
from holdfast.store.local import LocalStore
from holdfast.store.own import load_class
from holdfast.store.permission import check_store, names_code
from holdfast.terminal.distribution import spell_install

# For each URL scheme: the module, the class, and the extra of Holdfast that installs the package that the class needs.
S3, AZURE, GCS = ("s3", "S3Store", "s3"), ("azure", "AzureStore", "azure"), ("gcs", "GcsStore", "gcs")
STORES = {"s3": S3, "s3a": S3, "az": AZURE, "abfs": AZURE, "abfss": AZURE, "gs": GCS, "gcs": GCS}
# Every scheme of a store's URL, except the schemes of custom stores.
SCHEMES = {*STORES, "file", "local", "memory"}
CREDENTIALS_REFUSED = (
    "the URL contains credentials or a query; give only the bucket and the folder, and put credentials into the "
    "environment"
)


def open_store(url: str) -> Store:
    """Return the store at a folder's path or a URL. Don't read or write anything.

    Credentials and endpoints come from the environment, in the variables that each cloud's own tools use. Holdfast
    doesn't save them.

    Raises:
        ConfigError: the URL is empty, or contains a null character, credentials or an unknown user's home folder; the
            scheme is unknown, or its package isn't installed; the environment has no credentials; the operator doesn't
            allow the store; or the user's store class can't be imported.
    """
    if "\0" in url:
        raise ConfigError(f"store = {url!r}: a folder's name can't contain a null character")
    scheme, separator, path = url.partition("://")
    is_remote = bool(separator) and scheme not in ("file", "local", "memory")
    if is_remote and "::" in url.removeprefix(scheme):  # fsspec would open the second URL, too
        raise ConfigError(
            f"store = {url!r}: a store can't be several URLs joined by ::", hint="give a folder, or the URL of one"
        )
    if is_remote and holds_credentials(url):
        raise ConfigError(f"store = '{scheme}://...': {CREDENTIALS_REFUSED}")
    check_store(url)
    if not (path if separator else url).strip() and scheme != "memory":
        # An empty name, such as from an unset variable of a script, must not mean the current folder.
        raise ConfigError(
            f"store = {url!r}: it names no folder", hint="give a folder or a URL; . is the current folder"
        )
    if not separator and (begin := url.partition(":")[0]) in SCHEMES and begin != url:
        # A mistyped URL must not train into a folder of that name beside the program.
        rest = url.removeprefix(f"{begin}:").lstrip("/")
        raise ConfigError(
            f"store = {url!r}: a URL has two slashes after {begin}:",
            hint=f"give {begin}://{rest}; or ./{url} for a folder of this name",
        )
    if not separator or scheme in ("file", "local"):
        try:
            return LocalStore(path if separator else url)
        except RuntimeError as error:  # the path begins with the home folder of an unknown user
            raise ConfigError(f"store = {url!r}: {error}", hint="give the folder's whole path") from None
    if names_code(url):
        return _open_own(scheme, url)
    if scheme == "memory":
        from holdfast.store.memory import MemoryStore

        return MemoryStore(path)
    if scheme not in STORES:
        raise ConfigError(
            f"store = {url!r}: {scheme}:// isn't known to create a file only if its name is free, and commits need "
            "this",
            hint=f"give a folder, or one of {', '.join(f'{name}://' for name in STORES)}",
        )
    module, cls, extra = STORES[scheme]
    try:
        store: Store = getattr(importlib.import_module(f"holdfast.store.{module}"), cls)(url)
    except ImportError as error:
        raise ConfigError(f"store = {url!r}: {error}", hint=spell_install(extra)) from None
    except Exception as error:
        raise ConfigError(
            f"store = {url!r}: {without_secrets(str(error))}", hint="set the cloud's usual credentials"
        ) from None
    return store


def _open_own(scheme: str, url: str) -> Store:
    """Return a store whose class the user has written. `check_store` must have allowed it."""
    found = load_class(f"store = {url!r}", scheme, Store)  # type: ignore[type-abstract]
    try:
        return found(url)  # type: ignore[call-arg]
    except ConfigError:
        raise
    except Exception as error:  # catch any error, because the user's class may raise it
        raise ConfigError(f"store = {url!r}: {type(error).__name__}: {error}") from error


def holds_credentials(url: str) -> bool:
    """Return whether a URL contains a user, a password or a query, in which credentials may be."""
    scheme, _, path = url.partition("://")
    bucket = path.partition("/")[0]
    # Azure's URLs have the form abfs://container@account..., so an "@" doesn't mean credentials.
    user = "@" in bucket and STORES.get(scheme) != AZURE
    return user or "?" in path or (":" in bucket and "@" in path)
