"""A grid of values that programs keep: dtype x layout x container; and a loop that keeps them in one kind of owner."""

import itertools
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import Run
from holdfast.state.encoding import DTYPES, NUMPY_NAMES

# Sixteen bytes for the elements of a value; no byte is 0 or 1 in all dtypes' first elements.
BYTES = torch.arange(1, 193, dtype=torch.uint8)
SHAPES: dict[str, tuple[int, ...]] = {
    "0-d": (), "empty": (0, 3), "one": (1,), "rows": (2, 3), "columns": (3, 2), "gaps": (2, 4), "expanded": (1, 3),
    "channels last": (1, 2, 3, 2), "reversed": (3,),
}  # fmt: skip
SCALARS: dict[str, Any] = {
    "int": 3, "big": 2**70, "bool": True, "None": None, "str": "a", "bytes": b"a", "complex": 1 + 2j, "nan": math.nan,
    "-0.0": -0.0, "float32": np.float32(0.1), "int8": np.int8(-3), "datetime": np.datetime64(5, "s"),
    "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "fraction": Fraction(1, 3),
    "set": {1, 2}, "frozenset": frozenset({1}), "range": range(3), "counter": Counter(b=2, a=1),
    "float32 and str": [np.float32(1), "text"],
}  # fmt: skip
ODD_ARRAYS = (">f4", "complex128", "M8[ns]", "U3", "S2", "object", "longdouble")


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    value: Any


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda value: value,
    "list": lambda value: [value, None, 1],
    "tuple": lambda value: (value, "x"),
    "dict": lambda value: {"z": value, "a": 0, 7: None},
    "deque": lambda value: deque([value], maxlen=3),
    "named tuple": lambda value: Pair(value, 2),
    "dataclass": Record,
    "OrderedDict": lambda value: OrderedDict(z=value, a=1),
    "defaultdict": lambda value: defaultdict(list, z=value),
    "nested": lambda value: {"b": [({"y": [value]}, 5)], "a": []},
}


def make_tensor(dtype: torch.dtype, layout: str) -> Tensor:
    """Return a tensor with a layout of `SHAPES`."""
    shape = SHAPES[layout]
    size = math.prod(shape) * dtype.itemsize
    data = BYTES[:size] % 2 if dtype == torch.bool else BYTES[:size]
    return arrange(data.clone().view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype), layout)


def make_array(dtype: np.dtype[Any], layout: str) -> np.ndarray[Any, Any]:
    """Return an array with a layout of `SHAPES`."""
    shape = SHAPES[layout]
    numbers = np.zeros(shape, dtype) if dtype.kind in "OUSM" else np.arange(math.prod(shape)).astype(dtype)
    found: np.ndarray[Any, Any] = arrange(numbers.reshape(shape), layout)
    return found


def arrange(value: Any, layout: str) -> Any:
    """Return a value with a different layout in memory."""
    is_array = isinstance(value, np.ndarray)
    if layout == "columns":
        return value.T
    if layout == "gaps":
        return value[:, ::2]
    if layout == "expanded":
        return np.broadcast_to(value, (4, 3)) if is_array else value.expand(4, 3)
    if layout == "channels last":
        return value.transpose(0, 3, 1, 2) if is_array else value.permute(0, 3, 1, 2)
    return value[::-1] if layout == "reversed" and is_array else value


