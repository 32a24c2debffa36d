"""The promises of README.md and RESUME.md, and the tests of real processes that show each: `make test` runs them.

`tests/conftest.py` gives these tests the marker `promise`. A test without its parameters stands for all of them.
"""

PROMISES = {
    "a run whose command, training process or both are killed ends with the same bytes": (
        "flows/test_killed_anywhere.py::test_a_run_survives_kills_at_random_moments[0-self]",
        "flows/test_killed_anywhere.py::test_a_run_survives_kills_at_random_moments[0-rank]",
        "flows/test_killed_anywhere.py::test_a_flow_survives_kills_at_random_moments",
        "flows/test_killed_anywhere.py::test_orphans_save_themselves_and_are_adopted",
        "flows/test_killed_anywhere.py::test_killed_rank_is_replaced_within_the_attempt",
    ),
    "so does the language model of `make train`": (
        "holdfast/recipes/test_killed.py::test_killed_five_times_at_random_it_ends_on_the_same_bytes[language]",
    ),
    "told to end, a run finishes its step, saves, commits and ends": (
        "flows/test_killed_anywhere.py::test_a_stopped_run_saves_its_current_step[15-143]",
        "flows/test_interrupted.py::test_ctrl_c_saves_and_ends_soon",
    ),
    "a notice of a spot instance's end leads to a save in time": (
        "holdfast/attempt/test_deadlines.py::test_a_notice_leads_to_a_save_inside_its_window[aws]",
    ),
    "a damaged checkpoint is quarantined, and the run continues from the one before": (
        "flows/test_damage.py::test_a_flow_continues_from_the_checkpoint_before_a_damaged_one",
        "flows/test_damage.py::test_a_run_without_a_verified_checkpoint_never_starts_afresh",
    ),
    "a changed setting or changed code is refused by name": (
        "flows/test_drift.py::test_changed_settings_and_machines_need_to_be_accepted",
        "flows/test_silent_drift.py::test_a_silent_change_is_refused_by_name_and_allowed_by_name"
        "[a helper module's constant]",
    ),
    "a model that isn't the saved one is refused before the first step": (
        "holdfast/attempt/test_gate.py::test_a_run_that_no_checkpoint_can_continue_stops",
    ),
    "an unhealthy checkpoint is left for the one before": (
        "holdfast/attempt/test_attempt.py::test_a_collapse_of_before_is_rolled_back",
    ),
    "of two commands for one run, one line of commits advances": (
        "flows/test_two_writers.py::test_started_twice_at_once_one_trains",
    ),
    "a failure that repeats at the same step stops the run": (
        "flows/test_wrong_use.py::test_failing_recipe_stops_without_looping",
    ),
    "chunks of any length and more epochs give the same bytes": (
        "flows/test_same_bytes.py::test_chunks_of_any_length_give_the_same_bytes[chunk.steps=7]",
        "flows/test_same_bytes.py::test_more_epochs_continue_a_run",
    ),
    "runs lie on object stores, and survive their faults": (
        "flows/test_same_bytes.py::test_a_killed_run_on_an_object_store_continues",
        "flows/test_faulty_store.py::test_a_run_on_a_faulty_store_ends_on_the_bytes_of_a_quiet_one",
    ),
    "the README's own model trains, and further": (
        "project/test_readme.py::test_the_readmes_own_model_in_twenty_lines",
    ),
    "a loop of one's own survives kills": (
        "examples/gallery/test_gallery.py::test_killed_and_stopped_it_ends_on_the_same_bytes[language_model]",
    ),
    "a stream of data continues where it stood": (
        "holdfast/data/test_streams.py::test_killed_it_is_proved[loop-stateful_loader]",
    ),
    "random numbers of a step depend on nothing between two steps": (
        "holdfast/state/test_generators.py::test_threads_that_draw_during_a_step_change_no_byte",
    ),
    "a switch of determinism that a step changes ends the run in that step": (
        "holdfast/machine/test_determinism.py::test_a_loss_that_changes_a_flag_ends_the_run_in_that_step",
    ),
    "bf16, a fused optimizer and a compiled model give the same bytes": (
        "holdfast/proof/test_false_alarms.py::test_a_loop_in_bf16_with_a_fused_optimizer_is_proved",
        "holdfast/proof/test_false_alarms.py::test_a_compiled_model_is_proved",
    ),
    "several ranks survive a kill; shards and virtual ranks on any number of them give the same bytes": (
        "flows/test_same_bytes.py::test_two_ranks_survive_a_kill",
        "holdfast/rank/test_sharded_ranks.py::test_a_resumed_training_ends_on_the_same_bytes[2]",
        "holdfast/rank/test_elastic_ranks.py::test_a_run_goes_on_with_other_numbers_of_ranks",
    ),
    "a rehearsal changes nothing of a run that continues exactly, and stops one that doesn't": (
        "holdfast/attempt/test_rehearsal.py::test_a_run_that_continues_exactly_is_rehearsed_and_ends_on_the_same_bytes",
        "holdfast/attempt/test_rehearsal.py::test_state_that_no_checkpoint_has_stops_the_run_as_soon_as_it_acts",
        "programs/test_killed_in_a_rehearsal.py::test_it_ends_on_the_same_bytes[rehearsal-lived-self-beside-1]",
    ),
    "every death is a proof": (
        "holdfast/attempt/test_rehearsal.py::test_steps_that_dead_ranks_had_trained_are_compared",
    ),
    "`prove` proves a recipe, and names what it forgot": (
        "flows/test_prove.py::test_a_recipe_that_survives_kills_is_proved",
        "flows/test_prove.py::test_a_recipe_with_unregistered_state_is_not_proved",
        "holdfast/proof/test_mutants.py::test_a_mutation_is_caught[overwrite the restored lr]",
    ),
    "`audit` trains chunks again, and finds a forgery": (
        "flows/test_audit.py::test_every_commit_of_a_run_that_was_killed_is_identical",
        "flows/test_audit.py::test_a_forgery_that_verifies_is_found",
    ),
    "an evaluation reads the very checkpoint": (
        "flows/test_evaluate.py::test_an_evaluation_at_an_epochs_end_equals_that_of_training",
    ),
    "reading a run executes nothing that the run says": (
        "flows/test_trust.py::test_no_command_executes_what_a_record_names[in_the_store]",
    ),
    "training sends nothing to anybody": (
        "flows/test_untracked.py::test_training_sends_nothing_and_imports_nothing_of_the_current_folder",
    ),
    "a machine of a work pool that vanishes costs at most one chunk": (
        "flows/test_pool.py::test_a_run_survives_a_death[machine-SIGKILL]",
    ),
}  # fmt: skip


def is_promise(name: str) -> bool:
    """Return whether a test shows one of the promises.

    Args:
        name: its node id, relative to tests/.
    """
    return any(name == shown or name.startswith(f"{shown}[") for tests in PROMISES.values() for shown in tests)
