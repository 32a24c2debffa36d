"""The attributes of an object, even if its class has ``__slots__`` instead of a ``__dict__``."""

from typing import Any


def read_slots(value: Any) -> dict[str, Any]:
    """Return the attributes that are set in an object's slots, by name."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        found |= {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}
    return found


def read_attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes by name, from its ``__dict__`` and from its slots."""
    return {**getattr(value, "__dict__", {}), **read_slots(value)}
