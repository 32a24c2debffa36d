"""The sinks of MLflow and Trackio that docs/metrics.md shows, as their readers have them in modules of their own."""

import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")


def load(name: str) -> Any:
    """Return the class with this name from the page's code."""
    (code,) = [
        each for each in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if f"class {name}(Sink)" in each
    ]
    module: dict[str, Any] = {"__name__": __name__}
    exec(compile(code, f"docs/metrics.md: {name}", "exec"), module)
    return module[name]


def __getattr__(name: str) -> Any:
    if name in ("MLflow", "Trackio"):
        return load(name)
    raise AttributeError(name)
