"""A recipe for FSDP2: blocks in a ModuleList, batch statistics, dropout, a tied head and an average of the weights."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset

from holdfast import Recipe, Run, Schedule, checkpoint
from holdfast.checkpoint import CheckpointSave, Payload, Saved, Saver, differences
from holdfast.config import Compute, Determinism, Resume, RunConfig
from holdfast.errors import CheckpointDamaged, GateTripped, StoreFull
from holdfast.state import gather_whole, has_shards, is_sharded, localize, to_payload
from holdfast.state.shards import ShardedBytes
from holdfast.state.tensors import TensorBytes
from holdfast.store.local import LocalStore
from holdfast.training import Gate, SaveRequest, Training, begin_save, resume
from holdfast.training.recording import read_lines
from holdfast.training.sharded.exchange import Exchange
from holdfast.training.sharded.restoring import read_shards
from holdfast.training.sharded.shards import find_shards
from tests.support.device import DEVICE, device_of
from tests.support.forked import launch
from tests.support.makers import METADATA_FIELDS, commit_of
from tests.support.trainings import save_step, train_to
from tests.support.varied import Points

BATCH_SIZE = 8
GRAD_ACCUM = 2
COPIES = 2  # of the points: six steps an epoch
PART_BYTES = 4096
PATIENCE_S = 300.0
WINDOW_BYTES = 700  # which cut rows and numbers in two


class Blocks(nn.Module):
    """A small network whose sizes no number of ranks divides."""

    def __init__(self, width: int = 31, *, tied: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.tied = nn.Linear(8, width)
        if tied:
            self.tied.weight = self.first.weight
        self.head = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.ones(1))  # fewer rows than ranks
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def reset_parameters(self) -> None:
        """Set the parameters of this module itself, for a model that was built on the meta device."""
        nn.init.ones_(self.scale)
        nn.init.ones_(self.frozen)

    def forward(self, points: Tensor) -> Tensor:
        """Return a number for each point; shape (n, 1)."""
        found = self.first(points) + self.tied(points)
        for block in self.blocks:
            found = found + block(found)
        out: Tensor = self.head(found) * self.scale * self.frozen.mean()
        return out


def averaged(width: int = 31, device: str = "cpu", tied: bool = True) -> Recipe:
    """Build the network and an average of its weights.

    Args:
        width: the width of its layers.
        device: where the network is built, such as ``meta``.
        tied: whether two layers share a weight.
    """
    with torch.device(device):
        model = Blocks(width, tied=tied)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, targets = batch
        return F.mse_loss(model(points + 0.01 * torch.randn_like(points)), targets)

    return Recipe(
        model=model,
        data=ConcatDataset([Points(noise=True)] * COPIES),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=loss,
        batch_size=BATCH_SIZE,
        grad_accum=GRAD_ACCUM,
        clip_norm=0.5,
        schedule=Schedule("cosine", epochs=6),
        extras={"average": average},
        after_step=lambda: average.update_parameters(model),
        evaluate=lambda model: {"size": model(torch.ones(2, 8, device=device_of(model))).sum()},
    )


def interrupted(how: str, rank: int, struck: str, width: int = 300) -> Recipe:
    """Build `averaged`, one of whose ranks ends or stops once in the exchange of the second save.

    That is while the file ``struck`` doesn't exist, which then has the name of the thread.

    Args:
        how: ``kill`` (SIGKILL) or ``stop`` (SIGSTOP).
    """
    hold, copy = Exchange.hold, Exchange.copy
    saves = copies = 0

    def count_saves(self: Exchange, *arguments: Any) -> Any:
        nonlocal saves, copies
        saves, copies = saves + 1, 0
        return hold(self, *arguments)

    def strike(self: Exchange, *arguments: Any) -> None:
        nonlocal copies
        copies += 1
        if (saves, copies, self.rank) == (2, 5, rank) and not Path(struck).exists():
            Path(struck).write_text(threading.current_thread().name)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        copy(self, *arguments)

    patched: Any = Exchange
    patched.hold, patched.copy, patched.choose_window = count_saves, strike, lambda *_: 2**16
    return averaged(width)


def looped(run: Run) -> None:
    """Train the network in a loop that cuts it itself."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)  # the ranks build the same model
    model: Any = Blocks()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(run.accelerator.process_index)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=6):
        points = torch.randn(4, 8, device=run.device)
        optimizer.zero_grad()
        loss = F.mse_loss(model(points), points.sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step.log(loss=loss)


def wrapped(run: Run, *, is_late: bool = False, on_meta: bool = False) -> None:
    """Train the network in a loop, on as many ranks and in the way that the configuration says."""
    torch.manual_seed(3)
    with torch.device("meta" if on_meta else "cpu"):
        model: Any = Blocks()
    early = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = run.wrap(model)
    optimizer = early if is_late else torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=6):
        points = torch.randn(8, 8, generator=torch.Generator().manual_seed(step.number))
        points = points.tensor_split(run.world_size)[run.rank].to(run.device)
        optimizer.zero_grad()
        loss = F.mse_loss(model(points), points.sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step.log(loss=loss)


def unwrapped(run: Run) -> None:
    """Train a model in a loop that leaves it whole."""
    model = torch.nn.Linear(8, 1)
    run.keep(model=model)
    for _ in run.steps(per_epoch=6):
        pass


# ---- checks that several ranks make together: functions for `Lives.call`, whose return value is the exit code


def in_ranks(count: int, function: str, *arguments: Any) -> int:
    """Call a function of this module in several ranks; return 0 if it has returned 0 in all of them."""
    return launch_checks(globals()[function], count, *arguments)


def launch_checks(check: Callable[..., int], count: int, *arguments: Any) -> int:
    """Call a function in several ranks; return 0 if it has returned 0 in all of them."""
    AcceleratorState._reset_state(reset_partial_state=True)  # the server's own training was a single rank's
    return launch(functools.partial(check, *arguments), count)


def make(folder: str, parallel: str = "fsdp", settings: dict[str, Any] | None = None) -> Training:
    """Build the training of this rank, with a checkpoint of many parts."""
    ranks = int(os.environ["WORLD_SIZE"])
    compute = Compute.model_validate({"device": DEVICE, "ranks": ranks, "parallel": parallel})
    config = RunConfig(
        recipe="tests.support.sharded:averaged", run="r", store=folder, epochs=9, compute=compute,
        settings=settings or {},
        determinism=Determinism(mode="fast"), resume=Resume(training_probe=True),
    )  # fmt: skip
    training = Training(config)
    training.saver.part_bytes = PART_BYTES
    training.ranks.exchange.window_bytes = WINDOW_BYTES
    assert training.accelerator.num_processes == ranks
    return training


def resume_in(training: Training, store: LocalStore, saved: Saved, gate: str) -> None:
    """Restore a checkpoint as a rank does: in shares, if the training has shares."""
    shares = find_shards(training.recipe)
    commit = commit_of(saved)
    payload = (
        read_shards(training.ranks.exchange, shares, store, commit)
        if shares
        else checkpoint.read_payload(store, commit)
    )
    assert has_shards(payload) == bool(shares)
    resume(training, payload, saved.metadata, Gate(gate), lambda *skipped: None)  # type: ignore[arg-type]


def resume_and_train(folder: str) -> int:
    """Train to step 5, once without and once with a resume at step 3. Both end on the same bytes."""
    store = LocalStore(f"{folder}/r")
    straight = make(folder)
    train_to(straight, 3)
    saved = save_step(straight, store)
    assert len(saved.metadata.parts) > 8
    resumed = make(folder)
    resume_in(resumed, store, saved, "exact")
    for training in (straight, resumed):
        training.record.is_detailed = True
        train_to(training, 5)
    assert read_lines(straight) == read_lines(resumed)
    assert len(read_lines(straight)) == 2
    assert content_of(straight, store) == content_of(resumed, store)
    return 0


def change_the_sharding(folder: str) -> int:
    """Move a state from shares to whole ranks and back; every save has the same content id."""
    store = LocalStore(f"{folder}/r")
    training = make(folder)
    train_to(training, 3)
    first = saved = save_step(training, store)
    for parallel in ("ddp", "fsdp"):
        training = make(folder, parallel)
        resume_in(training, store, saved, "record")
        found = save_step(training, store) if parallel == "fsdp" else save_whole(training, store)
        assert found.metadata.checkpoint_sha256 == first.metadata.checkpoint_sha256, parallel
        saved = found
    whole = make(folder, "ddp", {"tied": False})
    train_to(whole, 2)  # the ranks' averages have other batch statistics, so that each saves its own
    training = make(folder, "fsdp", {"tied": False})
    resume_in(training, store, save_whole(whole, store), "record")
    pairs = zip(training.recipe.model.parameters(), whole.recipe.model.parameters(), strict=True)
    assert all(torch.equal(gather_whole(cut), each) for cut, each in pairs)
    train_to(training, 3)
    return 0


def save_after_evaluating(folder: str) -> int:
    """Save at an epoch's end, when each rank has a metric of its own, whose text is longer in one of them.

    The checkpoint has the main rank's metric, and every tensor.
    """
    store = LocalStore(f"{folder}/r")
    training = make(folder)
    value = 1 / 3 if training.accelerator.process_index else 0.5
    training.recipe.evaluate = lambda model: {f"metric{number}": value for number in range(9)}
    train_to(training, training.steps_per_epoch)
    saved = save_step(training, store)
    payload = checkpoint.read_payload(store, commit_of(saved))
    for name, each in training.recipe.model.named_parameters():
        data = b"".join(map(bytes, payload.tensors[f"model.{name}"].pieces))
        assert data == bytes(TensorBytes(gather_whole(each)).in_memory()), name
    assert saved.metadata.metrics["metric0"] == 0.5
    resume_in(make(folder), store, saved, "exact")
    return 0


class Replicated:
    """An extra with a tensor that every rank holds whole, as a `DTensor`. It loads a different kind of tensor."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),))
        self.value: Any = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = gather_whole(state["value"])


def resume_elsewhere(folder: str) -> int:
    """Resume with a tensor of the saved values that is no `DTensor` any more: the gate names it."""
    store, found = LocalStore(f"{folder}/r"), []
    for training in (make(folder), make(folder)):
        training.recipe.extras["held"] = Replicated()
        found.append(training)
    train_to(found[0], 1)
    saved = save_step(found[0], store)
    with pytest.raises(GateTripped, match=r"extras\.0\.held\.value differ"):
        resume_in(found[1], store, saved, "exact")
    return 0


def save_whole(training: Training, store: LocalStore) -> Saved:
    """Save a checkpoint that the main rank writes, and return it in all ranks."""
    begin_save(training, SaveRequest(store, "f" * 64, {}))
    (saved, *_) = training.ranks.gather(training.saver.wait())
    assert isinstance(saved, Saved)
    return saved


def save_beside_another(folder: str, number: int) -> int:
    """Save where another writer's part lies: the save takes the next name.

    Args:
        number: the part's number. If it is the first part, no rank gives a part of its own a name there.
    """
    store = LocalStore(f"{folder}/r")
    training = make(folder)
    train_to(training, 2)
    name = save_step(training, LocalStore(f"{folder}/probe")).metadata.parts[number].name
    if training.accelerator.is_main_process:
        store.create(f"epoch-0001-step-00000002/{name}", b"another writer's bytes")
    saved = save_step(training, store)
    assert saved.path == "epoch-0001-step-00000002.2"
    assert not store.exists("epoch-0001-step-00000002/metadata.json")
    assert number or store.list("epoch-0001-step-00000002") == [name]
    assert store.read(f"epoch-0001-step-00000002/{name}") == b"another writer's bytes"
    return 0


def read_damage(folder: str, number: int) -> int:
    """Read a checkpoint one of whose parts is damaged: every rank raises, whichever rank has read that part."""
    store = LocalStore(f"{folder}/r")
    training = make(folder)
    train_to(training, 1)
    saved = save_step(training, store)
    part = saved.metadata.parts[number]
    if training.accelerator.is_main_process:
        path = Path(folder, "r", saved.path, part.name)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    training.ranks.gather(None)
    with pytest.raises(CheckpointDamaged, match=part.name):
        read_shards(training.ranks.exchange, find_shards(training.recipe), store, commit_of(saved))
    return 0


def fail_in_one(folder: str, rank: int) -> int:
    """Fail to write in one rank: the save fails in all ranks with that rank's error, and isn't complete."""
    store = LocalStore(f"{folder}/r")
    training = make(folder)
    train_to(training, 1)
    own = Failing(f"{folder}/r") if training.accelerator.process_index == rank else store
    begin_save(training, SaveRequest(own, "f" * 64, {}))
    with pytest.raises(StoreFull, match="no space"):
        training.saver.wait()
    assert not store.exists("epoch-0001-step-00000001/metadata.json")
    return 0


class Shut(LocalStore):
    """A folder in which a file is complete only once ``opened`` is set."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.opened = threading.Event()

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Any]:
        """Create a file, and wait before its first byte."""
        with super().creating(name) as writer:
            assert self.opened.wait(PATIENCE_S)
            yield writer


