"""The table of RESUME.md: ways to forget or to change state, and what stops each.

The programs are the functions of ``forgotten/``; a function's docstring is its row's first column. ``python -m
tests.programs.ways`` prints the table, and a test compares it with RESUME.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.rehearsed import list_functions

FORGOTTEN = Path(__file__).parent / "forgotten"
# The first step in which a program's state acts, and the settings of its run.
EARLY, LATE = 3, 20
# What stops most: the first rehearsal after the state acts. A count begins anew in new processes, and so acts later.
STOPPED = ("rehearsal, step 8", "rehearsal, step 24", "rehearsal, step 24")
COUNTED = ("rehearsal, step 8", "rehearsal, step 24", "rehearsal, step 32")
# The gate of a rehearsal finds what the loss of a recipe depends on, before new ranks train a step.
GATE = ("gate, step 8", "gate, step 24", "gate, step 24")
GATE_COUNTED = ("gate, step 8", "gate, step 24", "gate, step 32")
# A count in the loss also counts the probes of saves, so that it acts sooner.
PROBED = ("gate, step 8", "rehearsal, step 16", "gate, step 24")
# A file isn't taken back: the steps that were rehearsed count twice.
OUTSIDE = ("rehearsal, step 8", "rehearsal, step 16", "rehearsal, step 16")
SAME = ("the same bytes",) * 3
REFUSED = ("refused",) * 3

# The programs whose outcomes aren't STOPPED.
GROUPS = {
    COUNTED: """
        closures: after_step nonlocal_number generator_function counting_iterator list_iterator context_variable
        module_level: class_attribute singleton shared_attributes
        modules: buffer_that_is_not_persistent_in_a_loop private_number tensor_of_a_module hook_that_counts
        objects: dataclass_object bare_object slots weak_dictionary thread thread_local text
        optimizers: private_number_of_an_optimizer number_of_a_recipes_optimizer step_hook rate_lowered_by_patience
        optimizers: accumulated_steps loss_scale scheduler
    """,
    GATE: """
        closures: composed_closures
        module_level: replaced_library_function global_numpy_generator
        modules: forward_hook average_in_a_dict dropout_rate
        optimizers: running_loss
        data: numpy_generator_in_collate python_generator_in_the_data curriculum_of_a_recipe
        surroundings: entropy_of_the_system measured_time
    """,
    GATE_COUNTED: """
        module_level: another_modules_global
        modules: buffer_that_is_not_persistent public_number
        objects: property_of_a_private_number raw_bytes phase
    """,
    PROBED: """
        closures: mutable_default bound_argument decorator callable_object
        module_level: global_number class_attribute_of_a_loss
        objects: namespace
    """,
    OUTSIDE: "surroundings: file_on_disk memory_map",
    SAME: """
        modules: public_number_in_a_loop temperature
        optimizers: public_number_of_an_optimizer state_that_is_added
        data: sampler_of_hard_samples
        encodings: strides_of_moments array_without_dimensions array_in_fortrans_order view_of_the_data
        encodings: constant_that_comes_back memory_map_that_is_kept group_that_is_added
        encodings: number_and_tensor_beside_it shared_views expanded_buffer
    """,
    REFUSED: """
        modules: layer_that_is_added modules_in_a_list
        surroundings: default_dtype denormal_numbers deterministic_algorithms
        encodings: masked_array
    """,
    ("the same bytes", "rehearsal, step 16", "rehearsal, step 24"): "modules: frozen_by_a_count",
    ("gate, step 8", "rehearsal, step 16", "rehearsal, step 24"): "data: growing_mixup",
    ("gate, step 8", "rehearsal, step 24", "rehearsal, step 24"): "data: bandit",
    ("gate, step 8", "rehearsal, step 8", "rehearsal, step 16"): "optimizers: optimizer_of_a_second_head",
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
    """Return the table of RESUME.md."""
    lines = [
        "| what the program does | result if its state acts from step 3 | result if its state acts from step 20 | "
        "result if its state acts from step 20 and the run is killed at step 8 |",
        "|---|---|---|---|",
    ]
    lines += [f"| {way.does} ({way.kind}) | {way.early} | {way.late} | {way.unseen} |" for way in list_ways()]
    return "\n".join(lines)


WAYS = list(list_ways())

if __name__ == "__main__":
    print(make_table())
