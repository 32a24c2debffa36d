"""Objects that only record a training: loggers, writers and progress bars. No step depends on their state."""

import re
from typing import Any

# The packages whose objects only record a training.
PACKAGES = {
    "aim", "comet_ml", "csv", "logging", "mlflow", "neptune", "rich", "swanlab", "tensorboard", "tensorboardX", "tqdm",
    "trackio", "wandb",
}  # fmt: skip
CLASSES = re.compile(r".*(Logger|SummaryWriter|ProgressBar|Profiler)$")


def is_recorder(value: Any) -> bool:
    """Return whether an object only records a training, by its package or its class's name."""
    kind = type(value)
    is_known = kind.__module__.partition(".")[0] in PACKAGES or kind.__module__.startswith("torch.utils.tensorboard")
    return is_known or CLASSES.match(kind.__name__) is not None
