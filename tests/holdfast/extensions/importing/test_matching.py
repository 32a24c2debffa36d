"""The parts of a source that are malformed, ambiguous or named otherwise: matched by one rule, or refused."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.extensions.importing import generators
from holdfast.extensions.importing.foreign import ForeignCheckpoint, check_states, rename, sort_values
from holdfast.extensions.importing.optimizers import match_moments
from holdfast.extensions.importing.reading import read_foreign
from holdfast.training.moving.weights import match_weights
from tests.support.trainings import make


class Tied(nn.Module):
    """An embedding whose weights are the head's, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


def named(prefix: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": each for name, each in weights.items()}


@pytest.fixture
def optimizer() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    built = torch.optim.AdamW(model.parameters())
    model(torch.rand(1, 2)).sum().backward()
    built.step()
    return built.state_dict()


def test_prefixes_of_several_levels_are_left_out() -> None:
    own = nn.Linear(2, 2).state_dict()
    for prefix in ("model.module.", "net.body.", "module.net._orig_mod."):
        found = match_weights(own, {"": named(prefix, own)}, {})
        assert found.weights.keys() == own.keys()
        assert found.notes == [f"the prefix {prefix} was left out of the source's names"]


def test_two_weights_of_one_bare_name_are_refused() -> None:
    own = nn.Linear(2, 2).state_dict()
    with pytest.raises(ConfigError, match=r"lacks 2 weights of the source: module\.bias, module\.weight"):
        match_weights(own, {"": own | named("module.", own)}, {})


def test_weights_that_are_tied_here_alone_are_refused() -> None:
    own = Tied().state_dict()
    both = {name: copy.copy(each) for name, each in own.items()}
    assert match_weights(own, {"": both}, {}).weights.keys() == own.keys()
    with pytest.raises(ConfigError, match=r"embedding.weight and head.weight are one weight in the model"):
        match_weights(own, {"": both | {"head.weight": torch.zeros(4, 3)}}, {})


def test_a_module_with_an_extra_state_is_one() -> None:
    assert sort_values(ForeignCheckpoint("torch"), {"model": Tied().state_dict(), "step": 3}).modules.keys() == {
        "model"
    }


def test_states_inside_one_dictionary_are_found() -> None:
    found = sort_values(ForeignCheckpoint("torch"), {"state": {"model": nn.Linear(2, 2).state_dict(), "step": 3}})
    assert (found.modules.keys(), found.step) == ({"model"}, 3)


def test_several_modules_are_matched_by_their_own_names_first() -> None:
    kept = {"judge": nn.Linear(2, 2), "maker": nn.Linear(2, 2)}
    own = nn.ModuleDict(kept).state_dict()
    judge, maker = kept["judge"].state_dict(), kept["maker"].state_dict()
    for modules in ({"maker": maker, "D": judge}, {"module": named("judge.", judge) | named("maker.", maker)}):
        weights = match_weights(own, modules, kept).weights
        assert torch.equal(weights["judge.weight"], judge["weight"])
        assert torch.equal(weights["maker.weight"], maker["weight"])
    with pytest.raises(ConfigError, match="the source has no weights of judge"):
        match_weights(own, {"maker": maker}, kept)
    with pytest.raises(ConfigError) as refused:
        match_weights(own, {"D": judge, "G": maker}, kept)
    assert refused.value.hint == "say which weights to take: --map G=judge"


def test_a_new_name_that_another_has_is_refused() -> None:
    weights = nn.Linear(2, 2).state_dict()
    for modules in ({"ema": weights, "model": weights}, {"model": weights, "ema": weights}):
        with pytest.raises(ConfigError, match="--map gives two of the source's objects the same name, model"):
            rename(ForeignCheckpoint("torch", modules=dict(modules)), {"ema": "model"})
        assert rename(ForeignCheckpoint("torch", modules=modules), {"ema": "model", "model": ""}).modules.keys() == {
            "model"
        }


def test_generators_can_be_renamed_and_left_out() -> None:
    values = {"model": nn.Linear(2, 2).state_dict(), "rng": torch.get_rng_state()}
    found = sort_values(ForeignCheckpoint("torch"), values)
    assert rename(found, {"rng": "order"}).generators.keys() == {"order"}
    assert rename(found, {"order": ""}).generators == {}


def test_a_generator_among_weights_is_not_a_weight() -> None:
    weights = nn.Linear(2, 2).state_dict()
    found = sort_values(ForeignCheckpoint("torch"), {**weights, "rng": torch.get_rng_state()})
    assert found.modules[""].keys() == weights.keys()
    assert found.generators.keys() == {"rng"}


def test_of_two_generators_the_processs_own_is_found_by_name_or_asked_for() -> None:
    first, second = torch.get_rng_state(), torch.Generator().manual_seed(9).get_state()
    for names in (("torch", "loader"), ("rng_state", "loader_state"), ("cpu_rng", "loader_rng")):
        own, others = generators.choose_own(dict(zip(names, (first, second), strict=True)))
        assert torch.equal(own["torch"], first)
        assert others == [names[1]]
    with pytest.raises(
        ConfigError, match=r"which of the source's random generators \(loader, noise\) is the generator of torch"
    ):
        generators.choose_own({"loader": first, "noise": second})


def test_the_states_of_gpus_are_taken_in_order() -> None:
    states = torch.arange(32, dtype=torch.uint8).reshape(2, 16)
    for value in (states, [*states], {"cuda_0": states[0], "cuda_1": states[1]}):
        found, _ = generators.choose_own(generators.list_states("rng", {"cuda": value}))
        assert torch.equal(torch.stack(found["cuda"]), states)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(5056, dtype=torch.uint8), (3, (0,) * 624 + (900,), None), (3, ("x",) * 625, None),
        ("MT19937", np.zeros(3, dtype=np.uint32), 1, 0, 0.0), ("MT19937", "x", 1, 0, 0.0), {"bit_generator": "MT19937"},
    ],
)  # fmt: skip
def test_what_no_generator_accepts_is_none(value: Any) -> None:
    assert generators.find("rng", value) == {}


