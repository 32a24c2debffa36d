"""Everything that the next step depends on: captured, put back, and turned into bytes without a pickle."""

import base64
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holdfast.checkpoint import Payload, Tensor
from holdfast.errors import StateError
from holdfast.fingerprint import MAX_EXACT_INT

if TYPE_CHECKING:
    from holdfast.training import Training

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# ---- what is captured


def capture(training: "Training") -> dict[str, Any]:
    """Everything that the next step depends on, by component. Tensors are still the live ones, not copies."""
    recipe = training.recipe
    scaler = training.accelerator.scaler
    return {
        "model": training.accelerator.unwrap_model(training.model).state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict() if training.scheduler else None,
        "scaler": scaler.state_dict() if scaler else None,
        "extras": {name: extra.state_dict() for name, extra in sorted(recipe.extras.items())},
        "rng": training.gather(capture_rng()),
        "progress": training.progress.state_dict(),
    }


def restore(training: "Training", state: dict[str, Any]) -> None:
    """Put back what `capture` took.

    The optimizer comes after the scheduler was built, since building one sets learning rates: every group's rate is
    exactly as saved.

    Raises:
        StateError: a component doesn't fit what was saved.
    """
    accelerator, recipe = training.accelerator, training.recipe
    parts: dict[str, tuple[Any, Any]] = {"model": (accelerator.unwrap_model(training.model), state["model"])}
    parts["optimizer"] = (training.optimizer, state["optimizer"])
    parts["scheduler"] = (training.scheduler, state["scheduler"])
    parts["scaler"] = (accelerator.scaler, state["scaler"])
    for name, extra in recipe.extras.items():
        parts[f"extra {name}"] = (extra, state["extras"].get(name))
    parts["progress"] = (training.progress, state["progress"])
    for name, (target, saved) in parts.items():
        if (target is None) != (saved is None):
            raise _unfit(name, "one of the two is missing")
        if target is not None:
            try:
                target.load_state_dict(saved)
            except (KeyError, IndexError, ValueError, RuntimeError, TypeError) as error:
                raise _unfit(name, f"{type(error).__name__}: {error}") from error
    if len(state["rng"]) != accelerator.num_processes:
        raise _unfit("rng", f"{len(state['rng'])} ranks saved it")
    restore_rng(state["rng"][accelerator.process_index])


def _unfit(name: str, why: str) -> StateError:
    return StateError(
        f"the saved {name} doesn't fit what the recipe built: {why}",
        hint="the recipe's code has changed since the checkpoint was written",
    )


def capture_rng() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, every CUDA device's among them."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(rng: dict[str, Any]) -> None:
    """Put back what `capture_rng` took. On a machine with other GPUs, theirs stay as seeded."""
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    if torch.cuda.is_available() and len(rng["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(rng["cuda"])


# ---- to bytes and back
#
# A state is a tree. Its tensors go into the payload under their dotted names; all the rest becomes one JSON value in
# which a tensor is {"$tensor": name} and whatever JSON has no exact form for is marked in the same way.


def to_payload(state: Any) -> Payload:
    """The state as tensors and one JSON value. Tensors that share their memory are stored once.

    Raises:
        StateError: something in it can't be written without a pickle; the message says where it is.
    """
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "", tensors, {})
    return Payload(tensors, tree)


def from_payload(payload: Payload) -> Any:
    """The state that `to_payload` was given; each tensor has memory of its own, aligned as torch aligns it."""
    return _decode(payload.tree, payload)


def _encode(value: Any, name: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    if isinstance(value, torch.Tensor):
        return {"$tensor": _add_tensor(value, name, tensors, seen)}
    if isinstance(value, np.ndarray):
        return {"$array": _add_tensor(torch.from_numpy(np.ascontiguousarray(value)), name, tensors, seen)}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_EXACT_INT else {"$int": str(value)}
    if isinstance(value, float):
        # RFC 8785 writes 1.0 as 1 and -0.0 as 0.
        is_plain = math.isfinite(value) and not value.is_integer()
        return value if is_plain else {"$float": value.hex()}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        prefix = f"{name}." if name else ""
        items = [_encode(item, f"{prefix}{index}", tensors, seen) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, name, tensors, seen)
    raise StateError(
        f"{name or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, "
        "which can't be saved without a pickle",
        hint="a state_dict may hold tensors, arrays, numbers, strings, bytes, lists, tuples and dicts",
    )


def _encode_dict(value: dict[Any, Any], name: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    for key in value:
        if not isinstance(key, str | int | float | bool | None):
            raise StateError(f"{name} has a key of type {type(key).__qualname__}; keys may be strings and numbers")
    prefix = f"{name}." if name else ""
    # Sorted, so that neither the name of a tied tensor nor anything else depends on the order of a dict.
    keys = sorted(value, key=lambda key: (type(key).__name__, str(key)))
    items = {key: _encode(value[key], f"{prefix}{key}", tensors, seen) for key in keys}
    if all(isinstance(key, str) and not key.startswith("$") for key in keys):
        return items
    return {"$dict": [[_encode(key, name, tensors, seen), item] for key, item in items.items()]}


def _add_tensor(tensor: torch.Tensor, name: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> str:
    # Tied weights are one memory under several names; two empty tensors share a null pointer by accident.
    place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
    if tensor.numel() and place in seen:
        return seen[place]
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
        raise StateError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors has no form for")
    while name in tensors or name == "__metadata__":  # {"a.b": x} beside {"a": {"b": y}}
        name += "'"
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if tensor.numel() else b""
    tensors[name] = Tensor(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data)
    seen[place] = name
    return name


def _decode(value: Any, payload: Payload) -> Any:
    if isinstance(value, list):
        return [_decode(item, payload) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        mark, inner = next(iter(value.items()))
        if mark == "$tensor":
            return _view(payload.tensors[inner]).clone()
        if mark == "$array":
            return _view(payload.tensors[inner]).numpy().copy()
        if mark == "$tuple":
            return tuple(_decode(item, payload) for item in inner)
        if mark == "$dict":
            return {_decode(key, payload): _decode(item, payload) for key, item in inner}
        if mark == "$int":
            return int(inner)
        if mark == "$float":
            return float.fromhex(inner)
        if mark == "$bytes":
            return base64.b64decode(inner)
    return {key: _decode(item, payload) for key, item in value.items()}


def _view(tensor: Tensor) -> torch.Tensor:
    dtype = DTYPES[tensor.dtype]
    if not len(tensor.data):
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(tensor.data, dtype=torch.uint8).view(dtype).reshape(tensor.shape)
