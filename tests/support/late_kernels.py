"""The operators of a device that computes late: torch's kernels for the CPU, queued; see `late_device`.

The device ``late`` is a backend of torch, in Python alone. A tensor has a storage, an address and its shape at once,
and its numbers late. Where CUDA may copy at once or late, this device copies late: every ``non_blocking`` copy reads
and writes the host's memory when its kernel is computed.

Random numbers are the CPU's, from the state that the CPU's generator has when a kernel is queued. So a program computes
the same bits on both devices, where torch takes the same operators for both.

Not simulated: several devices, the device's own generators, pinned memory, a backward pass on a different stream than
the default one, and ``UntypedStorage.resize_``, by which FSDP2 frees its gathered parameters.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.late_device import Memory, backend

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
NAME = "late"
SET = torch.ops.aten.set_.source_Storage_storage_offset
# Operators that take indices in the host's memory, as on a GPU.
TAKE_INDICES = ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")


@functools.cache
def install() -> torch.device:
    """Make this process's torch know the device, and return it. It can't be undone."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=backend)
    device = torch.device(NAME, 0)
    kernels = Kernels(device)
    library = torch.library.Library("_", "IMPL")
    library.fallback(kernels.call, "PrivateUse1")
    install.library = library  # type: ignore[attr-defined]  # the kernels are registered as long as it exists
    torch.accelerator.synchronize = backend.synchronize
    Tensor.record_stream = lambda tensor, stream: kernels.memory.use(tensor, stream)  # type: ignore[method-assign]
    _move_parameters_in_place()
    _clone_storages(kernels)
    return device


def _clone_storages(kernels: "Kernels") -> None:
    """Let ``copy.deepcopy`` of a tensor copy its storage on the device."""
    clone = torch.UntypedStorage.clone

    def copy(storage: Any) -> Any:
        if storage.device != kernels.device:
            return clone(storage)
        count = storage.nbytes()
        whole = torch._C._acc.create_empty_tensor([], torch.uint8)
        return SET.redispatch(CPU, whole, storage, 0, [count], [1]).clone().untyped_storage()

    torch.UntypedStorage.clone = copy  # type: ignore[method-assign]


def _move_parameters_in_place() -> None:
    """Let ``nn.Module.to`` keep the parameters' identity, as between a CPU and a GPU: an optimizer has them already."""
    apply = nn.Module._apply

    def swap(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, *arguments, **options)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    nn.Module._apply = swap  # type: ignore[method-assign]


