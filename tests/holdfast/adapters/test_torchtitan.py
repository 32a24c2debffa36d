"""torchtitan's own Trainer as a run: what is refused; and killed, in .venv/titan, it ends on the same bytes."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.adapters.torchtitan_config import be_patient_in, check_config, divide_steps
from holdfast.config import Compute
from holdfast.errors import RecipeError
from holdfast.journal import Commit, Journal
from holdfast.machine.processes import LONGEST_EPOCH_VARIABLE
from holdfast.store import open_store
from holdfast.testing.faults import fault
from holdfast.training.objects import PATIENCE
from tests.conftest import COMMAND_WITHIN_S, IN_SOAK, ROOT
from tests.project.test_private_names import OWNERS

TITAN = ROOT / ".venv" / "titan"
needs_titan = pytest.mark.skipif(not (TITAN / "ready").exists(), reason="torchtitan is not installed: make test-titan")


def in_titan(test: Callable[..., None]) -> Any:
    """Mark a test that starts runs in torchtitan's environment."""
    return needs_titan(pytest.mark.slow(pytest.mark.extras(test)))


# ---- what is refused, without torchtitan


def make_config(**changes: Any) -> SimpleNamespace:
    """Return what the adapter reads of a config of torchtitan's.

    Args:
        changes: parts, each a dict of its values.
    """
    parts: dict[str, dict[str, Any]] = {
        "checkpoint": {"enable": False, "create_seed_checkpoint": False},
        "parallelism": {
            "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "tensor_parallel_degree": 1,
            "pipeline_parallel_degree": 1, "context_parallel_degree": 1, "expert_parallel_degree": 1,
        },
        "dataloader": {"num_workers": 0},
        "comm": {"mode": "default"},
        "training": {"enable_cpu_offload": False},
    }  # fmt: skip
    every = {name: SimpleNamespace(**(parts.get(name, {}) | changes.get(name, {}))) for name in {**parts, **changes}}
    return SimpleNamespace(**every)


REFUSED = [
    ("checkpoint", "enable", True, "a run with checkpoint.enable in torchtitan's config can't be resumed exactly"),
    (
        "checkpoint",
        "create_seed_checkpoint",
        True,
        "a run with checkpoint.create_seed_checkpoint in torchtitan's config can't be resumed exactly",
    ),
    (
        "parallelism",
        "pipeline_parallel_degree",
        2,
        "a run with parallelism.pipeline_parallel_degree = 2 in torchtitan's config can't be resumed exactly",
    ),
    (
        "parallelism",
        "context_parallel_degree",
        2,
        "a run with parallelism.context_parallel_degree = 2 in torchtitan's config can't be resumed exactly",
    ),
    (
        "parallelism",
        "expert_parallel_degree",
        2,
        "a run with parallelism.expert_parallel_degree = 2 in torchtitan's config can't be resumed exactly",
    ),
    (
        "dataloader",
        "num_workers",
        2,
        "a run with dataloader.num_workers = 2 in torchtitan's config can't be resumed exactly",
    ),
    (
        "comm",
        "mode",
        "fake_backend",
        "a run with comm.mode = 'fake_backend' in torchtitan's config can't be resumed exactly",
    ),
    (
        "training",
        "enable_cpu_offload",
        True,
        "a run with training.enable_cpu_offload in torchtitan's config can't be resumed exactly",
    ),
    (
        "parallelism",
        "tensor_parallel_degree",
        4,
        "parallelism is replicate x shard x tensor = 1 x -1 x 4, but the run has 2 ranks",
    ),
    (
        "parallelism",
        "data_parallel_shard_degree",
        1,
        "parallelism is replicate x shard x tensor = 1 x 1 x 1, but the run has 2 ranks",
    ),
]


@pytest.mark.parametrize(("part", "name", "value", "said"), REFUSED)
def test_what_cannot_be_resumed_exactly_is_refused(part: str, name: str, value: Any, said: str) -> None:
    check_config(Compute(), 2, make_config())
    with pytest.raises(RecipeError, match=f"^{re.escape(said)}$") as caught:
        check_config(Compute(), 2, make_config(**{part: {name: value}}))
    assert caught.value.hint


