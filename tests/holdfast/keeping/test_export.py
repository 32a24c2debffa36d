"""Tests of the weights that leave a checkpoint: verified, byte-stable, and readable by other tools."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from holdfast.checkpoint import save
from holdfast.cli import app, run_app
from holdfast.cli.keeping import _describe_parts
from holdfast.journal.finding import open_journal
from holdfast.state import to_payload
from holdfast.store import open_store
from holdfast.training.saving import describe_configs
from tests.support.makers import METADATA_FIELDS, make_line, train


class Pair(nn.Module):
    """Two tied layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(7))


class Config:
    """What export needs of a configuration of transformers."""

    model_type = "pair"

    def to_json_string(self) -> str:
        return json.dumps({"model_type": "pair", "width": 3})


@pytest.fixture
def weights() -> dict[str, Any]:
    torch.manual_seed(0)
    return Pair().state_dict()


@pytest.fixture
def run(tmp_path: Path, weights: dict[str, Any]) -> str:
    """Return a run whose model has a pair, and whose extras have an average of it."""
    average = {name: value.float() / 2 for name, value in weights.items()}
    state = {
        "model": {f"pair.{name}": value for name, value in weights.items()},
        "optimizer": {"state": {"pair.first.weight": {"exp_avg": torch.ones(3, 3)}}},
        "extras": [{"average": average}],
    }
    line = make_line(open_store(str(tmp_path)))
    parent = train(line)
    fields = METADATA_FIELDS | {
        "optimizer_steps_total": 20, "epoch": 2, "previous_checkpoint_sha256": parent.checkpoint_sha256,
        "config_fingerprint": parent.config_fingerprint,
        "model_configs": {"pair": {"config.json": {"model_type": "pair"}, "generation_config.json": {}}},
    }  # fmt: skip
    trail = "".join(f'{{"step": {step}}}\n' for step in range(11, 21))
    line.commit(save(line.journal.store, to_payload(state), fields, trail), "chunk")
    return f"{tmp_path}/run"


def export(run: str, out: Path, *options: str) -> bytes:
    assert run_app(app, ["export", run, str(out), *options]) == 0
    return out.read_bytes()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_safetensors_have_the_weights_of_the_model_alone(run: str, tmp_path: Path, weights: dict[str, Any]) -> None:
    export(run, tmp_path / "all.safetensors")
    assert_equal(load_file(tmp_path / "all.safetensors"), {f"pair.{name}": value for name, value in weights.items()})


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_parts_weights_load_into_its_module(run: str, tmp_path: Path, weights: dict[str, Any], form: str) -> None:
    out = tmp_path / "pair"
    export(run, out, "--part", "pair", "--form", form)
    found = load_file(out) if form == "safetensors" else torch.load(out, weights_only=True)
    assert_equal(found, weights)
    Pair().load_state_dict(found)


def test_an_extras_weights_are_a_part(run: str, tmp_path: Path, weights: dict[str, Any]) -> None:
    export(run, tmp_path / "out", "--part", "extras.average")
    assert_equal(load_file(tmp_path / "out"), {name: value.float() / 2 for name, value in weights.items()})


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_equal_weights_give_equal_bytes(run: str, tmp_path: Path, form: str) -> None:
    (tmp_path / "other").mkdir()
    once = export(run, tmp_path / "one", "--form", form)
    assert once == export(run, tmp_path / "other" / "two", "--form", form)


def test_a_folder_for_transformers(run: str, tmp_path: Path, weights: dict[str, Any]) -> None:
    out = tmp_path / "out"
    assert run_app(app, ["export", run, str(out), "--form", "transformers", "--part", "pair"]) == 0
    assert {path.name for path in out.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((out / "config.json").read_text()) == {"model_type": "pair"}
    assert_equal(load_file(out / "model.safetensors"), weights)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of the reader in one process
def test_a_folder_for_torch_distributed_checkpoint(run: str, tmp_path: Path, weights: dict[str, Any]) -> None:
    out = tmp_path / "out"
    command = ["export", run, str(out), "--form", "dcp", "--part", "pair"]
    assert run_app(app, command) == 0
    found = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load(found, checkpoint_id=out, no_dist=True)
    assert_equal(found, weights)
    assert run_app(app, command) == 1


def test_configurations_are_found_in_the_model() -> None:
    inner = Pair()
    inner.config = Config()  # type: ignore[assignment]
    expected = {
        "config.json": {"model_type": "pair", "width": 3, "architectures": ["Pair"], "dtype": "float32"},
    }
    assert describe_configs(inner) == {"": expected}
    assert describe_configs(nn.ModuleDict({"pair": inner, "other": nn.Linear(1, 1)})) == {"pair": expected}


def test_a_model_with_adapters_is_no_folder_for_transformers() -> None:
    """Adapters give the weights names that ``from_pretrained`` doesn't know."""
    inner, outer = Pair(), nn.Module()
    for module in (inner, outer):
        module.config = Config()  # type: ignore[assignment]
    outer.peft_config, outer.base_model = {}, inner  # type: ignore[assignment]
    assert describe_configs(outer) == describe_configs(nn.ModuleDict({"student": outer})) == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--part", "nothing"], "the checkpoint has no weights named nothing"),
        (["--form", "transformers"], "the model can't be exported for transformers"),
        (["again"], "expected a commit and OUT after the run: RUN [COMMIT] OUT"),
    ],
)
def test_wrong_use_leaves_nothing(
    run: str, tmp_path: Path, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_app(app, ["export", run, "2", str(out), *options]) == 1
    assert expected in capsys.readouterr().err
    assert not out.exists()


def test_what_exists_is_not_overwritten(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    assert run_app(app, ["export", run, str(out)]) == 1
    assert "exists" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_name_that_is_too_long_is_told_in_one_line(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["export", run, str(tmp_path / ("x" * 300))]) == 1
    assert "error: can't write xxx" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = Path(run, "epoch-0002").glob("checkpoint*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    assert run_app(app, ["export", run, str(tmp_path / "out")]) == 2
    assert "holdfast verify lists" in capsys.readouterr().err
    assert run_app(app, ["verify", run]) == 2
    assert "or start the run again: it can continue from epoch-0001" in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_taking_out_a_quarantined_commit_says_so(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = open_journal(run)
    for command in ("export", "pack"):
        assert run_app(app, [command, run, "2", str(tmp_path / f"sound-{command}")]) == 0
        assert "in quarantine" not in capsys.readouterr().out
    journal.quarantine(2, "a test", journal.attempts())
    for command in ("export", "pack"):
        assert run_app(app, [command, run, "2", str(tmp_path / command)]) == 0
        said = capsys.readouterr().out
        assert "commit 2 is in quarantine: the run no longer uses it" in said
        assert "the command takes the newest commit that counts" in said


def test_an_export_of_several_modules_names_the_option_for_one() -> None:
    assert _describe_parts(["maker.weight", "judge.weight", "judge.bias"]).startswith(
        "these are maker, judge: --part maker"
    )
    assert _describe_parts(["weight", "bias"]) == ""
    assert _describe_parts([f"{layer}.weight" for layer in range(7)]) == ""
