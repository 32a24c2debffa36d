"""Refuse a recipe that only this program has, such as a notebook's cell: ranks are other processes and import it."""

import sys
from pathlib import Path


def check_importable(recipe: object) -> None:
    """Check that a rank can import a recipe.

    Raises:
        ValueError: the recipe is a function, or a name in ``__main__``; the message says how to name it.
    """
    module, name = getattr(recipe, "__module__", ""), getattr(recipe, "__qualname__", "")
    if isinstance(recipe, str):
        module, _, name = recipe.rpartition(":")
        if module != "__main__":
            return
    elif not callable(recipe) or not name.isidentifier():
        return
    if module != "__main__":
        raise ValueError(f'expected the name of the function: recipe = "{module}:{name}"')
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise ValueError(
            "a rank is another process, and can't import a function of a notebook's cell: begin the cell with "
            f'%%writefile {name}.py, import there what the function needs, and set recipe = "{name}.py:{name}"'
        )
    raise ValueError(
        f'a rank is another process, whose __main__ is another program: set recipe = "{Path(file).name}:{name}", and '
        f'start the training below the line if __name__ == "__main__"'
    )
