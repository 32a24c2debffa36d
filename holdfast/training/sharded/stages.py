"""Pipeline stages: each rank's model has tensors of different names. A checkpoint contains the tensors of all ranks.

To save, each rank tells the others the names and shapes of its tensors, so that all ranks describe the same state, the
union. The exchange then collects each tensor from a rank that holds it. To restore, each rank takes the tensors with
the names that it has built. Each layer needs the name that it has in the whole model. Then a checkpoint doesn't depend
on which rank has which layers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast.checkpoint import Payload, Tensor
from holdfast.errors import CheckpointDamaged, RecipeError, StateError
from holdfast.state.decoding import shape_of
from holdfast.state.encoding import DTYPES, list_marked
from holdfast.state.shards import ShardedBytes
from holdfast.state.tensor_forms import is_sharded
from holdfast.state.tensors import TensorBytes
from holdfast.training.data_ranks import HINT, DataRanks
from holdfast.training.sharded.exchange import Exchange
from holdfast.training.tensor_names import list_saved_names

# A checkpoint contains the union of all ranks' models and optimizers. Schedulers and scaler must be equal in all ranks.
MODEL, OPTIMIZER = UNITED = "model", "optimizer"
EQUAL = "schedulers", "scaler"
STATE, GROUPS, PARAMS = "state", "param_groups", "params"
NAMES = (
    "name the layers of a stage by their number in the whole model, as in nn.ModuleDict({'4': layer}): "
    "holdfast docs layouts"
)
TIED = (
    "a stage has tied this tensor to another name, or has a different layout of it in memory: leave the other "
    "name out of the stage: holdfast docs layouts"
)


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline: ranks whose models have tensors of different names.

    Attributes:
        data: the data ranks; ranks with the same data rank form a pipeline, and together hold the whole model.
        params: the number of scalars in the parameters of all stages.
        repeated: the ids of those parameters of this rank that a lower rank of its pipeline holds, too.
    """

    data: DataRanks
    params: int
    repeated: frozenset[int]

    @property
    def pipeline(self) -> list[int]:
        """Return the ranks of this rank's pipeline, sorted."""
        return list_pipeline(self.data)


def list_pipeline(data: DataRanks) -> list[int]:
    """Return the ranks that have the same data rank as this rank, sorted."""
    return [rank for rank, number in enumerate(data.numbers) if number == data.number]


def make_stages(model: nn.Module, ranks: Any, *, is_told: bool) -> Stages:
    """Return the stages of ranks whose models have tensors of different names; see `Cooperation.find_stages`.

    All ranks call it together.

    Args:
        ranks: the `Cooperation` of the ranks.
    """
    own = list_saved_names(model)
    cut = next((name for name, each in own.items() if is_sharded(each)), "")
    sizes = {name: 0 if is_lazy(each) else each.numel() for name, each in model.named_parameters()}
    found = ranks.gather((frozenset(own), sizes, cut))
    names = tuple(each for each, _, _ in found)
    _check_whole(names, ranks.data, is_told=is_told)
    for rank, (_, _, cut) in enumerate(found):
        if cut:
            raise RecipeError(
                f"model.{cut} is sharded in rank {rank}, and other ranks' models have other names: a stage of a "
                "pipeline can't be sharded",
                hint="let the data ranks of a stage average its gradients, as DistributedDataParallel(stage, "
                "process_group=mesh['data'].get_group()) does: holdfast docs layouts",
            )
    total = {name: size for _, sizes, _ in found for name, size in sizes.items()}
    lower = (names[rank] for rank in list_pipeline(ranks.data) if rank < ranks.data.rank)
    taken: set[str] = set().union(*lower)
    # A tied parameter has several names in this rank. A lower rank may hold the parameter under only one of them.
    named = model.named_parameters(remove_duplicate=False)
    repeated = frozenset(id(each) for name, each in named if name in taken)
    return Stages(ranks.data, sum(total.values()), repeated)


