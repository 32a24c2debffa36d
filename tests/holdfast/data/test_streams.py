"""The data streams of other libraries: each resumes exactly, or is refused with the reason."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.config import Compute, Determinism, Log, RunConfig
from holdfast.data import refuse_inexact, take_apart
from holdfast.data.streams import describe_flaw
from holdfast.errors import RecipeError
from holdfast.proof.result import Proof
from tests.support.lives import Lives
from tests.support.streams import PER_EPOCH, hf_stream
from tests.support.trainings import live, live_in_chunks

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

EPOCHS = 2
TOTAL = EPOCHS * PER_EPOCH
# Each program of tests.support.streams with each stream that resumes exactly.
EXACT = [
    ("recipe", "node"),
    ("recipe", "node_of_a_stream"),
    ("recipe", "node_of_a_random_sampler"),
    ("recipe", "hf_map"),
    ("recipe", "hf_map_as_torch"),
    ("recipe", "hf_map_transformed"),
    ("recipe", "hf_stream"),
    ("recipe", "hf_stream_shuffled"),
    ("recipe", "web"),
    ("recipe", "web_shuffled"),
    ("batches", "node_of_batches"),
    ("batches", "hf_stream_of_batches_as_torch"),
    ("loop", "node_of_batches"),
    ("loop", "stateful_loader"),
    ("loop", "hf_map_in_a_loader"),
    ("loop", "hf_stream_of_batches"),
    ("loop", "hf_stream_in_a_stateful_loader"),
    ("loop_over_samples", "hf_map_transformed"),
    ("loop_over_samples", "hf_stream_shuffled"),
    ("loop_over_samples", "web_shuffled"),
    ("loop_beside", "stateful_loader"),
]
# Those that are killed, too: one for each way of finding the position.
KILLED = [
    ("recipe", "node"),
    ("recipe", "hf_stream"),
    ("recipe", "hf_stream_shuffled"),
    ("recipe", "web_shuffled"),
    ("batches", "node_of_batches"),
    ("loop", "stateful_loader"),
    ("loop", "hf_map_in_a_loader"),
    ("loop", "hf_stream_of_batches"),
    ("loop_beside", "stateful_loader"),
]
# The others, with the reason and a part of the hint.
REFUSED = [
    (
        "loop",
        "hf_stream_in_a_loader",
        "a resume can't restore the position of a DataLoader over a stream",
        "run.batches",
    ),
    (
        "loop",
        "hf_stream_shuffled",
        "can't restore the exact position .*: the stream's state leaves out the shuffle buffer",
        "run.batches",
    ),
    (
        "loop",
        "hf_shuffled_stream_in_a_stateful_loader",
        "the stream's state leaves out the shuffle buffer",
        "run.batches",
    ),
    ("loop", "node_of_a_random_sampler", "its RandomSampler draws a different order after a resume", "run.batches"),
    (
        "loop",
        "stateful_loader_with_workers",
        "the loader's worker processes draw different random numbers",
        "loader_workers",
    ),
    ("loop", "web_loader", "a resume can't restore the position of a WebLoader", "run.batches"),
    (
        "batches",
        "web_loader",
        "a resume can't restore the position of a WebLoader",
        r"Recipe\(data=dataset, batch_size=",
    ),
    (
        "loop_beside",
        "node_of_batches",
        r"run.keep\(other=...\): .* exact position of the Loader: the loader.s position is known only after",
        "num_workers=0",
    ),
    (
        "loop_beside",
        "hf_stream_of_batches",
        "the exact position of the IterableDataset: the loader's position is known only after a batch is read",
        "num_workers=0",
    ),
    (
        "loop_beside",
        "hf_stream_in_a_stateful_loader",
        "the loader's position is known only after a batch is read",
        "num_workers=0",
    ),
    ("loop_beside", "node_of_a_random_sampler", "its RandomSampler draws a different order", "num_workers=0"),
    (
        "loop_beside",
        "stateful_loader_with_workers",
        "the loader's worker processes draw different random numbers",
        "num_workers=0",
    ),
    (
        "loop_beside",
        "map_in_a_loader",
        "a resume can't restore the exact position of the DataLoader: it has no state_dict",
        "StatefulDataLoader",
    ),
    (
        "loop_beside",
        "batches_of_a_loader",
        "can't restore the exact position .*: it has no state_dict",
        "StatefulDataLoader",
    ),
    ("loop_beside", "hf_stream_shuffled", "the stream's state leaves out the shuffle buffer", "num_workers=0"),
]
CHANGING = ["hf_stream_shuffled_without_a_seed", "web_shuffled_without_a_seed"]


LIBRARIES = {"hf": "datasets", "web": "webdataset"}


def parametrize(names: str, cases: list[Any]) -> pytest.MarkDecorator:
    """Return a mark that runs a test with each case, which needs the library of the stream that the case names."""
    at = names.split(", ").index("stream")
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        library = LIBRARIES.get(values[at].partition("_")[0])
        marked.append(pytest.param(*values, marks=[pytest.mark.extras(library)] if library else []))
    return pytest.mark.parametrize(names, marked)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep a library's caches out of the home folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    yield
    gc.collect()  # WebDataset leaves the shards of an abandoned pass open; see pytestmark


def make_config(folder: Path, program: str, stream: str, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {"stream": stream, "folder": str(folder / "shards")}
    if program == "batches":
        settings["gives_batches"] = True
    values: dict[str, Any] = {
        "recipe": f"tests.support.streams:{'recipe' if program == 'batches' else program}", "run": "r",
        "store": str(folder), "epochs": EPOCHS, "settings": settings, "determinism": Determinism(mode="fast"),
    }  # fmt: skip
    return RunConfig.model_validate(values | changes)


@parametrize("program, stream", EXACT)
def test_cut_at_every_step_it_ends_on_the_same_bytes(tmp_path: Path, program: str, stream: str) -> None:
    config = make_config(tmp_path, program, stream)
    straight = live_in_chunks(config, TOTAL, TOTAL)
    assert live_in_chunks(config, TOTAL, 1) == straight


@pytest.mark.slow
@parametrize("program, stream", KILLED)
def test_killed_it_is_proved(tmp_path: Path, nursery: Lives, program: str, stream: str) -> None:
    proof = prove(nursery, make_config(tmp_path, program, stream))
    assert proof.is_proved, str(proof)


def prove(nursery: Lives, config: RunConfig) -> Proof:
    config = config.model_copy(update={"log": Log(every=1, folder=f"{config.store}/logs")})
    done = nursery.call("tests.support.forked:prove_mutated", "", config.model_dump(mode="json"), 9, 1, 5)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return Proof.model_validate_json(done.stdout.splitlines()[-1])


@parametrize("program, stream, reason, hint", REFUSED)
def test_others_are_refused_with_the_reason(tmp_path: Path, program: str, stream: str, reason: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=reason) as refused:
        live(make_config(tmp_path, program, stream), 1)
    assert re.search(hint, refused.value.hint), refused.value.hint


@parametrize("stream", CHANGING)
def test_a_stream_that_nobody_seeds_is_refused_on_resume(tmp_path: Path, stream: str) -> None:
    config = make_config(tmp_path, "recipe", stream)
    saved, _ = live(config, 4)
    with pytest.raises(RecipeError, match="yields different samples when it is read a second time") as refused:
        live(config, TOTAL, saved)
    assert "seed the stream's shuffles" in refused.value.hint


@pytest.mark.slow
@parametrize("stream", ["hf_batches_that_drew"])
def test_a_proof_finds_numbers_that_a_stream_draws_again(tmp_path: Path, nursery: Lives, stream: str) -> None:
    proof = prove(nursery, make_config(tmp_path, "loop", stream))
    assert not proof.is_proved
    assert "samples" in proof.first_differs_in


@pytest.mark.slow
@parametrize("stream", ["node_of_batches"])
def test_ranks_that_all_get_the_same_batches_are_refused(tmp_path: Path, nursery: Lives, stream: str) -> None:
    log, compute = Log(every=1, folder=str(tmp_path / "logs")), Compute(ranks=2, device="cpu")
    config = make_config(tmp_path, "loop", stream, log=log, compute=compute)
    done = nursery.call("tests.support.forked:train_chunks", config.model_dump(mode="json"), 1)
    assert "all ranks get the same batches from a stream that is not divided over the ranks" in done.stdout


def test_a_loader_over_an_array_has_a_known_position() -> None:
    loader = StatefulDataLoader(np.arange(6), 2)  # type: ignore[arg-type]
    assert take_apart(loader, "") is loader


def test_an_iterator_that_was_made_before_the_loop_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, "loop_beside", "stateful_loader")
    early = config.model_copy(update={"settings": config.settings | {"is_early": True}})
    said = (
        r"run.keep\(other=...\): a resume can't restore the exact position of the StatefulDataLoader: "
        "the loader's iterator was made before the loop"
    )
    with pytest.raises(RecipeError, match=said) as refused:
        live(early, TOTAL)
    assert "inside the loop" in refused.value.hint


@pytest.mark.parametrize("name", ["_iterator", "_initial_iter_for_state_dict"])
def test_a_torchdata_that_does_not_tell_of_its_iterator_is_refused(name: str) -> None:
    loader = StatefulDataLoader(np.arange(6), 2)  # type: ignore[arg-type]
    refuse_inexact("run.keep(other=...)", loader)
    delattr(loader, name)
    with pytest.raises(RecipeError, match=rf"torchdata \d\S+: its StatefulDataLoader has no .*{name}"):
        refuse_inexact("run.keep(other=...)", loader)


@pytest.mark.extras("datasets")
def test_a_datasets_that_hides_the_parts_of_a_stream_is_refused(tmp_path: Path) -> None:
    stream = hf_stream(tmp_path)
    assert not describe_flaw(stream)
    del stream._ex_iterable
    with pytest.raises(RecipeError, match=r"datasets \d\S+: its IterableDataset has no _ex_iterable"):
        describe_flaw(stream)


def test_an_extra_of_a_recipe_is_refused_likewise(tmp_path: Path) -> None:
    config = make_config(tmp_path, "recipe", "node")
    beside = config.model_copy(update={"settings": config.settings | {"beside": "stateful_loader_with_workers"}})
    with pytest.raises(
        RecipeError,
        match=r"Recipe\(extras={'other': ...}\): a resume can't restore the exact position of the StatefulDataLoader",
    ):
        live(beside, TOTAL)
