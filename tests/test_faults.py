"""Faults and bad input that a recording must survive, and where each is tested.

Numbers are those of the fault list. An (S) says that a miss makes the account unsound.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
RECORDER = "recording/test_recorder.py"
COMPARED = "recording/test_compared_norms.py"
BATCHES = "recording/test_steps_and_batches.py"
REFUSALS = "recording/test_refusals.py"
RESUMING = "recording/test_resuming.py"
NORMS = "recording/norms/test_norm_pass.py"
DURABILITY = "recording/test_durability.py"
LOOP = "recording/test_faults.py"
RANKS = "recording/opacus/test_ranks.py"
FILES = "norm_log/test_files.py"
LOG = "norm_log/test_norm_log.py"
CONVERT = "norm_log/test_convert.py"
SETTINGS = "recording/checkpoints/test_run_settings.py"

# number -> what it is, and {file: tests}
FAULTS: dict[int, tuple[str, dict[str, str]]] = {
    1: (
        "NaN norm (S)",
        {
            REFUSALS: "nan_example_stops_with_its_id_before_the_model_is_lost",
            "recording/test_batch_norms.py": "a_nan_in_training_stops_with_the_example",
            RANKS: "ranks_that_do_not_train_one_model_stop_together",
            CONVERT: "bad_norms_are_refused_and_nothing_is_written",
        },
    ),
    2: (
        "infinite norm",
        {
            LOG: "infinite_norm_counts_as_clipped",
        },
    ),
    3: (
        "negative norm, code above the top",
        {
            LOG: "bad_input_is_refused_by_name_and_value",
            FILES: "a_code_above_the_scale_is_refused",
        },
    ),
    4: (
        "narrow sums (S)",
        {
            NORMS: "every_backend_is_autograds_norm_and_never_below_it",
            "recording/norms/test_layer_rules.py": "cancelling_positions_are_never_under_reported",
            CONVERT: "narrow_numbers_are_never_rounded_below_what_they_stood_for",
        },
    ),
    5: (
        "order of the data set changed (S)",
        {
            REFUSALS: "a_data_set_that_changes_its_order_is_found",
            "recording/checkpoints/test_replay.py": "other_data_than_before_is_refused",
        },
    ),
    6: (
        "data set grew or shrank",
        {
            REFUSALS: "a_data_set_that_shrinks_is_found another_data_set_than_the_loaders_is_refused",
        },
    ),
    7: (
        "duplicated ids, one person in several rows (S)",
        {
            REFUSALS: "bad_options_are_refused_before_training",
            LOG: "bad_input_is_refused_by_name_and_value",
            "audit/test_duplicates.py": "people_behind_several_rows_are_found a_statement_is_of_all_rows_of_a_person",
            "recording/clipping/test_filtered.py": "no_unit_of_several_rows_exceeds_the_cap",
        },
    ),
    8: (
        "a rank's part is missing",
        {
            RANKS: "a_rank_that_dies_leaves_a_log_without_its_record",
        },
    ),
    9: (
        "augmentation or dropout in the pass (S)",
        {
            COMPARED: "augmentation_is_found",
            NORMS: "dropout_is_a_caveat",
        },
    ),
    10: (
        "a resumed run goes back, a record repeats",
        {
            RESUMING: "resuming_from_an_earlier_checkpoint_voids_what_came_after "
            "voided_steps_are_told resuming_beyond_the_log_is_refused",
            FILES: "contradictions_are_refused",
        },
    ),
    11: (
        "steps after the last record (S)",
        {
            "accountant/test_claims.py": "estimate",
            "audit/test_pipeline.py": "a_run_that_was_killed_before_the_end",
            "recording/checkpoints/test_replay.py": "training_that_went_on_after_the_last_checkpoint",
        },
    ),
    12: (
        "settings in a file differ from the optimizer's",
        {
            FILES: "a_run_json_that_contradicts_the_optimizer_is_found",
            SETTINGS: "contradictions_and_gaps_are_problems",
            REFUSALS: "an_accountant_that_counts_too_small_a_rate_is_refused",
        },
    ),
    13: (
        "scheduled or adaptive settings",
        {
            RECORDER: "noise_scheduler_settings_are_those_of_each_step",
            REFUSALS: "adaptive_clipping_is_refused_at_its_first_step",
            SETTINGS: "a_clipping_schedule_satisfies_a_clipping_scheduler",
        },
    ),
    14: (
        "impossible noise, rate or delta",
        {
            REFUSALS: "no_noise_is_refused",
            LOG: "bad_input_is_refused_by_name_and_value",
            "accountant/test_account.py": "bad_arguments a_delta_of_one_over_n_is_warned_about",
        },
    ),
    15: (
        "accountant's hook overwritten (S)",
        {
            REFUSALS: "a_replaced_step_hook_is_found_at_the_first_step "
            "an_optimizer_without_the_accountants_hook_is_refused",
            BATCHES: "a_hook_that_chains_opacus_is_fine_and_one_that_replaces_it_is_found",
        },
    ),
    16: (
        "layers that mix examples (S)",
        {
            NORMS: "batch_norm_is_refused_with_opacus_message "
            "a_model_that_mixes_examples_is_refused",
        },
    ),
    17: (
        "batches that are not Poisson (S)",
        {
            RECORDER: "shuffled_batches_are_an_estimate "
            "weighted_sampling_without_poisson_is_an_estimate "
            "a_subclass_of_the_poisson_sampler_may_draw_otherwise "
            "a_poisson_sampler_that_prefers_some_examples_is_found "
            "a_poisson_sampler_that_shuffles_instead_is_found",
            "norm_log/test_session_checks.py": "poisson_sampling_passes_and_shuffling_does_not",
            RANKS: "examples_of_a_rank_that_are_never_drawn_are_found",
        },
    ),
    18: (
        "virtual steps, accumulation",
        {
            RECORDER: "batch_memory_manager_records_logical_steps",
            BATCHES: "a_break_inside_a_logical_batch_is_found several_draws_in_one_step_are_refused",
            LOOP: "accumulated_batches_are_found_where_opacus_lets_them_pass",
            RANKS: "physical_batches_of_all_ranks_are_one_step",
        },
    ),
    19: (
        "scaled gradients (S)",
        {
            LOOP: "gradients_scaled_for_mixed_precision_are_found",
        },
    ),
    20: (
        "parameters frozen or added",
        {
            LOOP: "parameters_frozen_while_training_stop_it",
            NORMS: "parameters_frozen_during_training_are_found",
        },
    ),
    21: (
        "torn last line",
        {
            FILES: "a_torn_last_line_is_dropped_and_said "
            "writing_on_after_a_torn_line_keeps_the_chain",
        },
    ),
    22: (
        "a flipped bit",
        {
            FILES: "a_flipped_bit_never_passes "
            "a_damaged_record_is_named_and_the_others_stay_usable",
        },
    ),
    23: (
        "a file missing (S)",
        {
            FILES: "a_missing_record_is_never_a_zero a_lost_line_breaks_the_chain",
        },
    ),
    24: (
        "full disk, no permission",
        {
            FILES: "a_full_disk_leaves_committed_records_intact",
            DURABILITY: "a_full_disk_stops_training_and_keeps_what_was_logged "
            "training_goes_on_with_a_full_disk_where_that_was_chosen "
            "a_directory_that_cannot_be_written_is_said_before_training",
        },
    ),
    25: (
        "kill -9",
        {
            DURABILITY: "a_kill_at_a_random_moment_loses_nothing_that_was_acknowledged "
            "a_hundred_kills_lose_nothing_that_was_acknowledged a_killed_log_is_continued",
        },
    ),
    26: (
        "two writers",
        {
            FILES: "one_writer_at_a_time",
        },
    ),
    37: (
        "seeds known or shared (S)",
        {
            RECORDER: "a_seeded_run_says_so a_seed_that_can_be_guessed_is_told",
            RANKS: "ranks_that_do_not_train_one_model_stop_together",
            "audit/test_pipeline.py": "a_seeded_run_is_void",
            "experiments/training/test_dp_sgd.py": "a_seeded_run_repeats_and_is_labelled_void",
        },
    ),
    38: (
        "norms of the next step (S)",
        {
            RECORDER: "norms_are_those_each_step_starts_from",
            COMPARED: "parameters_changed_between_steps_are_found",
            RANKS: "norms_of_all_ranks_are_those_of_autograd",
        },
    ),
    39: (
        "empty batches, skipped steps (S)",
        {
            RECORDER: "empty_batches_are_steps a_loop_that_skips_empty_batches_is_an_estimate",
            LOOP: "steps_that_a_scaler_skips_are_found",
            RANKS: "empty_local_batches_that_the_sampler_leaves_out_are_found",
        },
    ),
    40: (
        "selection and preprocessing outside the account",
        {
            "experiments/training/test_dp_sgd.py": "the_record_says_what_was_done_and_what_is_on_trust",
            "audit/test_pipeline.py": "what_was_declared_is_used",
        },
    ),
    41: (
        "numerical differences (S)",
        {
            COMPARED: "lower_precision_in_training_is_found autocast_that_only_training_has_is_found "
            "norms_that_ghost_mode_takes_too_small_are_found",
        },
    ),
    42: (
        "parameters missing from the norm, tied ones (S)",
        {
            LOOP: "parameters_that_the_optimizer_does_not_train_are_refused",
            "recording/norms/test_layerwise.py": "layers",
        },
    ),
    43: (
        "microbatches of several examples",
        {
            NORMS: "microbatches_have_no_individual_gradient",
            COMPARED: "another_reduction_in_training_is_found",
        },
    ),
}


def test_every_fault_of_recording_has_a_test():
    assert sorted(FAULTS) == [*range(1, 27), *range(37, 44)]


@pytest.mark.parametrize("number", FAULTS)
def test_the_tests_of_a_fault_exist(number):
    for file, names in FAULTS[number][1].items():
        tree = ast.parse((TESTS / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing = {f"test_{name}" for name in names.split()} - defined
        assert not missing, f"{file} lacks {missing}"