def _check_whole(names: Sequence[frozenset[str]], data: DataRanks, *, is_told: bool) -> None:
    """Raise RecipeError if the ranks that train the same samples don't hold the whole model together."""
    pipelines: dict[int, set[str]] = {}
    for number, each in zip(data.numbers, names, strict=True):
        pipelines.setdefault(number, set()).update(each)
    for number, have in sorted(pipelines.items()):
        if lost := sorted(set().union(*names) - have):
            rank = next(rank for rank, each in enumerate(names) if lost[0] in each)
            those = [str(rank) for rank, each in enumerate(data.numbers) if each == number]
            some = f"rank {those[0]} doesn't" if len(those) == 1 else f"ranks {', '.join(those)} don't"
            reason = f"but data rank {number} of {data.count} needs" if is_told else "and each rank would"
            more = "the whole model" if is_told else "train its own samples with its own random numbers"
            raise RecipeError(
                f"rank {rank} has model.{lost[0]}, and {some}, {reason} {more}",
                hint=f"stages of one pipeline need the same samples; {HINT}",
            )


# ---- saving


def unite(exchange: Exchange, payload: Payload) -> Payload:
    """Return the union of all ranks' states, given this rank's. All ranks call it together, and get the same names.

    Tensors of the model and the optimizer become `ShardedBytes`, including tensors that this rank doesn't hold. All
    other values are the main rank's.

    Raises:
        StateError: the ranks have different values or shapes under one name; all ranks raise it.
    """
    own = {name: (each.dtype, each.shape) for name, each in payload.tensors.items() if is_united(name)}
    told = exchange.each(lambda: (own, payload.tree if exchange.rank == 0 else _take(payload.tree, (*UNITED, *EQUAL))))
    described = _merge([each for each, _ in told], "")
    tensors = {name: each for name, each in payload.tensors.items() if not is_united(name)}
    for name, (dtype, shape) in described.items():
        tensors[name] = _hold(payload.tensors[name]) if name in own else make_absent(dtype, shape)
    return Payload(tensors, unite_trees([tree for _, tree in told]))