def save_beside_training(folder: str) -> int:
    """Train on while a save is exchanged: it has the state that it was begun with."""
    training = make(folder)
    train_to(training, 2)
    expected = content_of(training, LocalStore(f"{folder}/expected"))
    shut = Shut(f"{folder}/r")
    begin_save(training, SaveRequest(shut, "f" * 64, {}))
    train_to(training, 4)
    assert training.saver.is_busy
    assert not shut.list("epoch-0001-step-00000002")
    shut.opened.set()
    saved = training.saver.wait()
    assert saved is not None
    assert saved.metadata.checkpoint_sha256 == expected
    assert content_of(training, LocalStore(f"{folder}/later")) != expected
    return 0


def save_twice(folder: str) -> int:
    """Begin a save while the one before is exchanged: it waits for that one, and both have their own state."""
    training = make(folder)
    train_to(training, 2)
    shut = Shut(f"{folder}/r")
    found: list[Saved] = []
    begin_save(training, SaveRequest(shut, "f" * 64, {}), found.append)
    train_to(training, 3)
    wait, waits = training.saver.wait, threading.Event()

    def watched() -> Saved | None:
        waits.set()
        return wait()

    def open_late() -> None:
        assert waits.wait(PATIENCE_S)
        shut.opened.set()

    training.saver.wait = watched  # type: ignore[method-assign]
    thread = threading.Thread(target=open_late)
    thread.start()
    begin_save(training, SaveRequest(shut, "f" * 64, {}), found.append)
    train_to(training, 4)
    wait()
    thread.join()
    assert [saved.step for saved in found] == [2, 3]
    straight = make(folder)
    for saved in found:
        train_to(straight, saved.step)
        assert content_of(straight, LocalStore(f"{folder}/straight")) == saved.metadata.checkpoint_sha256
    return 0


