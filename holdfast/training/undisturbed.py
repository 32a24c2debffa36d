"""Run code, such as a forward pass or the code at an epoch's beginning, without effects on a training's state."""

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast.errors import RecipeError
from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import Phase
from holdfast.state import clone_on_host, has_same_bits, is_sharded, local_of, restore_rng
from holdfast.state.checksum import checksum
from holdfast.state.layout import copy_into
from holdfast.training.build import Training
from holdfast.training.capturing import copy_extras
from holdfast.training.checksums import describe_components
from holdfast.training.fsdp_modules import list_fsdp_modules, shard_again
from holdfast.training.optimizers import list_stepped

# The attributes of a module that torch itself reads.
OF_TORCH = vars(nn.Module()).keys()
# Containers of up to this many items are copied, to undo additions and removals. Longer containers aren't copied.
MOST_ITEMS = 1000


@contextlib.contextmanager
def undisturbed(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, may_swap: bool = False
) -> Iterator["ModelSnapshot"]:
    """Set the model to evaluation mode for the block, and restore it afterwards.

    For each module this restores the buffers and other tensors with their values, the training mode, the
    attributes, the submodules and the hooks. It also restores the items of lists, dicts, sets and deques, up to
    `MOST_ITEMS`. For each parameter it restores the gradient and ``requires_grad``. It also restores the values of
    trainable parameters that this optimizer doesn't step, because a loss may step another optimizer, such as a
    critic's. The copies are in the host's memory, as large as the tensors themselves.

    Args:
        may_swap: whether the block may change the optimizer's parameters for a while, as an evaluation with average
            weights does. The block has to restore the same bits; checksums of all weights are compared.

    Yields:
        The snapshot, whose `put_back` undoes the changes so far.

    Raises:
        RecipeError: the block has changed one of the optimizer's parameters.
    """
    kept = ModelSnapshot(model, optimizer, may_swap)
    model.eval()
    try:
        yield kept
        kept.check_parameters()
    finally:
        kept.put_back()


class ModelSnapshot:
    """A copy of a model's state, which `put_back` restores after a block of `undisturbed`.

    Attributes:
        touched: the types, by name, of the values that had changed before `put_back` and that no ``state_dict``
            contains, such as ``{"model.layer.calls": "int"}``. If training reads such a value, the run can't be resumed
            exactly.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, may_swap: bool = False) -> None:
        own = {id(each) for each in list_stepped(optimizer)}
        self._fsdp_modules = list_fsdp_modules(model)
        self.touched: dict[str, str] = {}
        named = list(model.named_modules(prefix="model"))
        self._modules = [(name, module, {**vars(module)}, _copy_items(module)) for name, module in named]
        self._buffers = {id(module): {**module._buffers} for _, module in named}
        self._parameters = [
            (name, each, each.grad, each.requires_grad, _version_of(each)) for name, each in model.named_parameters()
        ]
        others = [each for each in model.parameters() if each.requires_grad and id(each) not in own]
        self._tensors = {
            id(value): (value, clone_on_host(value)) for value in (*others, *self._list_tensors()) if not is_lazy(value)
        }
        self._versions = {key: _version_of(value) for key, (value, _) in self._tensors.items()}
        self._own = {id(value) for value in (*model.parameters(), *model.buffers())}
        found = [each for _, each, *_ in self._parameters if id(each) not in self._tensors and not is_lazy(each)]
        self._sums = dict(zip(map(id, found), _sum_up(found), strict=True)) if may_swap else {}
        for _, parameter, *_ in self._parameters:
            parameter.grad = None  # so that the block's gradients aren't added to those of training

    def _list_tensors(self) -> Iterator[torch.Tensor]:
        for _, module, attributes, _ in self._modules:
            yield from (value for value in module._buffers.values() if value is not None)
            yield from (value for value in attributes.values() if isinstance(value, torch.Tensor))

    def put_back(self) -> None:
        """Undo all changes to the model since this object was made, and note them in `touched`."""
        shard_again(self._fsdp_modules)
        for name, module, attributes, copies in self._modules:
            self._note_touched(name, module, attributes, copies)
            for container, items in [(vars(module), attributes), *copies]:
                # don't write without need: torch.compile compiles again after a write to a module's dict
                if not _has_items(container, items):
                    container.clear()
                    (container.update if isinstance(container, dict | set) else container.extend)(items)
        with torch.no_grad():
            for key, (value, copied) in self._tensors.items():
                # Write a plain attribute only if it has changed: it may be a view of a read-only file.
                if key in self._own or not has_same_bits(value, copied):
                    copy_into(value, copied)
                    self._versions[key] = _version_of(value)
        for _, parameter, grad, requires_grad, _ in self._parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad

    def _note_touched(
        self, name: str, module: nn.Module, attributes: dict[str, Any], copies: list[tuple[Any, Any]]
    ) -> None:
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            return  # a module's extra state may save these values
        lost, own = module._non_persistent_buffers_set, vars(module)
        filled = {id(container) for container, items in copies if not _has_items(container, items)}
        for key in sorted(((attributes.keys() | own.keys()) - OF_TORCH) | lost):
            now = module._buffers.get(key) if key in lost else own.get(key)
            was = self._buffers[id(module)].get(key) if key in lost else attributes.get(key)
            is_written = isinstance(was, torch.Tensor) and self._versions.get(id(was)) != _version_of(was)
            if now is not was or id(was) in filled or is_written:
                self.touched[f"{name}.{key}"] = type(was if now is None else now).__name__

    def check_parameters(self) -> None:
        """Raise RecipeError if a parameter has changed. Undoing the change would need a copy of all parameters."""
        written = [
            (name, each)
            for name, each, *_, version in self._parameters
            if _version_of(each) != version and id(each) not in self._tensors
        ]
        known = [(name, each) for name, each in written if id(each) in self._sums]
        sums = dict(zip((name for name, _ in known), _sum_up([each for _, each in known]), strict=True))
        for name, parameter in written:
            if name not in sums or sums[name] != self._sums[id(parameter)]:
                raise RecipeError(
                    f"the parameter {name} changed while the model was evaluated or probed",
                    hint="evaluate, probe and loss may not change weights; evaluate may replace weights for a "
                    "while, if it restores the same bits",
                )


def _version_of(tensor: torch.Tensor) -> object:
    """Return a value that changes when the tensor is written to, or is moved to other memory."""
    if is_lazy(tensor) or tensor.is_inference():
        return 0
    own = local_of(tensor) if is_sharded(tensor) else tensor
    # Leave out the address of a sparse tensor, which has several.
    return tensor._version, own.data_ptr() if own.layout is torch.strided else 0


def _sum_up(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum of each parameter; of a sharded parameter, the checksum of this rank's shard."""
    return checksum([local_of(each) if is_sharded(each) else each for each in parameters])


