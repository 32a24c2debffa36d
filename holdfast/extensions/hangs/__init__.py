"""The search for ranks that hang: it names the rank, its step and the user's line, and all ranks are replaced."""

from holdfast.extending import Extension

extension = Extension(
    "hangs",
    settings="holdfast.extensions.hangs.table:Hangs",
    watch="holdfast.extensions.hangs.watch:make_watch",
)