def save_frozen(folder: str) -> int:
    """Save several times: a part that never changes is linked, whichever rank owns it, or written where it can't be."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    training = make(folder)
    exchange, store = training.ranks.exchange, LocalStore(f"{folder}/r")
    exchange.window_bytes = 2**14
    mesh = init_device_mesh(DEVICE, (exchange.ranks,))
    weights = {f"layer{number}": distribute_tensor(torch.ones(256, 64), mesh, [Shard(0)]) for number in range(6)}
    saver = Saver(weights["layer0"].nbytes, shared_by=9)
    saves: list[dict[str, int]] = []

    def save() -> Saved:
        weights["layer5"].add_(1.0)
        payload = to_payload({"model": weights, "saves": len(saves)})
        saver.begin(
            CheckpointSave(
                store, payload, METADATA_FIELDS | {"optimizer_steps_total": len(saves) + 1}, "", peers=exchange
            )
        )
        saved = saver.wait()
        assert saved is not None
        parts = [part.name for part in saved.metadata.parts]
        saves.append({name: Path(folder, "r", saved.path, name).stat().st_ino for name in parts})
        training.ranks.gather(None)
        return saved

    for _ in range(4):
        saved = save()
    names = list(saves[0])
    files = {name: [each[name] for each in saves] for name in names}
    assert len(names) == 7
    for name in (names[0], names[-1]):
        assert len({*files[name]}) == 4, "each save has different bytes"
    for name in names[1:-1]:
        first, second, *others = files[name]
        assert first != second, "that the part lasts shows in the second save"
        assert others == [second] * 2
    gone = names[1], names[2]  # of one rank and of the other
    if exchange.rank == 0:
        for name in gone:
            Path(folder, "r", saved.path, name).unlink()
    training.ranks.gather(None)
    again = save()
    assert {name for name in names[1:-1] if saves[-1][name] != files[name][-1]} == {*gone}
    assert again.metadata.parts[1:-1] == saved.metadata.parts[1:-1]
    read = read_shards(exchange, model_shares(payload := to_payload({"model": weights})), store, commit_of(again))
    assert not [name for name in differences(localize(payload), localize(read)) if name.startswith("model")]
    return 0


class Failing(LocalStore):
    """A folder on a full disk."""

    def creating(self, name: str) -> Any:
        """Raise StoreFull."""
        raise StoreFull(f"{name}: no space left")


def build_on_meta(folder: str) -> int:
    """Build a model on the meta device: its weights don't depend on the sharding, and it trains."""
    models = []
    for parallel in ("fsdp", "ddp"):
        training = make(folder, parallel, {"device": "meta"})
        assert is_sharded(training.recipe.model.get_parameter("scale")) == (parallel == "fsdp")
        models.append({name: gather_whole(each).clone() for name, each in training.recipe.model.state_dict().items()})
        train_to(training, 2)
    assert models[0]["first.weight"].std() > 0
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name]), name
    return 0