class Kernels:
    """The device's operators."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory = device, Memory()
        self._shapes: dict[Any, Any] = {}  # an operator's result on the device ``meta``, by operator and shapes
        self._special = {
            "aten::empty.memory_format": self._empty,
            "aten::empty_strided": self._empty_strided,
            "aten::_copy_from": self._copy_from,
            "aten::_local_scalar_dense": self._read,
            "aten::resize_": self._resize,
        }

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Queue an operator's kernel, and return its tensors."""
        if special := self._special.get(op.name()):
            return special(*args, **kwargs)
        returns = op._schema.returns
        if op is SET or (returns and all(each.alias_info and not each.alias_info.is_write for each in returns)):
            return op.redispatch(CPU, *args, **kwargs)  # a view, which reads no numbers
        args, kwargs = change_each(functools.partial(self._take, op), (args, kwargs))
        found = self._find_shapes(op, args, kwargs)
        host_args, host_kwargs = change_each(self._see, (args, kwargs))
        draws = Draws(op, host_args, host_kwargs)
        if found is None or draws.depend_on_numbers:
            backend.current_stream().synchronize()
            known = _call(op, host_args, host_kwargs)
            outputs = self._join(op, args, kwargs, known)
            _write(change_each(self._see, outputs), known)
            return outputs
        outputs = self._join(op, args, kwargs, found)
        seen = change_each(self._see, outputs)
        backend.current_stream().put(lambda: _write(seen, draws.call(op, host_args, host_kwargs)))
        return outputs

    def _take(self, op: Any, value: Any) -> Any:
        """Return an argument as a kernel of a GPU takes it: a number in the host's memory is copied at once."""
        if not isinstance(value, Tensor) or value.device == self.device:
            return value
        if value.dim() and not op._schema.name.startswith(TAKE_INDICES):
            raise RuntimeError(f"{op}: expected all tensors on {self.device}, found one on {value.device}")
        return value.clone()

    def _find_shapes(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Return the operator's result on torch's device ``meta``; None if it depends on numbers, or is no tensor."""
        if any("Tensor" not in str(each.type) for each in op._schema.returns):
            return None
        key = op, change_each(_describe, (args, tuple(kwargs.items())))
        if key not in self._shapes:
            try:
                self._shapes[key] = _call(op, *change_each(self._to_meta, (args, kwargs)))
            except (NotImplementedError, RuntimeError):
                self._shapes[key] = None
        return self._shapes[key]

    def _to_meta(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, Tensor) or (value.device != self.device and not value.dim()):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

    def _see(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return self.memory.see(value) if isinstance(value, Tensor) and value.device == self.device else value

    def _join(self, op: Any, args: Any, kwargs: Any, found: Any) -> Any:
        """Return an operator's result: the arguments that it writes to, and new tensors."""
        returns = op._schema.returns
        values = found if len(returns) > 1 else [found] * len(returns)
        joined = tuple(
            self._fit(_find_written(op, each, args, kwargs), value)
            if each.alias_info
            else change_each(self._make, value)
            for each, value in zip(returns, values, strict=True)
        )
        return joined if len(returns) > 1 else joined[0] if returns else None

    def _fit(self, written: Any, value: Any) -> Any:
        """Return an argument that an operator writes to. A tensor ``out`` gets the result's shape."""
        return written if written.shape == value.shape else self._resize(written, value.shape)

    def _make(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._empty_strided(value.size(), value.stride(), dtype=value.dtype)

    def _empty(self, size: Any, *, memory_format: Any = None, dtype: Any = None, **options: Any) -> Tensor:
        like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
        return self._empty_strided(size, like.stride(), dtype=like.dtype)

    def _empty_strided(self, size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Tensor:
        made = torch._C._acc.create_empty_tensor([], dtype or torch.get_default_dtype())
        return self._place(made, size, stride)

    def _place(self, tensor: Tensor, size: Any, stride: Any) -> Tensor:
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        count = last + 1 if all(size) else 0
        storage = self.memory.allocate(count * tensor.itemsize, self.device)
        found: Tensor = SET.redispatch(CPU, tensor, storage, 0, size, stride)
        return found

    def _resize(self, tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
        like = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
        bytes_needed = (tensor.storage_offset() + like.numel()) * tensor.itemsize
        storage = tensor.untyped_storage()
        if storage.nbytes() < bytes_needed:
            return self._place(tensor, size, like.stride())
        found: Tensor = SET.redispatch(CPU, tensor, storage, tensor.storage_offset(), size, like.stride())
        return found

    def _copy_from(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        is_staged = source.device.type == "cpu" and not non_blocking
        values, place = (
            (source.detach().clone() if is_staged else self._see(source.detach())),
            self._see(target.detach()),
        )
        backend.current_stream().put(lambda: place.copy_(values))
        if target.device.type == "cpu" and not non_blocking:
            backend.current_stream().synchronize()
        return target

    def _read(self, tensor: Tensor) -> Any:
        backend.current_stream().synchronize()
        return self.memory.see(tensor).item()


class Draws:
    """The random numbers that a kernel draws: those from the generator's state when the kernel is queued.

    Attributes:
        depend_on_numbers: whether the tensors' numbers decide how many the kernel draws.
    """

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        self.depend_on_numbers = False
        self._state: Tensor | None = None
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return
        generators = [each for each in list_leaves((args, kwargs)) if isinstance(each, torch.Generator)]
        self._generator = generators[0] if generators else torch.default_generator
        self._state = self._generator.get_state()
        zeros = change_each(lambda each: torch.zeros_like(each) if isinstance(each, Tensor) else each, (args, kwargs))
        try:
            _call(op, *zeros)
        except RuntimeError:
            self.depend_on_numbers = True
            self._generator.set_state(self._state)

    def call(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator with its random numbers."""
        if self._state is None:
            return _call(op, args, kwargs)
        now = self._generator.get_state()
        self._generator.set_state(self._state)
        try:
            return _call(op, args, kwargs)
        finally:
            self._generator.set_state(now)


def change_each(change: Callable[[Any], Any], value: Any) -> Any:
    """Return an operator's arguments or results, with each value in their containers changed."""
    if isinstance(value, list | tuple):
        return tuple(change_each(change, each) for each in value)
    if isinstance(value, dict):
        return {key: change_each(change, each) for key, each in value.items()}
    return change(value)


def list_leaves(value: Any) -> list[Any]:
    """Return all values in the containers of an operator's arguments or results."""
    found: list[Any] = []
    change_each(found.append, value)
    return found


def _describe(value: Any) -> Any:
    """Return the part of an argument that a result's shape may depend on. No shape depends on a float."""
    if isinstance(value, Tensor):
        return value.device, value.dtype, tuple(value.size()), value.stride()
    return type(value), None if isinstance(value, float | torch.Generator) else value


def _call(op: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator. In place of an ``out``, give it an empty tensor, which it may resize."""
    outs = {each.name for each in op._schema.arguments if each.is_out}
    own = {name: change_each(lambda out: out.new_empty(0), each) for name, each in kwargs.items() if name in outs}
    # A Python number may be in a tensor's place, which only an operator's overload for numbers takes.
    has_numbers = any(
        isinstance(value, int | float | complex) and "Tensor" in str(each.type)
        for each, value in zip(op._schema.arguments, args, strict=False)
    )
    return (op.overloadpacket if has_numbers else op)(*args, **kwargs | own)


def _write(targets: Any, values: Any) -> None:
    """Write an operator's result to the host's views of its tensors, unless it has written there itself.

    The CPU's batch norm returns an empty tensor, where the device ``meta`` returns statistics that nothing reads.
    """
    for target, value in zip(list_leaves(targets), list_leaves(values), strict=True):
        if isinstance(value, Tensor) and value.numel() and target.data_ptr() != value.data_ptr():
            target.copy_(value)


def _find_written(op: Any, returned: Any, args: Any, kwargs: Any) -> Any:
    """Return the argument that an operator writes to and returns."""
    places = [
        (place, each.name)
        for place, each in enumerate(op._schema.arguments)
        if each.alias_info and each.alias_info.before_set == returned.alias_info.before_set
    ]
    ((place, name),) = places
    return kwargs[name] if name in kwargs else args[place]
