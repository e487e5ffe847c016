"""The tests that `make longer` has and `make test` has not, because others of each commit assert the same of another
family, layout or algorithm. `make faults` looks at the tests of each commit alone: what it plants is noticed there.
"""

from collections.abc import Sequence

ALL: tuple[str, ...] = ()

LONGER: dict[str, Sequence[str]] = {
    # Layouts against one process: `make parity` has the whole matrix.
    "distributed/parallel/test_parity.py::test_families_of_every_kind_equal_one_process_on_other_layouts": (
        *("deepseek_v3-{'cp'", "qwen3_next", "cohere-"),
    ),
    "distributed/parallel/test_parity.py::test_families_of_mixtures_that_follow_routes_equal_one_process": (
        "qwen3_moe",
    ),
    "distributed/parallel/test_parity.py::test_layouts_of_a_mixture_equal_one_process": (
        *("{'cp': 2, 'tp': 2", "{'pp': 2, 'dp_shard'"),
    ),
    "distributed/parallel/test_parity.py::test_layouts_of_a_dense_model_equal_one_process": (
        *("[{'dp_shard': 2}]", "{'tp': 2, 'seq", "{'pp': 2, 'tp'"),
    ),
    "distributed/parallel/test_parity.py::test_thirteen_stages_of_2_layers_and_one_of_1_equal_one_process": ALL,
    "distributed/parallel/test_parity.py::test_four_stages_of_7_6_8_and_6_layers_equal_one_process": ALL,
    "distributed/parallel/test_parity.py::test_mixtures_of_nemo_automodel_equal_one_process": ("qwen3_moe",),
    "distributed/parallel/test_parity.py::test_the_auxiliary_loss_of_mixtures_equals_one_process": ALL,
    "distributed/parallel/test_resharding.py::test_layouts_equal_one_process": (
        *(
            "qwen3_moe-False-{'dp_shard': 2, 'cp'",
            "qwen3-True-{'pp': 2, 'dp_shard'",
        ),
    ),
    "distributed/parallel/test_resharding.py::test_recomputed_layers_equal_one_process": ALL,
    "distributed/parallel/test_resharding.py::test_layouts_that_only_reduce_each_microbatch_equal_one_process": (
        "GPipe",
    ),
    "distributed/optimizers/test_muon.py::test_layouts_equal_one_process": ("{'tp': 2, 'dp_shard'",),
    "distributed/mixture/test_router_replay.py::test_uneven_virtual_stages_of_27_layers_map_by_number": ALL,
    "distributed/parallel/test_parity.py::test_27_layers_as_13_and_14_equal_one_process": ALL,
    "distributed/mixture/test_router_replay.py::test_27_layers_of_which_the_first_is_dense_map_by_number": ALL,
    "distributed/mixture/test_router_replay.py::test_layouts_with_routes_equal_one_process": (
        *("{'dp_shard': 2, 'ep': 2}-selective", "ZBVZeroBubble"),
    ),
    # Multimodal models.
    "distributed/model/test_vision.py::test_any_layout_of_either_module_equals_one_process": (
        *("cp, tp and sequence parallel", "V placement"),
    ),
    "distributed/model/test_vision.py::test_images_that_are_seen_both_ways_equal_one_process": ("pp=2",),
    "distributed/model/test_vision.py::test_features_that_enter_several_layers_equal_one_process": (
        "pp, tp and sequence",
    ),
    "distributed/model/test_vision.py::test_another_encoder_equals_one_process": ALL,
    "distributed/model/test_vision.py::test_modules_on_meshes_of_their_own_equal_one_process": (
        "llava-vision one rank on ranks 0, language pp 2",
    ),
    "distributed/model/test_vision.py::test_rows_of_images_with_breaks_equal_one_process": ("mistral3-2",),
    "distributed/model/test_vision.py::test_frozen_parts_leave_the_others_right": ("vision and projector",),
    "distributed/model/test_audio.py::test_a_model_with_two_encoders_equals_one_process": ("one beside",),
    "distributed/model/test_audio.py::test_a_model_that_hears_equals_one_process": ("frozen",),
    "distributed/lora/test_vision.py::test_training_and_files_are_those_of_peft": ("experts and projector",),
    "distributed/model/test_vision.py::test_both_modules_on_all_ranks_equal_one_process": ("tied, pp", "selective"),
    "distributed/trainers/test_vision.py::test_rewards_of_pictures_are_learned_from_alike_on_any_placement": (
        "qwen3_vl_moe",
    ),
    "distributed/trainers/test_vision.py::test_adapters_learn_from_rewards_of_pictures_and_go_on_elsewhere": ALL,
    "distributed/trainers/test_audio.py::test_an_algorithm_trains_alike_on_any_placement": ("[sft]",),
    # Compiled layers: each case compiles for half a minute.
    "distributed/model/test_compiled.py::test_a_warm_up_leaves_no_graph_to_steps_and_changes_none": ("pp",),
    "distributed/model/test_compiled.py::test_microbatches_of_any_size_need_no_graph_of_their_own": (
        "qwen3_moe-{}-full",
    ),
    "distributed/serve/test_together.py::test_compiled_layers_take_each_microbatchs_gate": ("False",),
    "distributed/serve/test_together.py::test_runs_that_meet_get_what_they_get_alone": ("sizes4",),
    # verify: `make faults` plants these and many more.
    "distributed/tools/test_verify.py::test_planted_bugs_show_where_they_strike": (
        *("local token counts", "qwen3-sizes0", "routes shifted"),
    ),
    "distributed/tools/test_verify.py::test_planted_bugs_of_modules_show_where_they_strike": ("off by one",),
    "distributed/tools/test_verify.py::test_sound_layouts_are_equal": ("gemma2",),
    "distributed/tools/test_verify.py::test_modules_of_a_config_get_a_verdict": ALL,
    # Clients that pip installs; their requests are replayed in each commit.
    "unit/rollout/agents/test_real_clients.py::test_a_real_client_trains_what_was_sampled": ALL,
    # Whole runs, where another run of each commit goes the same way.
    "distributed/trainers/test_real_vllm.py::test_a_run_that_stops_and_loses_its_vllm_goes_on_to_the_same_losses": ALL,
    "distributed/trainers/test_real_vllm.py::test_families_of_every_kind_are_sampled_from_as_they_are_trained": (
        "qwen3_moe",
        "granitemoehybrid",
    ),
    "distributed/trainers/test_real_vllm.py::test_pictures_are_seen_as_in_training": ("internvl",),
    "distributed/trainers/test_real_vllm.py::test_drafted_tokens_have_the_probabilities_of_the_model": ("[3]",),
    "distributed/trainers/test_real_vllm.py::test_the_exported_layer_drafts_as_it_was_trained": ALL,
    "distributed/trainers/test_real_vllm.py::test_servers_get_the_weights_too": ALL,
    "distributed/trainers/test_real_vllm.py::test_adapters_alone_are_applied_as_they_are_trained": ALL,
    "distributed/ray/test_job.py::"
    "test_sft_that_loses_a_node_has_the_numbers_of_an_undisturbed_run_of_our_own_launcher": ALL,
    "distributed/ray/test_job.py::test_a_policy_trains_from_a_program_without_a_rank": ALL,
    "distributed/trainers/test_grpo_generators.py::"
    "test_a_run_with_generators_ahead_goes_on_with_the_prompts_it_had_not_trained_on": ALL,
    "distributed/trainers/test_grpo_generators.py::test_a_generator_that_dies_in_validation_loses_no_step": ALL,
    "distributed/trainers/test_router_replay.py::"
    "test_routes_of_batches_that_generators_in_processes_wrote_ahead_are_followed": ALL,
    "distributed/trainers/test_resume.py::test_a_run_may_go_on_from_any_checkpoint_in_a_folder_of_its_own": ALL,
    "distributed/trainers/test_real_vllm.py::test_conversations_go_on_with_answers_of_an_environment": ALL,
    "distributed/trainers/test_grpo_generators.py::"
    "test_a_generator_that_stays_dead_ends_the_run_with_nothing_lost": ALL,
    "distributed/trainers/test_router_replay.py::test_a_pipeline_with_replay_follows_one_process": ALL,
    "distributed/trainers/test_vision.py::test_pairs_with_pictures_train_alike_on_any_placement": ALL,
    "distributed/trainers/test_vision.py::test_a_run_goes_on_with_the_modules_on_other_ranks": ALL,
    "distributed/ray/test_job.py::test_grpo_on_two_nodes_has_the_numbers_of_our_own_launcher": ALL,
    "distributed/trainers/test_resume.py::test_a_run_whose_first_step_failed_is_begun_anew": ("[sft]",),
    "distributed/trainers/test_resume.py::test_a_run_saves_and_stops_before_its_time_is_up": ALL,
    "distributed/trainers/test_resume.py::test_ranks_that_an_agent_starts_again_go_on_by_themselves": ALL,
    "distributed/trainers/test_resume.py::test_a_run_whose_terminal_is_closed_saves_and_stops": ALL,
    "distributed/trainers/test_resume.py::test_a_finished_run_stays_as_it_is": ("checkpoints-sft",),
    "distributed/trainers/test_chaos.py::test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one": ALL,
    "distributed/trainers/test_conversations.py::test_odd_environments_cost_their_conversations": ALL,
    "distributed/trainers/test_grpo_generators.py::test_it_does_not_matter_in_which_process_the_generator_is": ALL,
    "distributed/trainers/test_grpo_generators.py::test_the_others_write_what_a_dead_generator_was_to_write": ALL,
    "distributed/trainers/test_grpo_generators.py::"
    "test_a_generator_that_does_not_come_back_is_left_out_while_others_write": ALL,
    "distributed/trainers/test_grpo_generators.py::"
    "test_ranks_that_share_a_generator_leave_the_writing_to_the_first": ALL,
    "distributed/trainers/test_loops.py::test_the_loops_of_the_examples_learn_and_on_two_ranks_as_on_one": (
        "best_of_n",
    ),
    "distributed/trainers/test_grpo_generators.py::"
    "test_a_generator_that_dies_ahead_of_training_does_not_make_the_others_completions_older": ALL,
    "distributed/trainers/test_grpo.py::test_rollouts_tell_advantages_and_both_log_probabilities": ("[2]",),
    "distributed/trainers/test_grpo.py::test_old_logprobs_are_left_out_where_they_are_those_of_the_step": ALL,
    "distributed/trainers/test_grpo.py::test_sequences_are_trained_with_the_advantages_of_their_rewards": (
        "temperature",
    ),
    "distributed/trainers/test_sft.py::test_a_job_of_another_size_is_refused": ALL,
    "distributed/trainers/test_sft.py::test_a_run_goes_on_on_another_layout": ALL,
    "distributed/trainers/test_sft.py::test_the_last_checkpoints_and_the_best_are_kept": ALL,
    "distributed/trainers/test_dpo.py::test_a_reference_computed_before_is_that_of_every_step": ALL,
    "distributed/trainers/test_grpo.py::test_adapters_may_reach_the_generator_alone": ALL,
    "distributed/trainers/test_weight_probe.py::test_right_weights_pass": ALL,
    "distributed/trainers/test_adapters.py::test_grpo_goes_on_with_the_adapters_of_sft_or_with_the_merged_model": ALL,
    "distributed/serve/test_serve.py::"
    "test_runs_go_on_from_saved_weights_after_a_rank_and_after_the_server_is_killed": ALL,
    "distributed/serve/test_vllm.py::test_vllm_samples_as_each_request_asks_and_is_started_again": ALL,
    "distributed/serve/test_all_weights.py::test_a_run_of_all_weights_trains_is_sampled_from_and_goes_on": ALL,
    # The rest.
    "distributed/weight_sync/test_failures.py::test_an_generator_that_is_lost_in_a_sync_is_noticed_and_replaced": (
        "collective-dies",
    ),
    "distributed/optimizers/test_muon.py::test_an_encoder_on_a_mesh_of_its_own_equals_one_process": ALL,
    "distributed/engine/test_rollout_offload.py::test_offloading_changes_no_number": ("deepseek_v3",),
    "distributed/engine/test_reference_weights.py::test_the_reference_stays_and_the_policy_comes_back": (
        "deepseek_v3-{'dp_shard'",
    ),
    "distributed/launch/test_failures.py::test_the_job_ends_soon_and_one_block_names_rank_host_phase_and_cause": (
        *("launcher0", "launcher1", "launcher2"),
    ),
    "distributed/checkpoint/test_failures.py::test_one_rank_that_cannot_write_is_known_to_the_program": ("(1,)",),
    "distributed/checkpoint/test_state.py::test_a_checkpoint_goes_on_on_another_layout": (*("written2",),),
    "distributed/step/test_failed_steps.py::test_a_loss_that_raises_and_is_caught_leaves_no_trace": ("float64-(0,)",),
    "distributed/weight_sync/test_sync.py::test_every_layout": ("pp2 x ep2", "ep2 of 4", "replicas-True"),
    "distributed/tools/test_export.py::test_both_formats_are_written": ALL,
    "distributed/tools/test_plan.py::test_a_thousand_ranks_take_seconds": ALL,
    "unit/model/test_logprobs.py::test_memory_is_a_tenth_of_the_naive_way": ALL,
    "unit/tools/test_recipes.py::test_recipes_fit_their_devices": ("grpo",),
}
"""Tests by file and name, and parts of the ids that stay in each commit; none of them stays with `ALL`."""


def is_longer(name: str) -> bool:
    """Whether a test belongs to `make longer`.

    Args:
        name: the test's id, below `tests/`.
    """
    function, _, _ = name.partition("[")
    stays = LONGER.get(function)
    return stays is not None and not any(part in name.removeprefix(function) for part in stays)
