"""Virtual ranks: a step whose bits don't depend on the number of ranks that train it.

A step's batch is cut into V shares. Each share has random numbers of its own, which follow from seed, step and share,
and begins with the same buffers. The shares' gradients are summed in the order of a fixed binary tree. R ranks, any
number up to V, train contiguous blocks of the shares: inside a rank the tree's lower sums are added as the shares come,
between ranks each one adds the rest of the tree for its part of every bucket, and all get the result (a reduce-scatter
and an all-gather, in an order that the tree fixes).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn

from holdfast import determinism
from holdfast.config import RunConfig
from holdfast.data import is_stream, list_divisors
from holdfast.errors import ConfigError, RecipeError
from holdfast.recipe import Recipe
from holdfast.state import capture_rng, digest_rng
from holdfast.state.checksum import checksum_together
from holdfast.training.optimizers import parts_of
from holdfast.training.tree import Node, TreeSum, deal, list_parts

# Gradients are summed in pieces of about this size, as DDP does it.
BUCKET_BYTES = 25 * 2**20


def make_virtual(config: RunConfig, recipe: Recipe, accelerator: Accelerator) -> "VirtualRanks | None":
    """Return the shares of this rank, if the configuration has virtual ranks.

    Raises:
        ConfigError: virtual ranks can't train this program, or there are more ranks.
    """
    shares, size = config.compute.virtual_ranks, recipe.batch_size
    if not shares:
        return None
    if recipe.has_own_loop or recipe.loss is None:
        problem, hint = "a loop or a step of its own", "return a Recipe with a loss, or leave virtual_ranks out"
    elif size is None or is_stream(recipe.data):
        problem, hint = "data whose order Holdfast doesn't make", "map-style data with a batch_size"
    elif size % shares:
        problem, hint = f"a batch of {size} samples in equal shares", f"a number that divides it: {list_divisors(size)}"
    elif config.compute.mixed_precision == "fp16":
        problem, hint = "in fp16, which scales the gradient", 'mixed_precision = "bf16"'
    elif not _trains_model_alone(recipe):
        problem, hint = "an optimizer of more than the model", "put all modules that learn into Recipe(model=...)"
    else:
        return VirtualRanks(shares, accelerator, config.seed)
    raise ConfigError(f"compute.virtual_ranks = {shares}: virtual ranks can't train {problem}", hint=hint)


def _trains_model_alone(recipe: Recipe) -> bool:
    """Return whether the recipe's optimizers step no other parameters than the model's, and no extra learns too."""
    own = {id(each) for each in recipe.model.parameters()}
    stepped = (each for part in parts_of(recipe.optimizer) for group in part.param_groups for each in group["params"])
    return not recipe.synchronized and all(id(each) in own for each in stepped)


def list_shares(shares: int, rank: int, ranks: int) -> range:
    """Return the shares that a rank trains: a contiguous block, as large as the others or larger by one.

    Raises:
        ConfigError: there are more ranks than shares.
    """
    if ranks > shares:
        raise ConfigError(
            f"compute.ranks = {ranks}: there are only {shares} virtual ranks",
            hint=f"at most {shares} ranks; 4 to 8 times as many virtual ranks as ranks share the work out evenly",
        )
    return deal(shares, ranks)[rank]


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype on one device, whose gradients are summed as one flat tensor."""

    parameters: tuple[nn.Parameter, ...]

    def flatten(self) -> Tensor:
        """Return the gradients as one tensor, zeros where there is none; the last numbers say which there are."""
        first = self.parameters[0]
        has = torch.tensor([each.grad is not None for each in self.parameters], dtype=first.dtype, device=first.device)
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters]
        return torch.cat([*(each.reshape(-1) for each in grads), has])

    def put_back(self, mean: Tensor) -> None:
        """Set the gradients from what `flatten` returned; None where no share has one."""
        pieces = torch.split(mean, [*(each.numel() for each in self.parameters), len(self.parameters)])
        for parameter, piece, share in zip(self.parameters, pieces[:-1], pieces[-1].tolist(), strict=True):
            parameter.grad = piece.view_as(parameter) if share else None