def _copy_items(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return the module's containers, each with a copy of it."""
    containers = (value for value in vars(module).values() if isinstance(value, list | dict | set | deque))
    return [(value, value.copy()) for value in containers if len(value) <= MOST_ITEMS]


def _has_items(container: Any, items: Any) -> bool:
    """Return whether a container has exactly these objects (by identity), in this order."""
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        container, items = [*container.keys(), *container.values()], [*items.keys(), *items.values()]
    return all(one is other for one, other in zip(container, items, strict=True))


def snapshot(training: Training) -> Callable[[], None]:
    """Copy a loop's state, apart from weights and moments. Return a function that restores it.

    Weights and moments aren't copied, because they might not fit into the memory twice. If they have changed, the
    returned function reads them from the checkpoint again. Make both calls inside a step, while training's generators
    are active. All ranks make them together.
    """
    put_back_extras = copy_extras(training)
    schedulers = copy.deepcopy([each.state_dict() for each in training.schedulers])
    groups = [{**group} for group in training.optimizer.param_groups]
    large = _describe_large(training)

    def put_back() -> None:
        if any(training.ranks.gather(_describe_large(training) != large)):
            _restore_large(training, large)
        put_back_extras()
        for scheduler, state in zip(training.schedulers, schedulers, strict=True):
            scheduler.load_state_dict(state)
        for group, values in zip(training.optimizer.param_groups, groups, strict=True):
            group.update(values)
        restore_rng(training.generators.state_dict())

    return put_back


def _restore_large(training: Training, large: dict[str, Any]) -> None:
    """Restore weights and moments from the run's checkpoint.

    Args:
        large: the checksums of the restored weights and moments.
    """
    if training.record.ends.restore_weights is not None:
        heartbeats.begin(Phase.RESTORING)
        training.record.ends.restore_weights()
        heartbeats.begin(Phase.STEP, training.progress.step + 1)
    if _describe_large(training) != large:
        raise RecipeError(
            "the code at an epoch's beginning changes weights, and runs again if the run resumes inside the epoch",
            hint="move that code to the epoch's end, after the inner loop",
        )


def _describe_large(training: Training) -> dict[str, Any]:
    found = describe_components(training, in_detail=False)
    return {name: each for name, each in found.items() if name.startswith(("model", "buffers", "optimizer."))}