@pytest.mark.parametrize("kind", ["list", "none", "groups", "no params", "twice", "number", "rate"])
def test_what_is_no_optimizer_is_refused(optimizer: dict[str, Any], kind: str) -> None:
    group = optimizer["param_groups"][0]
    broken: dict[str, Any] = {
        "list": [1], "none": {"state": None, "param_groups": [group]}, "groups": {"state": {}, "param_groups": [1]},
        "no params": {"state": {}, "param_groups": [{"lr": 1.0}]},
        "twice": {"state": {}, "param_groups": [{**group, "params": [0, 0]}]},
        "number": {"state": {0: 7}, "param_groups": [group]},
        "rate": {"state": {}, "param_groups": [{**group, "lr": "x"}]},
    }  # fmt: skip
    check_states(ForeignCheckpoint("torch", optimizers={"adam": optimizer}))
    with pytest.raises(ConfigError, match="the source's adam isn't the state_dict of an optimizer"):
        check_states(ForeignCheckpoint("torch", optimizers={"adam": broken[kind]}))


def test_moments_that_are_in_no_group_are_refused(
    tmp_path: Path, optimizer: dict[str, Any], same_process: None
) -> None:
    training = make(tmp_path, "tests.support.movers:recipe")
    saved = copy.deepcopy(training.optimizer.state_dict()) | {"state": {"0": optimizer["state"][0]}}
    with pytest.raises(
        ConfigError, match="the source's adam has a state of the parameter '0', but none of its parameter groups"
    ):
        match_moments(training, ForeignCheckpoint("torch", optimizers={"adam": saved}), [])


def test_what_is_laid_out_as_no_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "at.safetensors").mkdir()
    lightning = {"pytorch-lightning_version": "2"}
    weights = nn.Linear(2, 2).state_dict()
    torch.save(lightning, tmp_path / "none.ckpt")
    torch.save(lightning | {"state_dict": weights, "lr_schedulers": 3}, tmp_path / "three.ckpt")
    (tmp_path / "bin").mkdir()
    torch.save([1], tmp_path / "bin" / "pytorch_model.bin")
    for name, message in (
        ("at.safetensors", "isn't a checkpoint that can be imported"),
        ("none.ckpt", "contains a NoneType where a module's weights are expected"),
        ("three.ckpt", "doesn't have the structure of a Lightning checkpoint"),
        ("bin", "contains a list where a module's weights are expected"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_foreign(tmp_path / name, 0)