def test_torchft_is_refused() -> None:
    said = r"^a run with fault_tolerance \(torchft\) in torchtitan's config can't be resumed exactly$"
    with pytest.raises(RecipeError, match=said):
        check_config(Compute(), 2, make_config(fault_tolerance={}))


@dataclasses.dataclass(kw_only=True, slots=True)
class Comm:
    """The settings of collectives in torchtitan's config."""

    train_timeout_seconds: int
    mode: str


def test_torchtitan_does_not_shorten_the_timeout_of_collectives() -> None:
    given = SimpleNamespace(comm=Comm(train_timeout_seconds=100, mode="default"), training="its own")
    patient = be_patient_in(given)
    assert patient.comm == Comm(train_timeout_seconds=int(PATIENCE.total_seconds()), mode="default")
    assert (patient.training, given.comm.train_timeout_seconds) == ("its own", 100)


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (Compute(mixed_precision="bf16"), "compute.mixed_precision = 'bf16'"),
        (Compute(virtual_ranks=4), "compute.virtual_ranks = 4"),
        (Compute(parallel="fsdp", ranks=2), "compute.parallel = 'fsdp'"),
    ],
)
def test_what_torchtitan_decides_is_refused_in_the_configuration(compute: Compute, said: str) -> None:
    with pytest.raises(RecipeError, match=f"^{said} has no effect, because torchtitan's own config decides this$"):
        check_config(compute, 2, make_config())


def test_the_length_is_torchtitans_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert divide_steps(2, 8) == 4
    with pytest.raises(
        RecipeError,
        match=r"training.steps = 8 in torchtitan's config isn't a multiple of the configuration's epochs = 3",
    ):
        divide_steps(3, 8)
    monkeypatch.setenv(LONGEST_EPOCH_VARIABLE, "5")
    assert divide_steps(3, 8) == 8


def test_without_torchtitan_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "holdfast.adapters.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"needs torchtitan 0\.3: .*; pip install 'holdfast-train\[torchtitan\]'"):
        import holdfast.adapters.torchtitan  # noqa: F401


# ---- in .venv/titan