def list_cells() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each value of the grid, and a function that makes the value."""
    values: dict[str, Callable[[], Any]] = {key: (lambda key=key: SCALARS[key]) for key in SCALARS}
    for dtype, layout in itertools.product(DTYPES.values(), SHAPES):
        values[f"{dtype} {layout}"] = lambda dtype=dtype, layout=layout: make_tensor(dtype, layout)
    for name, layout in itertools.product([*map(str, NUMPY_NAMES), *ODD_ARRAYS], SHAPES):
        values[f"array {name} {layout}"] = lambda name=name, layout=layout: make_array(np.dtype(name), layout)
    for (name, make), (container, wrap) in itertools.product(values.items(), CONTAINERS.items()):
        yield f"{container} of {name}", lambda make=make, wrap=wrap: wrap(make())


def describe(value: Any) -> Any:
    """Return everything about a value that has to come back."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).tolist() if value.numel() else []
        strides = [each for size, each in zip(value.shape, value.stride(), strict=True) if size > 1 and value.numel()]
        return type(value), value.dtype, value.shape, strides, data
    if isinstance(value, np.ndarray):
        strides = [each for size, each in zip(value.shape, value.strides, strict=True) if size > 1 and value.size]
        return type(value), value.dtype.str, value.shape, strides, value.flags.writeable, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(describe(key), describe(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [*map(describe, value)]
    return type(value), repr(value)


class Holder(torch.optim.Optimizer):
    """An optimizer that keeps a value in the state of each of its parameters, or under a key that is no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Change nothing."""


class Keeper:
    """An object whose state is a dict."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


class Kept(NamedTuple):
    """The objects of a program."""

    model: nn.ParameterList
    optimizer: Holder
    values: dict[str, Any]
    records: dict[str, Any]  # a dict with objects is saved attribute by attribute
    keeper: Keeper


class Program:
    """A loop that keeps the cells' values in one kind of owner. The first step puts the values there.

    Args:
        owner: one of `OWNERS`.

    Attributes:
        seen: the values that the last step has found, by the cell's name.
    """

    def __init__(self, owner: str, cells: dict[str, Callable[[], Any]]) -> None:
        self.owner, self.cells = owner, cells
        self.seen: dict[str, Any] = {}

    def __call__(self, run: Run) -> None:
        model = nn.ParameterList(torch.zeros(2, 3, dtype=torch.bfloat16) for _ in self.cells)
        kept = Kept(model, Holder(model.parameters()), {}, {}, Keeper())
        is_early = self.owner in ("kept before", "buffer")
        if is_early:
            self._put(kept)
        run.keep(**kept._asdict())
        for step in run.steps(per_epoch=4):
            if step.number == 0 and not is_early:
                self._put(kept)
            self.seen = self._take(kept)
            step.log(loss=0.0)

    def _put(self, kept: Kept) -> None:
        for number, (name, make) in enumerate(self.cells.items()):
            if self.owner.startswith("kept"):
                (kept.records if name.startswith("dataclass") else kept.values)[name] = make()
            elif self.owner == "buffer":
                kept.model.register_buffer(f"buffer {number}", make())
            elif self.owner == "attribute":
                setattr(kept.model, f"attribute {number}", make())
            elif self.owner == "object":
                kept.keeper.values[name] = make()
            elif self.owner == "optimizer":
                kept.optimizer.state[kept.model[number]]["it"] = make()
            else:
                kept.optimizer.state[name] = make()

    def _take(self, kept: Kept) -> dict[str, Any]:
        found = {
            "buffer": lambda number, name: getattr(kept.model, f"buffer {number}"),
            "attribute": lambda number, name: getattr(kept.model, f"attribute {number}"),
            "object": lambda number, name: kept.keeper.values[name],
            "optimizer": lambda number, name: kept.optimizer.state[kept.model[number]]["it"],
            "optimizer, another key": lambda number, name: kept.optimizer.state[name],
        }
        take = found.get(self.owner, lambda number, name: (kept.values | kept.records)[name])
        return {name: take(number, name) for number, name in enumerate(self.cells)}


# KEPT: the value is in the dict when the loop begins; LATER: the first step puts it there.
OWNERS = KEPT, LATER, BUFFER, ATTRIBUTE, OBJECT, OPTIMIZER, GLOBAL = (
    "kept before", "kept", "buffer", "attribute", "object", "optimizer", "optimizer, another key"
)  # fmt: skip
# The program that `train` runs.
PROGRAMS: list[Program] = []


def train(run: Run) -> None:
    """Run the last of `PROGRAMS`."""
    PROGRAMS[-1](run)