def save_meshes(folder: str) -> int:
    """Save tensors that are cut in every way over a 2-D mesh of four ranks; a plain save has the same content id."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    training = make(folder)
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    whole: dict[str, Any] = nn.Sequential(nn.Linear(12, 22), nn.Linear(22, 6)).state_dict()
    whole |= {"cube": torch.randn(5, 7, 3), "flags": torch.arange(9) % 2 == 0, "number": torch.tensor(3.5)}
    model = nn.Sequential(nn.Linear(12, 22), nn.Linear(22, 6))
    model.load_state_dict({name: value for name, value in whole.items() if "." in name})
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    ways = {"cube": (Shard(1), Shard(0)), "flags": (Replicate(), Shard(0)), "number": (Replicate(), Replicate())}
    cut = {name: distribute_tensor(whole[name], mesh, way) for name, way in ways.items()}
    payloads = to_payload({"model": model.state_dict() | cut}), to_payload({"model": whole})
    found = []
    for name, payload, peers in zip(("cut", "whole"), payloads, (training.ranks.exchange, None), strict=True):
        for part_bytes in (600, 2**20):  # with 600 bytes, rows of one tensor are in several parts
            saver = Saver(part_bytes)
            own = LocalStore(f"{folder}/{name}-{part_bytes}-{0 if peers else training.accelerator.process_index}")
            saver.begin(CheckpointSave(own, payload, METADATA_FIELDS, "", peers=peers))
            saved = saver.wait()
            assert saved is not None
            found.append(saved.metadata.checkpoint_sha256)
            if peers is not None:  # and back
                read = read_shards(peers, model_shares(payload), own, commit_of(saved))
                assert not differences(localize(payload), localize(read))
    assert found[:2] == found[2:]
    return 0


def model_shares(payload: Payload) -> dict[str, Any]:
    """Return the tensors of a state that are cut over the ranks, by name."""
    pieces = {name: tensor.pieces[0] for name, tensor in payload.tensors.items()}
    return {name: piece.tensor for name, piece in pieces.items() if isinstance(piece, ShardedBytes)}


def content_of(training: Training, store: LocalStore) -> str:
    """Save a checkpoint and return its content id."""
    return save_step(training, store).metadata.checkpoint_sha256