def unite_trees(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the union of the ranks' states: the main rank's state, with the models and optimizers of all ranks.

    Args:
        trees: the ranks' states, by rank, with a tensor's name in place of the tensor. Of all ranks but the main rank,
            only the components `UNITED` and `EQUAL` are needed.

    Raises:
        StateError: the ranks have different values under one name.
    """
    for name in EQUAL:
        _merge([{name: tree[name]} for tree in trees], "")
    model = _merge([tree[MODEL] for tree in trees], MODEL)
    return {**trees[0], MODEL: model, OPTIMIZER: _merge_optimizers([tree[OPTIMIZER] for tree in trees])}


def is_united(name: str) -> bool:
    """Return whether tensors of this name are collected from the ranks that hold them, and not from the main rank."""
    return name.startswith(tuple(f"{each}." for each in UNITED))


def hold_whole(payload: Payload) -> Payload:
    """Return the tensors of the model and the optimizer as sharded tensors of which this rank holds all rows."""
    return Payload({name: _hold(each) for name, each in payload.tensors.items() if is_united(name)}, None)


def _hold(tensor: Tensor) -> Tensor:
    (piece,) = tensor.pieces
    return tensor._replace(pieces=(ShardedBytes(piece.tensor),)) if isinstance(piece, TensorBytes) else tensor


def make_absent(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a placeholder in a payload for a tensor that this rank doesn't hold."""
    absent = torch.empty(shape_of(dtype, shape), dtype=DTYPES[dtype], device="meta")
    return Tensor(dtype, shape, (ShardedBytes(absent) if absent.numel() else b"",))


def _take(tree: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: tree[key] for key in keys}


def _merge(values: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the union of several ranks' mappings.

    Raises:
        StateError: two ranks have different values under one key.
    """
    found: dict[str, tuple[int, Any]] = {}
    for rank, own in enumerate(values):
        for key, value in own.items():
            first, before = found.setdefault(key, (rank, value))
            if before != value:
                whole = ".".join(filter(None, (name, str(key))))
                # In place of a tensor the state has a dict: "$tensor" is the tensor's name (one name for all tied
                # tensors), and "$as" its layout in memory.
                is_marked = any(isinstance(each, dict) and each.keys() & {"$tensor", "$as"} for each in (before, value))
                raise StateError(
                    f"ranks {first} and {rank} have different values of {whole}, and a checkpoint can contain only "
                    "one of them",
                    hint=TIED if is_marked else "give all stages the same values; and " + NAMES,
                )
    return {key: value for key, (_, value) in sorted(found.items())}


def _merge_optimizers(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the union of the ranks' optimizer states. Parameter groups with the same number are joined.

    Raises:
        StateError: the groups differ in more than their parameters.
    """
    counts = [len(tree.get(GROUPS, ())) for tree in trees]
    if len({*counts}) > 1:
        other = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise StateError(
            f"the optimizer has {counts[0]} parameter groups in rank 0 and {counts[other]} in rank {other}",
            hint="give the optimizers of all stages the same groups, also where a group has no parameter",
        )
    groups = []
    for number, each in enumerate(zip(*(tree.get(GROUPS, ()) for tree in trees), strict=True)):
        name = f"{OPTIMIZER}.{GROUPS}.{number}"
        if any(sorted(group[PARAMS]) != group[PARAMS] for group in each):
            raise StateError(
                f"the optimizer depends on the order of the parameters in {name}, but the pipeline's stages have no "
                "common order",
                hint="use an optimizer that steps each parameter by itself, and leave the groups as they are built",
            )
        values = _merge([{key: value for key, value in group.items() if key != PARAMS} for group in each], name)
        groups.append(values | {PARAMS: sorted({one for group in each for one in group[PARAMS]})})
    others = _merge([{key: tree[key] for key in tree.keys() - {STATE, GROUPS}} for tree in trees], OPTIMIZER)
    state = {STATE: _merge([tree[STATE] for tree in trees], f"{OPTIMIZER}.{STATE}")} if STATE in trees[0] else {}
    return others | state | ({GROUPS: groups} if counts[0] else {})


# ---- restoring


@dataclass(frozen=True)
class Wanted:
    """The names that this rank's stage of a pipeline takes from a checkpoint.

    Attributes:
        model: the keys of the model's state.
        parameters: the names of the optimizer's parameters.
    """

    model: frozenset[str]
    parameters: frozenset[str]

    def narrow(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state's tree without those names of the model and the optimizer that this stage doesn't take.

        Raises:
            CheckpointDamaged: the given value isn't a state's tree.
        """
        if not all(isinstance(tree.get(each), dict) for each in UNITED):
            raise CheckpointDamaged("the checkpoint has no model or no optimizer")
        optimizer = {**tree[OPTIMIZER]}
        if STATE in optimizer:
            optimizer[STATE] = _take(optimizer[STATE], sorted(self.parameters & optimizer[STATE].keys()))
        if GROUPS in optimizer:
            optimizer[GROUPS] = [
                group | {PARAMS: [name for name in group[PARAMS] if name in self.parameters]}
                for group in optimizer[GROUPS]
            ]
        model = _take(tree[MODEL], sorted(self.model & tree[MODEL].keys()))
        return {**tree, MODEL: model, OPTIMIZER: optimizer}

    def check(self, exchange: Exchange, tree: Mapping[str, Any]) -> None:
        """Raise StateError in all ranks if a checkpoint has a name that no rank takes. All ranks call it together."""
        everywhere = exchange.each(lambda: self)
        parameters = {name for group in tree[OPTIMIZER].get(GROUPS, ()) for name in group[PARAMS]}
        for kind, saved, taken in (
            ("model", {*tree[MODEL]}, [each.model for each in everywhere]),
            ("optimizer", parameters, [each.parameters for each in everywhere]),
        ):
            if lost := sorted(saved.difference(*taken)):
                raise StateError(
                    f"the checkpoint's {kind} contains {lost[0]}, which no rank has built: the ranks' pipeline stages "
                    "aren't the whole model",
                    hint=NAMES,
                )


def take_present(payload: Payload, tree: Any) -> Payload:
    """Return a state without the tensors of other stages. This stage's tensors no longer count as sharded.

    Args:
        tree: the state's tree, without the names of other stages.
    """
    tensors = {name: each for name, each in payload.tensors.items() if not is_united(name)}
    for name in {*list_marked(tree)} - tensors.keys():
        tensor = payload.tensors[name]
        (piece,) = tensor.pieces
        tensors[name] = (
            tensor._replace(pieces=(TensorBytes(piece.tensor),)) if isinstance(piece, ShardedBytes) else tensor
        )
    return Payload(tensors, tree)
