"""The table docs/data/forgotten.csv: ways to forget or to change state, and what stops each.

The programs are the functions of ``forgotten/``; a function's docstring is its row's first column. ``python -m
tests.programs.ways`` prints the table, and a test compares it with the file.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.rehearsed import list_functions

FORGOTTEN = Path(__file__).parent / "forgotten"
# The first step in which a program's state acts, and the settings of its run.
EARLY, LATE = 3, 20
# What stops most: the first rehearsal that trains a step in which the state acts.
STOPPED = ("rehearsal, step 8", "rehearsal, step 24", "rehearsal, step 24")
# What is changed at a step that a rehearsal trains changes in both processes; a later rehearsal starts after it.
ONCE = ("rehearsal, step 8", "rehearsal, step 32", "rehearsal, step 32")
# The gate of a rehearsal finds what the loss of a recipe depends on, before new ranks train a step.
GATE = ("gate, step 8", "rehearsal, step 24", "rehearsal, step 24")
GATE_ONCE = ("gate, step 8", "gate, step 32", "gate, step 32")
# A count in the loss also counts the probes of saves, so that it acts sooner.
PROBED = ("gate, step 8", "gate, step 24", "rehearsal, step 24")
# A file isn't taken back: the steps that were rehearsed count twice.
OUTSIDE = ("rehearsal, step 8",) * 3
SAME = ("the same bytes",) * 3
REFUSED = ("refused",) * 3

# The programs whose outcomes aren't STOPPED.
GROUPS = {
    ONCE: """
        closures: cached_function
        data: curriculum priorities strength_of_a_transform pseudo_labels curriculum_of_batches
        module_level: replaced_function
        modules: cached_norm teacher_that_follows_rarely gradient_hook
        objects: queue_object tensors_of_a_tuple
        surroundings: number_in_settings hooks_on_saved_tensors environment_variable autocast_entered
    """,
    GATE: """
        data: numpy_generator_in_collate python_generator_in_the_data
        module_level: another_modules_global global_numpy_generator
        modules: public_number average_in_a_dict buffer_that_is_not_persistent
        objects: property_of_a_private_number raw_bytes phase
        optimizers: running_loss
        surroundings: entropy_of_the_system measured_time
    """,
    GATE_ONCE: """
        closures: composed_closures
        data: curriculum_of_a_recipe
        module_level: replaced_library_function
        modules: forward_hook dropout_rate
    """,
    PROBED: """
        closures: bound_argument decorator callable_object mutable_default
        data: growing_mixup
        module_level: global_number class_attribute_of_a_loss
        objects: namespace
    """,
    OUTSIDE: "surroundings: file_on_disk memory_map",
    SAME: """
        data: sampler_of_hard_samples
        encodings: constant_that_comes_back expanded_buffer strides_of_moments array_in_fortrans_order
        encodings: memory_map_that_is_kept number_and_tensor_beside_it array_without_dimensions view_of_the_data
        encodings: group_that_is_added shared_views
        modules: public_number_in_a_loop temperature
        optimizers: public_number_of_an_optimizer state_that_is_added
    """,
    REFUSED: """
        encodings: masked_array
        modules: modules_in_a_list layer_that_is_added
        surroundings: denormal_numbers deterministic_algorithms default_dtype
    """,
    ("gate, step 8", "rehearsal, step 8", "rehearsal, step 8"): "optimizers: optimizer_of_a_second_head",
    ("the same bytes", "rehearsal, step 24", "rehearsal, step 24"): "modules: frozen_by_a_count",
}
OUTCOMES = {
    f"{module.strip()}:{name}": outcome
    for outcome, text in GROUPS.items()
    for module, _, names in (line.partition(":") for line in text.strip().splitlines())
    for name in names.split()
}


@dataclass(frozen=True)
class Way:
    """A way to forget or to change state.

    Args:
        program: ``module:function`` below ``forgotten/``.
        kind: ``recipe`` or ``loop``.
        does: the program's docstring.
        early: what stops it if its state acts from step 3 on, rehearsed at each commit of eight steps; or that it ends
            on the bytes of a straight run, though it is killed.
        late: the same, if its state acts from step 20 on.
        unseen: the same, if it is killed at step 8, before its state acts and before anything was rehearsed.
    """

    program: str
    kind: str
    does: str
    early: str
    late: str
    unseen: str


def list_ways() -> Iterator[Way]:
    """Yield all rows, by module."""
    for file in sorted(FORGOTTEN.glob("*.py")):
        for name, kind, does in list_functions(file):
            program = f"{file.stem}:{name}"
            yield Way(program, kind, does.rstrip("."), *OUTCOMES.get(program, STOPPED))


def make_table() -> str:
    """Return the table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("what the program does", "kind", "acts from step 3", "acts from step 20", "killed at step 8 before")
    )
    writer.writerows((way.does, way.kind, way.early, way.late, way.unseen) for way in list_ways())
    return text.getvalue()


WAYS = list(list_ways())

if __name__ == "__main__":
    print(make_table(), end="")
