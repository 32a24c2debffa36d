"""Virtual ranks: a step whose bits don't depend on the number of ranks that train it."""

from holdfast.extending import Extension

extension = Extension("virtual_ranks", cooperation="holdfast.extensions.virtual_ranks.cooperation:make_virtual")
