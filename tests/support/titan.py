"""torchtitan's debug model with two layers, on a few lines of text; with Holdfast, and without it.

Run with the Python of ``.venv/titan``, which `make test-titan` makes.
"""

import copy
import itertools
import sys
from dataclasses import dataclass
from typing import Any

import tests.support.titan_cpu  # noqa: F401  # before anything of torchtitan's

# isort: split
import torch
from datasets import Dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HFDataSource,
    HuggingFaceTextDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from holdfast import Run
from holdfast.adapters import torchtitan as held
from holdfast.adapters.torchtitan_config import check_config
from holdfast.adapters.torchtitan_parts import LoaderPosition
from holdfast.config import Compute
from holdfast.data.streams import read_position
from holdfast.errors import RecipeError

STEPS = 8
LINES = 24  # the steps read them more than once


def load_lines(path: str) -> Dataset:
    """Return lines of text; some have several samples' tokens, so that a dataset's buffer holds more than one."""
    return Dataset.from_dict({"text": [chr(97 + number) * (5 + 37 * number % 150) for number in range(LINES)]})


def take_text(sample: dict[str, str]) -> str:
    return sample["text"]


DATASETS["lines"] = DatasetConfig(path="", loader=load_lines, sample_processor=take_text)
DATASETS["stream"] = DatasetConfig(
    path="", loader=lambda path: load_lines(path).to_iterable_dataset(), sample_processor=take_text
)
DATASETS["shuffled"] = DatasetConfig(
    path="", loader=lambda path: load_lines(path).to_iterable_dataset().shuffle(1), sample_processor=take_text
)


class Letters(BaseTokenizer):
    """A tokenizer of single letters."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [0] * add_bos + [ord(each) for each in text] + [1] * add_eos

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def get_vocab_size(self) -> int:
        return 128


def make_loader(data: str) -> Any:
    """Return the config of a loader of one of the datasets above, or of "interleaved"."""
    if data != "interleaved":
        return HuggingFaceTextDataLoader.Config(dataset=data)
    sources = [HFDataSource(dataset="lines", weight=2), HFDataSource(dataset="stream")]
    return InterleavedHuggingFaceTextDataLoader.Config(sources=sources)


def make_config(folder: str, changes: dict[str, dict[str, Any]] | None = None, data: str = "lines") -> Trainer.Config:
    """Return the config of torchtitan's debug model with two layers.

    Args:
        changes: values of its parts, such as ``{"parallelism": {"tensor_parallel_degree": 2}}``.
        data: see `make_loader`.
    """
    config: Any = llama3_debugmodel()
    config.dump_folder = folder
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.tokenizer, config.dataloader = Letters.Config(), make_loader(data)
    config.validator = Validator.Config(enable=True, freq=3, steps=1, dataloader=make_loader("lines"))
    of_a_cpu: dict[str, dict[str, Any]] = {
        "training": {
            "seq_len": 32, "local_batch_size": 2, "steps": STEPS, "disable_cuda_graphs": True,
            "mixed_precision_param": "float32",
        },
        "optimizer": {"implementation": "for-loop"},
        "parallelism": {"spmd_backend": "partial_dtensor"},
        "debug": {"enable_structured_logging": False},
    }  # fmt: skip
    for settings in (of_a_cpu, changes or {}):
        for part, values in settings.items():
            for name, value in values.items():
                setattr(getattr(config, part), name, value)
    return config  # type: ignore[no-any-return]


def train(
    run: Run, folder: str, changes: dict[str, dict[str, Any]] | None = None, data: str = "lines", layout: str = ""
) -> None:
    """Train as a run.

    Args:
        layout: how a weight lies on the ranks, as torch prints it.
    """
    trainer = held.train(run, make_config(folder, changes, data))
    found = str(getattr(trainer.model_parts[0].layers["0"].attention.wo.weight, "placements", ""))
    assert layout in found, found


class Forgetful(Trainer):
    """A Trainer whose steps depend on a number that its ``state_dict`` leaves out."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Nothing to set."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.warmth = 0

    def train_step(self, data_iterator: Any) -> None:
        """Train a step; from the third on, the weights follow the number."""
        super().train_step(data_iterator)
        self.warmth += 1
        for each in self.model_parts[0].parameters():
            each.data.mul_(1 + self.warmth / 1000)


def forget(run: Run, folder: str) -> None:
    """Train a Trainer that forgets state."""
    config = make_config(folder)
    held.train(run, Forgetful.Config(**{name: getattr(config, name) for name in Trainer.Config.__slots__}))


def list_missing(names: list[str]) -> list[str]:
    """Return those of the private names of torchtitan's datasets that its installed version lacks."""
    found = [read("lines", 1).dataset, read("interleaved", 1).dataset]
    return [name for name in names if not any(hasattr(each, name) for each in found)]


def refuse(part: str, name: str, value: Any) -> str:
    """Return why the adapter refuses torchtitan's config with one changed value; empty if it doesn't."""
    try:
        check_config(Compute(), 2, make_config("", {part: {name: value}}))
    except RecipeError as error:
        return error.message
    return ""


def read(data: str, ranks: int) -> LoaderPosition:
    """Return the batches of one of several ranks, at their beginning."""
    loader = make_loader(data).build(
        dp_world_size=ranks, dp_rank=0, tokenizer=Letters(Letters.Config()), seq_len=32, local_batch_size=2
    )
    return LoaderPosition(loader)


def compare_positions(data: str, ranks: int) -> int:
    """Resume after each of the first batches, and compare later ones and their states with those of one process.

    Returns: how many batches were compared.

    Raises:
        AssertionError: they differ.
    """
    compared = 0
    for cut in range(1, 40):
        straight, resumed = read(data, ranks), read(data, ranks)
        batches = iter(straight)
        for _ in range(cut):
            next(batches)
        resumed.load_state_dict(copy.deepcopy(read_position(straight)))
        for own, other in itertools.islice(zip(batches, resumed, strict=True), 10):
            assert torch.equal(own[1], other[1]), (cut, compared)
            assert all(torch.equal(each, other[0][name]) for name, each in own[0].items()), (cut, compared)
            assert read_position(straight) == read_position(resumed), (cut, compared)
            compared += 1
    return compared


def main(folder: str) -> None:
    """Train with torchtitan alone, and print each step's loss."""
    trainer: Any = make_config(folder, {"debug": {"seed": 3}}).build()
    trainer.metrics_processor.logger.log = print_loss
    trainer.train()
    trainer.close()


def print_loss(metrics: dict[str, Any], step: int) -> None:
    if "grad_norm" in metrics and torch.distributed.get_rank() == 0:  # lines of two ranks may run into each other
        print("loss", step, repr(metrics["loss_metrics/global_avg_loss"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
