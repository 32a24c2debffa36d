"""Streams of other libraries: whether their saved state restores their exact position, and how a pass begins."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from torch.utils.data import DataLoader, Sampler

from holdfast.data.stateful import is_begun, walk_nodes
from holdfast.errors import RecipeError
from holdfast.state import has_methods

# The class with which Hugging Face's streams shuffle. It has a buffer, which its state lacks. Source: the comment in
# its load_state_dict: "The shuffle buffer will be refilled before starting to yield new examples."
BUFFER = "BufferShuffledExamplesIterable"
# The attribute of a Hugging Face stream that holds its outermost iterable.
EXAMPLES = "_ex_iterable"
# A stream is a chain of parts: each part reads from another part. This key in a part's state has the state of the part
# from which this part reads.
SOURCE = "examples_iterable"


def has_exact_state(data: Any) -> bool:
    """Return whether a stream has a state from which it resumes at its exact position."""
    return has_methods(data) and not describe_flaw(data)


def read_position(data: Any) -> Any:
    """Return a stream's state in a form that doesn't depend on whether the stream was resumed before.

    A Hugging Face stream that groups samples resumes from its ``previous_state``, and ignores the state of its source.
    So ``previous_state`` replaces the source's state here: the source's state shows how far the source was read, which
    depends on the steps at which the run was resumed before.
    """
    return _without_effect(data.state_dict())


def _without_effect(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    state = {key: _without_effect(value) for key, value in state.items()}
    previous = state.get("previous_state")
    return state if previous is None or SOURCE not in state else state | {SOURCE: previous}


def describe_flaw(data: Any) -> str:
    """Return the reason why a stream or a loader of a stream can't resume exactly; empty if none is known."""
    for each in _list_parts(data):
        if has_methods(each) and getattr(each, "num_workers", None):
            return "the loader's worker processes draw different random numbers after a resume"
        if any(type(part).__name__ == BUFFER for part in _walk_examples(_examples_of(each))):
            return "the stream's state leaves out the shuffle buffer"
        samplers = [sampler for node in walk_nodes(each) for sampler in vars(node).values() if _is_random(sampler)]
        if samplers:
            return f"its {type(samplers[0]).__name__} draws a different order after a resume"
    return ""


def refuse_inexact(keeping: str, value: Any) -> None:
    """Raise RecipeError if the position of a loader or a stream that a loop keeps can't be restored exactly.

    Args:
        keeping: the user's code that keeps the value, for the message.
    """
    flaw = describe_flaw(value) if has_methods(value) else ""
    if isinstance(value, DataLoader | Iterator) and not has_methods(value):
        flaw = "it has no state_dict"
    hint = "keep torchdata's StatefulDataLoader with num_workers=0, over a map-style dataset"
    if not flaw and any([*walk_nodes(each)] or _examples_of(each) is not None for each in _list_parts(value)):
        # before a batch is read, the gate couldn't compare the restored position with the saved one
        flaw = "the loader's position is known only after a batch is read"
    if is_begun(value):
        flaw, hint = (
            "the loader's iterator was made before the loop",
            ("call iter(...) inside the loop, in its first step"),
        )
    if flaw:
        raise RecipeError(
            f"{keeping}: a resume can't restore the exact position of the {type(value).__qualname__}: {flaw}", hint=hint
        )


def _list_parts(data: Any) -> list[Any]:
    """Return the given loader or stream, and the datasets inside it."""
    parts = [data]
    for each in parts:
        inner = getattr(each, "dataset", None)
        # Compare by identity, because == of two arrays is an array.
        if inner is not None and all(inner is not part for part in parts):
            parts.append(inner)
    return parts


def _examples_of(data: Any) -> Any:
    """Return the outermost iterable of a Hugging Face stream; None for any other data.

    Raises:
        RecipeError: this version of the library datasets keeps the iterable under another name.
    """
    found = getattr(data, EXAMPLES, None)
    if found is None and type(data).__module__.partition(".")[0] == "datasets" and has_methods(data):
        raise RecipeError(
            f"datasets {version('datasets')}: its {type(data).__name__} has no {EXAMPLES}, so Holdfast can't tell "
            f"whether its state leaves out a shuffle buffer",
            hint="install a version of datasets that Holdfast is tested with, such as 5.2",
        )
    return found


def _walk_examples(examples: Any) -> Iterator[Any]:
    """Yield the parts of a Hugging Face stream, each of which reads from another part."""
    if examples is not None:
        yield examples
        for inner in [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", [])]:
            yield from _walk_examples(inner)


def _is_random(sampler: Any) -> bool:
    """Return whether a sampler's order depends on a generator and not on the number of the pass."""
    return isinstance(sampler, Sampler) and hasattr(sampler, "generator") and not hasattr(sampler, "set_epoch")


def begin_pass(data: Any, number: int) -> None:
    """Pass the number of the beginning pass to a stream, or to the dataset inside a loader.

    Streams seed the shuffle of a pass with this number. A Hugging Face stream also needs a new number to start at its
    beginning: while the number stays the same, the stream continues from the state that it has loaded.
    """
    for each in _list_parts(data):
        if hasattr(each, "set_epoch"):
            each.set_epoch(number)