def call(*command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command with torchtitan's Python."""
    return subprocess.run(
        [TITAN / "bin" / "python", *command], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN_S,
    )  # fmt: skip


def ask(expression: str) -> Any:
    """Return the value of an expression about ``tests.support.titan``, as JSON has it."""
    program = f"import json; from tests.support import titan; print(json.dumps({expression}))"
    done = call("-W", "ignore", "-c", program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write_config(folder: Path, ranks: int, *lines: str, program: str = "train") -> str:
    folder.mkdir(exist_ok=True)
    own = [
        f'recipe = "tests.support.titan:{program}"', 'run = "r"', f"store = {json.dumps(str(folder))}", "epochs = 2",
        f"settings.folder = {json.dumps(str(folder / 'out'))}", f"compute.ranks = {ranks}", 'compute.device = "cpu"',
        f"log.folder = {json.dumps(str(folder))}", "chunk.steps = 3",
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join([*own, *lines]))
    return str(folder / "config.toml")


def prove(config: str) -> "subprocess.CompletedProcess[str]":
    return call("-m", "holdfast.cli", "prove", config, "--steps", "8", "--kills", "2", "--seed", "3")


def train(config: str, *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return call("-m", "holdfast.cli", "train", config, *options, **variables)


def find_newest(folder: Path) -> Commit:
    newest = Journal(open_store(str(folder)), "r").newest()
    assert newest is not None
    return newest


def read_losses(folder: Path) -> dict[int, float]:
    """Return the losses that a run has recorded, by step."""
    journal = Journal(open_store(str(folder)), "r")
    trails = [journal.store.read(f"metrics/{number:08d}.jsonl") for number in journal.numbers("commits")]
    return {line["step"]: line["loss"] for trail in trails for line in map(json.loads, trail.splitlines())}


@in_titan
@pytest.mark.parametrize(
    ("ranks", "data", "parallelism", "layout"),
    [
        pytest.param(1, "interleaved", "{}", "", id="one rank", marks=IN_SOAK),
        pytest.param(2, "stream", "{}", "(Shard(dim=0),)", id="FSDP2"),
        pytest.param(2, "lines", "{data_parallel_replicate_degree = 2}", "Replicate()", id="replicas", marks=IN_SOAK),
        pytest.param(2, "lines", "{tensor_parallel_degree = 2}", "Shard(dim=1)", id="tensor"),
    ],
)
def test_a_run_killed_twice_is_proved(tmp_path: Path, ranks: int, data: str, parallelism: str, layout: str) -> None:
    changes = f"settings.changes = {{parallelism = {parallelism}}}"
    settings = [changes, f"settings.data = {json.dumps(data)}", f"settings.layout = {json.dumps(layout)}"]
    done = prove(write_config(tmp_path, ranks, *settings))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on the same bytes" in done.stdout


REHEARSED = ('proof.rehearse = "on"', "settings.changes = {debug = {seed = 3}}")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the store of a run of two ranks that nothing interrupts, and that is rehearsed."""
    folder = tmp_path_factory.mktemp("straight")
    done = train(write_config(folder, 2, *REHEARSED))
    assert done.returncode == 0, done.stderr
    verified = call("-m", "holdfast.cli", "verify", str(folder / "r"))
    assert "resume: continues exactly: rehearsed from step" in verified.stdout
    return folder


@in_titan
def test_a_run_that_is_killed_twice_ends_on_the_same_checkpoint(straight: Path, tmp_path: Path) -> None:
    """A different number of data-parallel ranks is refused meanwhile, before a step."""
    config = write_config(tmp_path, 2, *REHEARSED)
    for number, point in enumerate(("commit-recorded", "chunk-reported")):
        struck = tmp_path / f"struck {number}"
        killed = train(config, **fault(point, 1, "both", struck))
        assert (killed.returncode, struck.exists()) == (-signal.SIGKILL, True)
    refused = train(config, "--set", "compute.ranks=1")
    assert refused.returncode == 1
    assert "parallelism.data_parallel_shard_degree = 1, but the run was trained with 2: each" in refused.stderr
    assert "and compute.ranks as before" in refused.stderr
    done = train(config)
    assert done.returncode == 0, done.stderr
    assert find_newest(tmp_path).checkpoint_sha256 == find_newest(straight).checkpoint_sha256


@in_titan
def test_two_ranks_train_as_with_torchtitan_alone(straight: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = call(*torchrun, "-m", "tests.support.titan", str(tmp_path))
    assert done.returncode == 0, done.stderr
    alone = {int(step): float(loss) for step, loss in re.findall(r"^loss (\d+) (\S+)$", done.stdout, re.M)}
    assert read_losses(straight) == alone


@in_titan
def test_what_a_trainer_forgets_is_named(tmp_path: Path) -> None:
    done = prove(write_config(tmp_path, 1, program="forget"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(r"no checkpoint has \S+/titan.py:\d+: trainer.warmth \(int, reached by framework\)", done.stdout)


@in_titan
def test_a_stream_with_a_shuffle_buffer_is_refused(tmp_path: Path) -> None:
    done = train(write_config(tmp_path, 1, 'settings.data = "shuffled"'))
    assert done.returncode == 1
    assert (
        "a HuggingFaceTextDataset, can't be resumed exactly: the stream's state leaves out the shuffle buffer"
    ) in done.stderr


@in_titan
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("data", ["lines", "stream", "interleaved"])
def test_a_loader_continues_at_every_position(data: str, ranks: int) -> None:
    assert ask(f"titan.compare_positions({data!r}, {ranks})") == 390


@in_titan
def test_torchtitans_own_config_has_what_is_refused() -> None:
    cases = [each[:3] for each in REFUSED]
    assert ask(f"[titan.refuse(*each) for each in {cases}]") == [each[3] for each in REFUSED]


@in_titan
def test_the_private_names_exist() -> None:
    (names,) = [owner.names.split() for owner in OWNERS if owner.library == "torchtitan"]
    assert ask(f"titan.list_missing({[*names, '_no_such_name']})") == ["_no_such_name"]
