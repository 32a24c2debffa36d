"""From a URL to a store, or to a refusal by name."""

from holdfast.errors import ConfigError
from holdfast.store.contract import Store
from holdfast.store.local import LocalStore

# Which package brings a scheme's file system, and which of our extras brings the package.
EXTRAS = {"s3": "s3", "s3a": "s3", "az": "azure", "abfs": "azure", "abfss": "azure"}


def open_store(url: str) -> Store:
    """The store that a folder or a URL names. Nothing is read or written yet.

    Credentials and endpoints come from the environment, as each cloud's own tools read them; nothing of them is kept.

    Raises:
        ConfigError: the scheme isn't known to create a name once, or its package isn't installed.
    """
    scheme, separator, path = url.partition("://")
    if not separator:
        return LocalStore(url)
    if scheme in ("file", "local"):
        return LocalStore(path)
    if scheme == "memory":
        from holdfast.store.memory import MemoryStore

        return MemoryStore(path)
    if scheme not in EXTRAS:
        raise ConfigError(
            f"store = {url!r}: {scheme}:// is not known to create a name once, which commits rest on",
            hint=f"a folder, or one of {', '.join(f'{name}://' for name in EXTRAS)}",
        )
    from holdfast.store.objects import ObjectStore

    try:
        return ObjectStore(url)
    except ImportError as error:
        raise ConfigError(f"store = {url!r}: {error}", hint=f"pip install 'holdfast[{EXTRAS[scheme]}]'") from None
