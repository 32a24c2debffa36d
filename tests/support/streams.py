"""Recipes and loops over the data streams of other libraries. Each takes a folder for files of its own."""

import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import Recipe, Run

SAMPLES = 22
NUMBERS = [float(number) for number in range(SAMPLES)]
BATCH_SIZE = 4
PER_EPOCH = 6  # more than a pass


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))


def learn(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss on numbers in whatever form a stream gives them."""
    numbers = batch["x"] if isinstance(batch, dict) else batch
    x = torch.as_tensor(numbers, dtype=torch.float32).reshape(-1, 1) / SAMPLES
    return F.mse_loss(model(x), x.square() + 0.01 * torch.randn_like(x))


# ---- torchdata


def node(folder: Path) -> Any:
    """A graph of nodes over a sampler that is told the pass, which gives samples."""
    sampler: Any = DistributedSampler(NUMBERS, num_replicas=1, rank=0, seed=2)  # type: ignore[arg-type]
    return nodes.Loader(nodes.MapStyleWrapper(map_dataset=NUMBERS, sampler=sampler))


def node_of_a_random_sampler(folder: Path) -> Any:
    sampler: Any = RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(1))
    return nodes.Loader(nodes.MapStyleWrapper(map_dataset=NUMBERS, sampler=sampler))


def node_of_a_stream(folder: Path) -> Any:
    return nodes.Loader(nodes.IterableWrapper(NUMBERS))


def node_of_batches(folder: Path) -> Any:
    return nodes.Loader(nodes.Batcher(nodes.IterableWrapper(NUMBERS), BATCH_SIZE, drop_last=False))


def map_in_a_loader(folder: Path) -> Any:
    return DataLoader(NUMBERS, BATCH_SIZE)  # type: ignore[arg-type]


def batches_of_a_loader(folder: Path) -> Any:
    return iter(map_in_a_loader(folder))


def stateful_loader(folder: Path) -> Any:
    return StatefulDataLoader(NUMBERS, BATCH_SIZE, shuffle=True)  # type: ignore[arg-type]


def stateful_loader_with_workers(folder: Path) -> Any:
    return StatefulDataLoader(NUMBERS, BATCH_SIZE, num_workers=1)  # type: ignore[arg-type]


# ---- Hugging Face


def hf_map(folder: Path) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"x": NUMBERS}).shuffle(seed=3)


def hf_map_as_torch(folder: Path) -> Any:
    return hf_map(folder).with_format("torch")


def hf_map_transformed(folder: Path) -> Any:
    """Samples whose transform draws."""
    dataset = hf_map(folder)
    dataset.set_transform(lambda batch: {"x": [x + torch.randn(()).item() for x in batch["x"]]})
    return dataset


def hf_stream(folder: Path) -> Any:
    """A stream whose samples draw."""
    return hf_plain(folder).map(lambda sample: {"x": sample["x"] + torch.rand(()).item() / 10})


def hf_plain(folder: Path) -> Any:
    from datasets import IterableDataset

    return IterableDataset.from_generator(read_shards, gen_kwargs={"shards": [0, 1, 2]})


def read_shards(shards: list[int]) -> Iterator[dict[str, float]]:
    for shard in shards:
        for number in range(shard, SAMPLES, 3):
            yield {"x": float(number)}


def hf_stream_shuffled(folder: Path) -> Any:
    return (
        hf_plain(folder).shuffle(seed=5, buffer_size=6).map(lambda sample: {"x": sample["x"] + torch.rand(()).item()})
    )


def hf_stream_shuffled_without_a_seed(folder: Path) -> Any:
    return hf_plain(folder).shuffle(buffer_size=6)


def hf_stream_of_batches(folder: Path) -> Any:
    return hf_plain(folder).batch(BATCH_SIZE)


def hf_stream_of_batches_as_torch(folder: Path) -> Any:
    return hf_plain(folder).batch(BATCH_SIZE).with_format("torch")


def hf_batches_that_drew(folder: Path) -> Any:
    """Batches of samples that drew: a resume draws for the batch before again."""
    return hf_stream(folder).batch(BATCH_SIZE)


def hf_stream_in_a_stateful_loader(folder: Path) -> Any:
    return StatefulDataLoader(hf_stream(folder), BATCH_SIZE)


def hf_shuffled_stream_in_a_stateful_loader(folder: Path) -> Any:
    return StatefulDataLoader(hf_stream_shuffled(folder), BATCH_SIZE)


def hf_stream_in_a_loader(folder: Path) -> Any:
    return DataLoader(hf_stream(folder), BATCH_SIZE)


def hf_map_in_a_loader(folder: Path) -> Any:
    return DataLoader(hf_map_transformed(folder), BATCH_SIZE, shuffle=True)


# ---- WebDataset


def write_shards(folder: Path) -> str:
    """Write the samples into three tar files. Return their names in WebDataset's form."""
    folder.mkdir(exist_ok=True)
    for shard in range(3):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
            for number in range(shard, SAMPLES, 3):
                text = str(float(number)).encode()
                info = tarfile.TarInfo(f"{number:04d}.x")
                info.size = len(text)
                tar.addfile(info, BytesIO(text))
    return f"{folder}/shard-{{0..2}}.tar"


def web(folder: Path, **options: Any) -> Any:
    import webdataset

    options = {"shardshuffle": False} | options
    return webdataset.WebDataset(write_shards(folder), **options).map(lambda sample: float(sample["x"]))


def web_shuffled(folder: Path) -> Any:
    return web(folder, shardshuffle=3, detshuffle=True, seed=2).shuffle(6, seed=4)


def web_shuffled_without_a_seed(folder: Path) -> Any:
    return web(folder).shuffle(6)


def web_loader(folder: Path) -> Any:
    import webdataset

    return webdataset.WebLoader(web(folder), batch_size=BATCH_SIZE)


# ---- programs


def find(name: str) -> Callable[[Path], Any]:
    made: Callable[[Path], Any] = globals()[name]
    return made


def recipe(stream: str, folder: str, gives_batches: bool = False, beside: str = "") -> Recipe:
    """Build a recipe over a stream of samples, or of batches, with another stream among its extras if one is named."""
    model = net()
    return Recipe(
        model=model, data=find(stream)(Path(folder)), optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss=learn, batch_size=None if gives_batches else BATCH_SIZE, steps_per_epoch=PER_EPOCH,
        probe=lambda model: {"output": model(torch.ones(2, 1))},
        extras={"other": find(beside)(Path(folder))} if beside else {},
    )  # fmt: skip


def loop(run: Run, stream: str, folder: str) -> None:
    """Train in a loop over a loader or over a stream of batches."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(find(stream)(Path(folder)), per_epoch=PER_EPOCH):
        step.log(loss=take_step(optimizer, learn(model, step.batch)))


def loop_over_samples(run: Run, stream: str, folder: str) -> None:
    """Train in a loop over batches that Holdfast makes."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run.keep(model=model, optimizer=optimizer)
    batches = run.batches(find(stream)(Path(folder)), batch_size=BATCH_SIZE)
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=take_step(optimizer, learn(model, next(batches))))


def loop_beside(run: Run, stream: str, folder: str, is_early: bool = False) -> None:
    """Train in a loop that takes the batches of a second stream beside those of a loader, and keeps the stream.

    Args:
        is_early: whether to make the second stream's iterator before the loop.
    """
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    other = find(stream)(Path(folder))

    def cycle() -> Iterator[Any]:
        while True:
            yield from other

    batches = iter(other) if is_early else cycle()
    run.keep(model=model, optimizer=optimizer, other=other)
    for step in run.steps(DataLoader(NUMBERS, BATCH_SIZE, shuffle=True), per_epoch=PER_EPOCH):  # type: ignore[arg-type]
        loss = learn(model, step.batch) + learn(model, next(batches))
        step.log(loss=take_step(optimizer, loss))


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss
