"""A new run begins with a model's weights, as a folder of safetensors or of transformers has them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from holdfast import Recipe
from holdfast.attempt import live
from holdfast.config import Compute, InitFrom, Log, RunConfig
from holdfast.errors import ConfigError
from holdfast.journal import Journal
from holdfast.provenance.model_files import hash_model
from holdfast.store import open_store
from holdfast.training import Training
from holdfast.training.init_from import begin_from_folder
from tests.support import movers
from tests.support.trainings import make

pytestmark = pytest.mark.usefixtures("same_process")


def write(folder: Path, weights: dict[str, torch.Tensor], shards: int) -> Path:
    """Write weights as transformers does: in one file, or in several with an index."""
    folder.mkdir()
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    placed = {name: names[number % shards] for number, name in enumerate(sorted(weights))}
    for file in names:
        save_file({name: weights[name] for name in weights if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    model, _, _ = movers.make()
    return {name: each + 1 for name, each in model.state_dict().items()}


def begin(folder: Path, tmp_path: Path, **options: Any) -> Training:
    training = make(tmp_path, "tests.support.movers:recipe")
    begin_from_folder(training, folder, InitFrom(run=str(folder), **options))
    return training


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_model_has_the_folders_weights(
    tmp_path: Path, weights: dict[str, torch.Tensor], shards: int, prefix: str
) -> None:
    folder = write(tmp_path / "model", {f"{prefix}{name}": each for name, each in weights.items()}, shards)
    training = begin(folder, tmp_path)
    found = training.recipe.model.state_dict()
    assert all(torch.equal(found[name], each) for name, each in weights.items())
    assert training.progress.step == training.progress.anneal_offset == 0


def test_what_is_reset_stays_as_it_is_built(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    built = make(tmp_path, "tests.support.movers:recipe").recipe.model.state_dict()
    body = {name: each for name, each in weights.items() if not name.startswith("4.")}
    found = begin(write(tmp_path / "model", body, 2), tmp_path, reset=("4",)).recipe.model.state_dict()
    assert torch.equal(found["4.weight"], built["4.weight"])
    assert torch.equal(found["0.weight"], weights["0.weight"])


def test_what_does_not_fit_is_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    folder = write(tmp_path / "model", {f"layers.{name}": each for name, each in weights.items()} | weights, 2)
    with pytest.raises(ConfigError, match=r"the model lacks 9 weights of the source: layers\.0\.bias"):
        begin(folder, tmp_path)
    with pytest.raises(ConfigError, match=r"init_from\.load_optimizer: .* contains only weights"):
        begin(folder, tmp_path, load_optimizer=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"is missing, although model\.safetensors\.index\.json lists it"):
        begin(folder, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_run_has_the_folders_hash_on_record_and_goes_on_without_it(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    folder = write(tmp_path / "model", weights, 2)
    sha256 = hash_model(folder)
    config = RunConfig(
        recipe="tests.support.movers:recipe", run="tuned", store=str(tmp_path / "runs"), epochs=1,
        init_from=InitFrom(run=str(folder)), compute=Compute(device="cpu"), log=Log(folder=str(tmp_path / "logs")),
    )  # fmt: skip
    live(config)
    journal = Journal(open_store(config.store), config.run)
    assert journal.read_attempt(1).lineage["ancestor"]["checkpoint_sha256"] == sha256
    for file in folder.iterdir():
        file.unlink()
    assert live(config.model_copy(update={"epochs": 2})).complete


@pytest.mark.extras("transformers")
def test_a_folder_of_transformers_with_tied_weights_in_several_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = gpt2(transformers)
    model.save_pretrained(tmp_path / "model", max_shard_size="10KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    training = make(tmp_path, f"{__name__}:tuned")
    begin_from_folder(training, tmp_path / "model", InitFrom(run=str(tmp_path / "model")))
    found = training.recipe.model.state_dict()
    assert all(torch.equal(found[name], each) for name, each in model.state_dict().items())


def gpt2(transformers: Any) -> Any:
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def tuned() -> Recipe:
    import transformers

    model = gpt2(transformers)
    return Recipe(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), data=movers.points(), batch_size=8,
        loss=lambda model, batch: model(input_ids=batch[1][None]).logits.mean(),
    )  # fmt: skip