def make_buckets(parameters: Sequence[nn.Parameter], most_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Return the buckets of some parameters, in their order."""
    alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for each in dict.fromkeys(parameters):
        alike.setdefault((each.dtype, each.device), []).append(each)
    buckets = []
    for members in alike.values():
        current: list[nn.Parameter] = []
        for each in members:
            if current and sum(other.nbytes for other in current) + each.nbytes > most_bytes:
                buckets.append(Bucket(tuple(current)))
                current = []
            current.append(each)
        buckets.append(Bucket(tuple(current)))
    return buckets


class VirtualRanks:
    """The shares of each step that this rank trains.

    Args:
        shares: the number of virtual ranks, V.

    Attributes:
        own: the shares of this rank.
        is_first_step: whether no step has ended in this process.
        facts: for a step in detail, checksums of each own share's generators, buffers, loss and gradient; see
            `holdfast.training.detail`.
        sums: then also checksums of the gradients' sum over the own shares, and of this rank's part of the whole sum.
        is_undoable: whether `undo` can undo all that the step in progress has changed so far.
    """

    def __init__(self, shares: int, accelerator: Accelerator, seed: int) -> None:
        """
        Raises:
            ConfigError: there are more ranks than shares.
        """
        self.shares = shares
        self._seed = seed
        self._rank, self._ranks = accelerator.process_index, accelerator.num_processes
        self.own = list_shares(shares, self._rank, self._ranks)
        self._blocks = deal(shares, self._ranks)
        self.is_first_step = True
        self.facts: list[dict[str, str]] = []
        self.sums: dict[str, str] = {}
        self.is_undoable = False
        self._is_detailed = False
        self._sums: list[TreeSum] = []
        self._buckets: list[Bucket] = []

    @contextlib.contextmanager
    def step(self, model: nn.Module, step: int, *, in_detail: bool = False) -> Iterator[None]:
        """Train one step's shares in the block, each in `share`. Afterwards the model has the gradient of all shares.

        Args:
            in_detail: whether to note `facts` and `sums`.

        Buffers end as the first share leaves them, as with DDP. The generators then have a state of the step.
        """
        parameters = [*model.parameters()]
        self._buckets = make_buckets([each for each in parameters if each.requires_grad])
        self._sums = [TreeSum(self.shares) for _ in self._buckets]
        self._losses = TreeSum(self.shares)
        self._model, self._step = model, step
        self._before = [each.clone() for each in model.buffers()]
        self._versions = [(each, each._version) for each in parameters]
        self.is_undoable = True
        self._after = self._before
        self._is_detailed, self.facts, self.sums = in_detail, [], {}
        yield
        if in_detail:
            self.sums["partial_sum"] = _describe([part for tree in self._sums for part in tree.parts.values()])
        for bucket, tree in zip(self._buckets, self._sums, strict=True):
            bucket.put_back(self._mean(tree))
        self._put_buffers(self._after)
        if self._ranks > 1:
            for buffer in model.buffers():
                distributed.broadcast(buffer, 0)
        self._reseed("end")
        self.is_first_step = False

    @contextlib.contextmanager
    def share(self, share: int) -> Iterator[list[Tensor]]:
        """Train one share in the block, which leaves its gradient in the parameters and its losses in the list."""
        self._reseed(share)
        if share != self.own[0]:
            self._put_buffers(self._before)
        if self._is_detailed:
            self.facts.append({"generators": digest_rng(capture_rng()), "buffers": _describe([*self._model.buffers()])})
        losses: list[Tensor] = []
        yield losses
        if share == 0:
            self._after = [each.clone() for each in self._model.buffers()]
        for bucket in self._buckets:
            _refuse_sparse(bucket)
        if self._is_detailed:
            grads = [each.grad for bucket in self._buckets for each in bucket.parameters if each.grad is not None]
            self.facts[-1] |= {"loss": _describe(losses), "gradient": _describe(grads)}
        for bucket, tree in zip(self._buckets, self._sums, strict=True):
            tree.add(Node(0, share), bucket.flatten())
            for each in bucket.parameters:
                each.grad = None
        self._losses.add(Node(0, share), torch.stack(losses).sum(0, keepdim=True) / len(losses))

    def undo(self) -> bool:
        """Put the buffers back to what they were before the step in progress. Return whether that undoes the step.

        It doesn't if the optimizer may have stepped, if the loss itself has changed a parameter, or if the model has
        further state, which a forward pass may change. A loss that changes an extra is refused in a process's first
        step, and so in the step that follows a restored checkpoint.
        """
        if not self.is_undoable or any(each._version != version for each, version in self._versions):
            return False
        known = (self._model.named_parameters, self._model.named_buffers)
        if self._model.state_dict().keys() - {name for names in known for name, _ in names(remove_duplicate=False)}:
            return False
        self._put_buffers(self._before)
        return True

    def loss(self) -> Tensor:
        """Return the mean loss of the step's shares; scalar float32."""
        return self._mean(self._losses)[0]

    def _reseed(self, name: int | str) -> None:
        determinism.reseed(determinism.derive_seed(self._seed, self._step, name))

    def _put_buffers(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), values, strict=True):
                buffer.copy_(value)

    def _mean(self, tree: TreeSum) -> Tensor:
        """Return the mean over all shares, from the sums of all ranks; shape (n,)."""
        if self._ranks == 1:
            return tree.root().div_(self.shares)
        parts = list(tree.parts.values())
        size = len(parts[0])
        chunk = -(-size // self._ranks)
        own = torch.stack([nn.functional.pad(each, (0, chunk * self._ranks - size)) for each in parts])
        nodes = [list_parts(self.shares, block) for block in self._blocks]
        lengths = [len(each) * chunk for each in nodes]
        sent = own.view(len(parts), self._ranks, chunk).transpose(0, 1).contiguous().view(-1)
        received = sent.new_empty(sum(lengths))
        distributed.all_to_all_single(received, sent, lengths, [len(parts) * chunk] * self._ranks)
        mine = TreeSum(self.shares)
        pieces = iter(received.view(-1, chunk).unbind())
        for node in (each for block in nodes for each in block):
            mine.add(node, next(pieces))
        if self._is_detailed and tree is not self._losses:
            self.sums["sum"] = self.sums.get("sum", "") + _describe([mine.root()])
        whole = sent.new_empty(chunk * self._ranks)
        distributed.all_gather_into_tensor(whole, mine.root().div_(self.shares).contiguous())
        return whole[:size]


def _describe(tensors: Sequence[Tensor]) -> str:
    """Return a checksum of some tensors, 16 hex characters."""
    return f"{checksum_together(tensors):016x}"


def _refuse_sparse(bucket: Bucket) -> None:
    if any(each.grad is not None and each.grad.layout != torch.strided for each in bucket.parameters):
        raise RecipeError(
            "virtual ranks can't sum a sparse gradient in a fixed order",
            hint="nn.Embedding(..., sparse=False), or compute.virtual_ranks = 0",
        )
